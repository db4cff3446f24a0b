"""Commands that ask for something: approve, reject, trigger, fault, stop."""

from __future__ import annotations

import time
import uuid
from typing import Literal, get_args

import click

from runtime.commands.common import (
    ask,
    json_option,
    open_active_run,
    run_option,
    wait_option,
    who,
)
from runtime.errors import UserError
from storage.commands import Decide, Fault, Stop, Trigger
from storage.live.port import LiveStore
from storage.records import ActionKind, Proposal, RunState


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
    store, state = open_active_run(run_id)
    proposal = _proposal(store, state, proposal_id)
    chosen = proposal.recommended if option is None else option
    if not 0 <= chosen < len(proposal.options):
        raise UserError(f"--option is {chosen}; allowed: 0 to {len(proposal.options) - 1}")
    picked = proposal.options[chosen]
    if chosen != proposal.recommended and not reason.strip():
        raise UserError("--reason is empty; choosing another than the recommended option needs one")
    if not yes:
        click.confirm(
            f"{picked.title}: predicted {picked.step_s:.2f} s/step, goodput "
            f"{picked.goodput:.1%}, pauses {picked.cost_s:.1f} s. Approve?",
            abort=True,
            err=True,
        )
    ask(store, state, _decide(proposal, "approved", reason, chosen), wait_s, as_json=as_json)


@click.command()
@click.argument("proposal_id", metavar="PROPOSAL")
@click.option("--reason", required=True, help="Why; kept with the decision.")
@run_option
@wait_option
@json_option
def reject(proposal_id: str, reason: str, run_id: str, wait_s: float, as_json: bool) -> None:
    """Reject a proposal; the run stays as it is."""
    store, state = open_active_run(run_id)
    proposal = _proposal(store, state, proposal_id)
    ask(store, state, _decide(proposal, "rejected", reason), wait_s, as_json=as_json)


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
    store, state = open_active_run(run_id)
    ask(store, state, _trigger(replica, kind, reason), wait_s, as_json=as_json)


@click.command()
@click.argument("proposal_id", metavar="PROPOSAL")
@click.option("--reason", required=True, help="Why; kept with the proposal.")
@run_option
@wait_option
@json_option
def undo(proposal_id: str, reason: str, run_id: str, wait_s: float, as_json: bool) -> None:
    """Ask for the inverse of an applied proposal: it becomes a proposal with its prediction."""
    store, state = open_active_run(run_id)
    proposal = _proposal(store, state, proposal_id)
    command = _trigger(proposal.replica, proposal.kind, reason, undoes=proposal.id)
    ask(store, state, command, wait_s, as_json=as_json)


@click.command()
@click.argument("kind", type=click.Choice(["kill", "hang", "slow", "corrupt", "repair"]))
@click.argument("gpu", metavar="RACK/SLOT")
@click.option("--factor", default=2.0, show_default=True, help="How many times slower (slow).")
@run_option
@wait_option
@json_option
def fault(kind: str, gpu: str, factor: float, run_id: str, wait_s: float, as_json: bool) -> None:
    """Inject a fault into an emulated GPU, or report any GPU repaired.

    kill: its worker gets SIGKILL. hang: SIGSTOP. slow: the emulated device runs slower; repair
    brings it back to speed, or brings a dead GPU back. corrupt: a bit of its state flips, silently.
    """
    store, state = open_active_run(run_id)
    ask(
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
        as_json=as_json,
    )


@click.command()
@click.option("--reason", default="stopped by hand", help="Kept with the run.")
@run_option
@wait_option
@json_option
def stop(reason: str, run_id: str, wait_s: float, as_json: bool) -> None:
    """End a run cleanly at the next step boundary."""
    store, state = open_active_run(run_id)
    command = Stop(id=uuid.uuid4().hex, at=time.time(), who=who(), via="cli", reason=reason)
    ask(store, state, command, wait_s, as_json=as_json)


def _proposal(store: LiveStore, state: RunState, proposal_id: str) -> Proposal:
    proposal = store.get_proposal(state.run, proposal_id)
    if proposal is None:
        open_ids = [p.id for p in store.list_proposals(state.run) if p.state == "open"]
        raise UserError(
            f"proposal {proposal_id!r} is not known in run {state.run}; "
            f"open: {', '.join(open_ids) or 'none'}"
        )
    return proposal


def _decide(
    proposal: Proposal,
    verdict: Literal["approved", "rejected"],
    reason: str,
    option: int | None = None,
) -> Decide:
    return Decide(
        id=uuid.uuid4().hex,
        at=time.time(),
        who=who(),
        via="cli",
        proposal=proposal.id,
        generation=proposal.generation,
        revision=proposal.revision,
        verdict=verdict,
        option=option,
        reason=reason,
    )


def _trigger(replica: int, kind: ActionKind, reason: str, undoes: str = "") -> Trigger:
    return Trigger(
        id=uuid.uuid4().hex,
        at=time.time(),
        who=who(),
        via="cli",
        replica=replica,
        kind=kind,
        reason=reason,
        undoes=undoes,
    )
