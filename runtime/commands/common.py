"""What the commands share: opening stores, finding the run, printing tables and JSON."""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from runtime.errors import UserError
from storage.commands import Command, CommandResult
from storage.identity import sign, writer_key
from storage.live.acl import ROLES as REDIS_ROLES
from storage.live.acl import as_role
from storage.live.port import LiveStore, LiveStoreDown
from storage.live.redis_store import RedisStore
from storage.records import RunState
from storage.settings import Settings

wait_option = click.option(
    "--wait", "wait_s", default=30.0, show_default=True, metavar="SECONDS",
    help="How long to wait for the runtime's answer.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
run_option = click.option(
    "--run", "run_id", default="", metavar="RUN", help="Which run; default: the newest."
)


def open_live(settings: Settings) -> LiveStore:
    """The live store of this home.

    Raises:
        UserError: it does not answer.
    """
    store = RedisStore.for_ui(as_role(settings, "app", *REDIS_ROLES).redis_url)
    try:
        store.ping()
    except LiveStoreDown as error:
        raise UserError(
            f"no live state: {error}\nStart a run with `counterpoise up`, or set COUNTERPOISE_HOME "
            "or COUNTERPOISE_REDIS_URL to where one runs."
        ) from error
    return store


def find_run(store: LiveStore, run_id: str) -> RunState:
    """The named run, or the newest.

    Raises:
        UserError: there is none.
    """
    if run_id:
        state = store.get_run(run_id)
        if state is None:
            known = ", ".join(run.run for run in store.list_runs()[:5]) or "none"
            raise UserError(f"run {run_id!r} is not known; newest runs: {known}")
        return state
    runs = store.list_runs()
    if not runs:
        raise UserError("no run yet; start one with `counterpoise up`")
    active = [run for run in runs if run.status not in ("stopped", "failed")]
    return (active or runs)[0]


def open_active_run(run_id: str) -> tuple[LiveStore, RunState]:
    """The live store and the named (or newest) run, which must still be on.

    Raises:
        UserError: the store does not answer, there is no such run, or it is over.
    """
    store = open_live(Settings.from_env())
    state = find_run(store, run_id)
    if state.status in ("stopped", "failed"):
        raise UserError(f"run {state.run} is over ({state.status}: {state.status_reason})")
    return store, state


def who() -> str:
    """The person at this shell, by operating system account."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def send(store: LiveStore, run: str, command: Command, wait_s: float) -> CommandResult:
    """Sign and submit a command and wait for the controller's answer, up to `wait_s`.

    Whoever has the key of the command line acts as admin: it lies in a file of its owner only.
    """
    command = sign(command, run, "admin", writer_key(Settings.from_env().home, "cli"))
    result = store.submit(run, command, time.time())
    if not result.ok:
        return result
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        answer = store.get_result(run, command.id)
        if answer is not None and answer.code != "accepted":
            return answer
        time.sleep(0.05)
    return msgspec.structs.replace(
        result, message="queued; the controller has not answered yet (see `counterpoise status`)"
    )


def ask(
    store: LiveStore, state: RunState, command: Command, wait_s: float, *, as_json: bool
) -> None:
    """Send a command, print the answer; exits with 1 when it was refused."""
    result = send(store, state.run, command, wait_s)
    if as_json:
        print_json(result)
    else:
        click.echo(f"{result.code}: {result.message}", err=not result.ok)
    if not result.ok:
        sys.exit(1)


def print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; a head that starts with '>' is right-aligned."""
    right = [name.startswith(">") for name in head]
    cells = [[name.lstrip(">") for name in head], *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        line = "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        )
        click.echo(line.rstrip())


def ago(at: float, now: float) -> str:
    seconds = max(0.0, now - at)
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago"
