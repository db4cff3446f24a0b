"""Pause a run and let it go on."""

from __future__ import annotations

import time
import uuid

import click

from runtime.commands.common import ask, json_option, open_active_run, run_option, wait_option, who
from storage.commands import Pause, Resume

_reason_option = click.option("--reason", default="", help="Kept with the run.")


@click.command()
@_reason_option
@run_option
@wait_option
@json_option
def pause(reason: str, run_id: str, wait_s: float, as_json: bool) -> None:
    """Let a run stand still from the next step boundary on, until `resume`.

    Its processes live on and keep their state: no step is lost, and going on takes a moment.
    """
    _ask(Pause, reason, run_id, wait_s, as_json=as_json)


@click.command()
@_reason_option
@run_option
@wait_option
@json_option
def resume(reason: str, run_id: str, wait_s: float, as_json: bool) -> None:
    """Go on with a paused run, with every GPU it had that is still there."""
    _ask(Resume, reason, run_id, wait_s, as_json=as_json)


def _ask(
    kind: type[Pause | Resume], reason: str, run_id: str, wait_s: float, *, as_json: bool
) -> None:
    store, state = open_active_run(run_id)
    command = kind(id=uuid.uuid4().hex, at=time.time(), who=who(), via="cli", reason=reason)
    ask(store, state, command, wait_s, as_json=as_json)
