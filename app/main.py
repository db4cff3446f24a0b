"""Entry of the dashboard: page, navigation, header strip. Run it as `python -m streamlit run
app/main.py`.
"""

from __future__ import annotations

import streamlit as st

from app import access, context, header
from app.views import history, incidents, overview, power, racks, reconfigure, replicas
from storage.settings import SettingsError


def main() -> None:
    """One script run: the frame, then the page that the address names."""
    st.set_page_config(page_title="Counterpoise", layout="wide", initial_sidebar_state="collapsed")
    try:
        context.settings()
        access.sign_in()
    except SettingsError as error:
        st.markdown(f"**The dashboard cannot start as it is set up.** {error}.")
        st.markdown("Correct it, then start the dashboard again.")
        return
    if not access.admit():
        return
    context.note_sign_in()
    pages = [
        st.Page(overview.render, title="Overview", url_path="home", default=True),
        st.Page(racks.render, title="Racks", url_path="racks"),
        st.Page(replicas.render, title="Replicas", url_path="replicas"),
        st.Page(power.render, title="Power", url_path="power"),
        st.Page(reconfigure.render, title="Reconfigure", url_path="reconfigure"),
        st.Page(incidents.render, title="Incidents", url_path="incidents"),
        st.Page(history.render, title="History", url_path="history"),
    ]
    context.remember_pages(pages)
    # The default page lives at the root alone; its own name leads there too
    alias = st.Page(_to_overview, title="To overview", url_path="overview", visibility="hidden")
    page = st.navigation([*pages, alias], position="top")
    if page.url_path == alias.url_path:
        page.run()
        return
    st.session_state["page"] = page.url_path
    header.render()
    page.run()


def _to_overview() -> None:
    context.open_page("overview", **{name: st.query_params[name] for name in st.query_params})


if __name__ == "__main__":
    main()
