"""`python -m counterpoise`, and the module beside which Streamlit looks for our components' files."""

from __future__ import annotations

if __name__ == "__main__":
    from runtime.cli import main

    main()
