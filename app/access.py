"""Who acts in this session, and the page that stands where nobody is signed in.

Asked anew at every turn, never kept: a sign-in that has run out, or a role that the proxy no longer
says, ends what its session may do.
"""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable

import streamlit as st

from app.components.registry import mount
from storage.settings import SettingsError
from storage.sign_in import NotSignedInError, Person, SignIn


@st.cache_resource(max_entries=1)
def sign_in() -> SignIn:
    """The checked configuration of this dashboard.

    Raises:
        SettingsError: says what is wrong with it.
    """
    found = SignIn.from_env()
    found.check_address(st.get_option("server.address"))
    if found.mode == "oidc" and str(found.secrets_file) not in st.get_option("secrets.files"):
        raise SettingsError(
            f"the sign-in's secrets in {found.secrets_file} are not loaded; "
            "start the dashboard with `counterpoise app`"
        )
    return found


def person() -> Person:
    """Who acts now.

    Raises:
        NotSignedInError: nobody, or nobody with a role.
    """
    how = sign_in()
    if how.mode == "local":
        how.check_host(st.context.headers.get("Host"))
        return Person(who=_account(), role="admin")
    if how.mode == "proxy":
        return how.by_headers(st.context.headers.get_all)
    if not st.user.is_logged_in:
        raise NotSignedInError("Sign in to see runs and to answer proposals.")
    return how.by_claims(st.user.to_dict(), time.time())


def admit() -> bool:
    """Whether somebody with a role is here; shows the page to sign in on otherwise."""
    try:
        person()
    except NotSignedInError as why:
        _door(str(why))
        return False
    if sign_in().mode == "oidc":
        mount("door", {"open": True}, "door", height=1)
    return True


def note() -> str:
    """Who may act as whom; stands on every page."""
    how = sign_in()
    try:
        found = person()
    except NotSignedInError as why:
        return str(why)
    if how.mode == "local":
        where = how.published_on or st.get_option("server.address")
        return f"Local mode: anyone who can open this page on {where} may approve, as {found.who}."
    return f"Signed in as {found.who}, {found.role}."


def sign_out_control(before: Callable[[], None] = lambda: None) -> None:
    """A way out, where there is one: local mode has none. before: called first."""
    how = sign_in()
    if how.mode == "oidc":

        def leave() -> None:
            before()
            st.logout()

        st.button("Sign out", key="sign_out", on_click=leave, width="stretch")
    elif how.mode == "proxy" and how.sign_out:
        st.link_button("Sign out", how.sign_out, width="stretch")


def has_way_out() -> bool:
    how = sign_in()
    return how.mode == "oidc" or (how.mode == "proxy" and bool(how.sign_out))


def _door(why: str) -> None:
    st.markdown("### Counterpoise")
    st.markdown(why)
    if sign_in().mode == "oidc":
        mount("door", {"open": False}, "door", height=1)
        st.button("Sign in", key="sign_in", type="primary", on_click=st.login)
        if not st.user.is_logged_in:
            return
    with st.container(width=200):
        sign_out_control()


def _account() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"uid {os.getuid()}"
