"""Commands that ask for something: approve, reject, trigger, fault, stop."""

from __future__ import annotations

import sys
import time
import uuid
from typing import get_args

import click

from runtime.commands.common import (
    find_run,
    json_option,
    open_live,
    print_json,
    run_option,
    send,
    who,
)
from runtime.errors import UserError
from storage.live.port import LiveStore
from storage.records import (
    ActionKind,
    Command,
    CommandResult,
    Decide,
    Fault,
    Proposal,
    RunState,
    Stop,
    Trigger,
)
from storage.settings import Settings

wait_option = click.option(
    "--wait", "wait_s", default=30.0, show_default=True, metavar="SECONDS",
    help="How long to wait for the runtime's answer.",
)  # fmt: skip


@click.command()
@click.argument("proposal_id", metavar="PROPOSAL")
@click.option(
    "--option", type=int, default=None, help="Number of the option; default: recommended."
)
@click.option("--reason", default="", help="Kept with the decision.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@run_option
@wait_option
@json_option
def approve(
    proposal_id: str,
    option: int | None,
    reason: str,
    yes: bool,
    run_id: str,
    wait_s: float,
    as_json: bool,
) -> None:
    """Approve a proposal; it is applied at the next step boundary."""
    store, state = _open(run_id)
    proposal = _proposal(store, state, proposal_id)
    chosen = proposal.recommended if option is None else option
    if not 0 <= chosen < len(proposal.options):
        raise UserError(f"--option is {chosen}; allowed: 0 to {len(proposal.options) - 1}")
    picked = proposal.options[chosen]
    if not yes:
        click.confirm(
            f"{picked.title}: predicted {picked.step_s:.2f} s/step, goodput "
            f"{picked.goodput:.1%}, pauses {picked.cost_s:.1f} s. Approve?",
            abort=True,
            err=True,
        )
    _finish(
        store,
        state,
        Decide(
            id=uuid.uuid4().hex,
            at=time.time(),
            who=who(),
            via="cli",
            proposal=proposal.id,
            generation=proposal.generation,
            revision=proposal.revision,
            verdict="approved",
            option=chosen,
            reason=reason,
        ),
        wait_s,
        as_json,
    )


@click.command()
@click.argument("proposal_id", metavar="PROPOSAL")
@click.option("--reason", required=True, help="Why; kept with the decision.")
@run_option
@wait_option
@json_option
def reject(proposal_id: str, reason: str, run_id: str, wait_s: float, as_json: bool) -> None:
    """Reject a proposal; the run stays as it is."""
    store, state = _open(run_id)
    proposal = _proposal(store, state, proposal_id)
    _finish(
        store,
        state,
        Decide(
            id=uuid.uuid4().hex,
            at=time.time(),
            who=who(),
            via="cli",
            proposal=proposal.id,
            generation=proposal.generation,
            revision=proposal.revision,
            verdict="rejected",
            reason=reason,
        ),
        wait_s,
        as_json,
    )


@click.command()
@click.argument("kind", type=click.Choice(get_args(ActionKind)))
@click.argument("replica", type=int)
@click.option("--reason", default="", help="Kept with the proposal.")
@run_option
@wait_option
@json_option
def trigger(
    kind: ActionKind, replica: int, reason: str, run_id: str, wait_s: float, as_json: bool
) -> None:
    """Ask for a reconfiguration of REPLICA by hand: it becomes a proposal with its prediction."""
    store, state = _open(run_id)
    _finish(
        store,
        state,
        Trigger(
            id=uuid.uuid4().hex,
            at=time.time(),
            who=who(),
            via="cli",
            replica=replica,
            kind=kind,
            reason=reason,
        ),
        wait_s,
        as_json,
    )


@click.command()
@click.argument("kind", type=click.Choice(["kill", "hang", "slow", "repair"]))
@click.argument("gpu", metavar="RACK/SLOT")
@click.option("--factor", default=2.0, show_default=True, help="How many times slower (slow).")
@run_option
@wait_option
@json_option
def fault(kind: str, gpu: str, factor: float, run_id: str, wait_s: float, as_json: bool) -> None:
    """Inject a fault into an emulated GPU, or report any GPU repaired.

    kill: its worker gets SIGKILL. hang: SIGSTOP. slow: the emulated device runs slower; repair
    brings it back to speed, or brings a dead GPU back.
    """
    store, state = _open(run_id)
    _finish(
        store,
        state,
        Fault(
            id=uuid.uuid4().hex,
            at=time.time(),
            who=who(),
            via="cli",
            gpu=gpu,
            kind=kind,  # type: ignore[arg-type]
            factor=factor if kind == "slow" else 1.0,
        ),
        wait_s,
        as_json,
    )


@click.command()
@click.option("--reason", default="stopped by hand", help="Kept with the run.")
@run_option
@wait_option
@json_option
def stop(reason: str, run_id: str, wait_s: float, as_json: bool) -> None:
    """End a run cleanly at the next step boundary."""
    store, state = _open(run_id)
    command = Stop(id=uuid.uuid4().hex, at=time.time(), who=who(), via="cli", reason=reason)
    _finish(store, state, command, wait_s, as_json)


def _open(run_id: str) -> tuple[LiveStore, RunState]:
    store = open_live(Settings.from_env())
    state = find_run(store, run_id)
    if state.status in ("stopped", "failed"):
        raise UserError(f"run {state.run} is over ({state.status}: {state.status_reason})")
    return store, state


def _proposal(store: LiveStore, state: RunState, proposal_id: str) -> Proposal:
    proposal = store.get_proposal(state.run, proposal_id)
    if proposal is None:
        open_ids = [p.id for p in store.list_proposals(state.run) if p.state == "open"]
        raise UserError(
            f"proposal {proposal_id!r} is not known in run {state.run}; "
            f"open: {', '.join(open_ids) or 'none'}"
        )
    return proposal


def _finish(
    store: LiveStore, state: RunState, command: Command, wait_s: float, as_json: bool
) -> None:
    result: CommandResult = send(store, state.run, command, wait_s)
    if as_json:
        print_json(result)
    else:
        click.echo(f"{result.code}: {result.message}", err=not result.ok)
    if not result.ok:
        sys.exit(1)
