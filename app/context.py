"""What a session needs: the shared clients, the selected run, how often it ticks, and who acts.

The only place of the app that opens stores; each is opened once and shared by all sessions.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

import streamlit as st
from streamlit.navigation.page import StreamlitPage
from streamlit.runtime.scriptrunner import get_script_run_ctx

from app import access
from app.commands import Author, Commands
from app.lookback import Lookback
from app.queries import LiveReader, LiveSnapshot
from storage.commands import Command
from storage.identity import least_role, may, writer_key
from storage.live.acl import as_role
from storage.live.port import LiveStore
from storage.live.redis_store import RedisStore
from storage.records import RunState
from storage.settings import Settings
from storage.sign_in import NotSignedInError

TICK_S = 1.0
NOTE_AGAIN_S = 10.0
ENDED = ("stopped", "failed")


@st.cache_resource(max_entries=1)
def settings() -> Settings:
    return as_role(Settings.from_env(), "app")


@st.cache_resource(max_entries=1)
def _store() -> LiveStore:
    return RedisStore.for_ui(settings().redis_url)


@st.cache_resource(max_entries=1)
def reader() -> LiveReader:
    return LiveReader(_store())


@st.cache_resource(max_entries=1)
def lookback() -> Lookback:
    return Lookback(settings().database_url)


def author() -> Author:
    """Who acts in this session now; somebody without a role where the sign-in has ended."""
    try:
        found = access.person()
    except NotSignedInError:
        return Author(who="nobody", role="")
    return Author(who=found.who, role=found.role)


def lacks(kind: type[Command]) -> str:
    """Why the person here may not ask for commands of `kind`, "" where they may."""
    role = author().role
    if may(role, kind):
        return ""
    return f"This takes the role {least_role(kind)} or higher; yours is {role or 'none'}."


@st.cache_resource(max_entries=1)
def _key() -> bytes:
    return writer_key(settings().home, "app")


def commands() -> Commands:
    return Commands(_store(), author(), key=_key())


def note_sign_in() -> None:
    """Tell the audit who acts in this session and in which role, once, and again if that changes.

    With the live store away it is tried again later: waiting for it would hold up every page.
    """
    now, state = author(), st.session_state
    if state.get("noted_as") == now or time.monotonic() < state.get("note_after", 0.0):
        return
    if commands().tell("signed in"):
        state["noted_as"] = now
    else:
        state["note_after"] = time.monotonic() + NOTE_AGAIN_S


def note_sign_out() -> None:
    commands().tell("signed out")


def tick_s() -> float:
    """Seconds between two ticks of this session. Sessions differ by up to 10 %, so that their ticks
    drift apart instead of queueing behind one another.
    """
    context = get_script_run_ctx()
    spread = zlib.crc32(context.session_id.encode()) % 100 if context else 0
    return TICK_S + spread / 1000


def selected_run() -> str | None:
    """The run this session looks at: of the address, else chosen before, else the newest that
    lives.

    On History the address names a run of the past, which the live store may no longer know.
    """
    runs, _ = reader().runs()
    asked = st.query_params.get("run")
    past = st.session_state.get("page") == "history"
    if asked and (not past or any(run.run == asked for run in runs)):
        st.session_state["run"] = asked
        return asked
    if chosen := st.session_state.get("run"):
        return str(chosen)
    return newest(runs)


def newest(runs: list[RunState]) -> str | None:
    """The newest run that has not ended, else the newest, else None. `runs`: newest first."""
    living = [run.run for run in runs if run.status not in ENDED]
    ordered = living or [run.run for run in runs]
    return ordered[0] if ordered else None


def select_run(run: str) -> None:
    st.session_state["run"] = run
    st.query_params["run"] = run


def remember_pages(pages: Sequence[StreamlitPage]) -> None:
    """Note the pages of this session, so that one page can open another."""
    st.session_state["pages"] = {page.url_path or page.title.lower(): page for page in pages}


def open_page(name: str, **query: str) -> None:
    """Go to another page; `query` goes into its address."""
    st.switch_page(st.session_state["pages"][name], query_params=query)


def snapshot() -> LiveSnapshot:
    """The snapshot of the selected run; empty, with the reason in `down`, where there is none."""
    run = selected_run()
    if run is None:
        return LiveSnapshot(down=reader().runs()[1])
    return reader().read(run)
