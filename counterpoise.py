"""`python -m counterpoise`, and the place beside which Streamlit looks for components."""

from __future__ import annotations

if __name__ == "__main__":
    from runtime.cli import main

    main()
