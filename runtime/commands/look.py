"""Commands that read: status, proposals, runs."""

from __future__ import annotations

import time

import click
import msgspec

from runtime.commands.common import (
    ago,
    find_run,
    json_option,
    open_live,
    print_json,
    print_table,
    run_option,
)
from runtime.commands.notify import print_notifier
from storage.history.queries import History
from storage.records import Proposal, ReplicaState, RunState
from storage.settings import Settings


@click.command()
@run_option
@json_option
def status(run_id: str, as_json: bool) -> None:
    """Show the live state of a run: step, loss, goodput, every replica's shape."""
    store = open_live(Settings.from_env())
    state = find_run(store, run_id)
    notifier = store.get_notifier()
    if as_json:
        print_json({**msgspec.to_builtins(state), "notifier": notifier})
        return
    now = time.time()
    kind = "emulated devices" if state.emulated else state.device
    click.echo(f"{state.run}  {state.status}  {kind}  {state.policy}")
    if state.status_reason:
        click.echo(f"  {state.status_reason}")
    loss = f"{state.loss:.4f}" if state.loss is not None else "-"
    click.echo(
        f"step {state.step}  loss {loss}  {state.tokens_per_s:,.0f} tokens/s  "
        f"{state.step_s:.2f} s/step  generation {state.generation}, "
        f"{state.moved_bytes / 1e6:.2f} MB of state moved for it"
    )
    click.echo(
        f"goodput: time {state.time_goodput:.1%}, tokens {state.token_goodput:.1%} "
        f"of the healthy run over {state.wall_s:.0f} s"
    )
    click.echo(f"updated {ago(state.updated_at, now)}\n")
    print_table(
        ["replica", "rack", "mode", ">degree", "slots", ">samples", ">share", ">boost", "spares"],
        [_replica_row(replica) for replica in state.replicas],
    )
    waiting = [p for p in store.list_proposals(state.run) if p.state == "open"]
    if waiting:
        click.echo("\nWaiting for an answer:")
        for proposal in waiting:
            click.echo(f"  {proposal.id}  {_summary(proposal)}")
    print_notifier(notifier, now)


def _replica_row(replica: ReplicaState) -> list[str]:
    strip = "".join("#" if slot in replica.live else "x" for slot in range(len(replica.gpus)))
    return [
        str(replica.replica),
        replica.rack,
        replica.mode,
        f"{len(replica.live)}/{len(replica.gpus)}",
        strip,
        str(replica.num_samples),
        f"{replica.step_s:.2f} s",
        f"{replica.boost_w:.0f} W",
        ", ".join(replica.spares) or "none",
    ]


def _summary(proposal: Proposal) -> str:
    option = proposal.options[proposal.recommended]
    return f"{option.title}: goodput {option.goodput:.1%} ({proposal.cause})"


@click.command()
@click.argument("proposal_id", required=False, metavar="[PROPOSAL]")
@click.option("--all", "everything", is_flag=True, help="Closed ones too.")
@run_option
@json_option
def proposals(proposal_id: str | None, everything: bool, run_id: str, as_json: bool) -> None:
    """List open proposals, or show one with every alternative and its predicted effect."""
    store = open_live(Settings.from_env())
    state = find_run(store, run_id)
    found = [
        proposal
        for proposal in store.list_proposals(state.run)
        if (proposal_id is None and (everything or not proposal.is_final))
        or proposal.id == proposal_id
    ]
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo(f"no proposal {proposal_id}" if proposal_id else "nothing waits for an answer")
    for proposal in found:
        _print_proposal(proposal, state)


def _print_proposal(proposal: Proposal, state: RunState) -> None:
    now = time.time()
    click.echo(f"{proposal.id}  {proposal.state}  generation {proposal.generation}")
    click.echo(f"  cause: {proposal.cause}")
    if proposal.state == "open":
        click.echo(f"  expires in {max(0.0, proposal.expires_at - now):.0f} s")
        click.echo(f"  evidence: newest seen {ago(proposal.evidence_at, now)}")
        for line in filter(None, (proposal.ruling, proposal.progress, proposal.barred)):
            click.echo(f"  {line}")
    if proposal.state_reason:
        click.echo(f"  {proposal.state_reason}")
    print_table(
        [" ", ">no", "option", ">step", ">tokens/s", ">goodput", ">cost", "remark"],
        [
            [
                "*" if index == proposal.recommended else " ",
                str(index),
                option.title,
                f"{option.step_s:.2f} s",
                f"{option.tokens_per_s:,.0f}",
                f"{option.goodput:.1%}",
                f"{option.cost_s:.1f} s",
                option.risk if option.feasible else f"not possible: {option.reason}",
            ]
            for index, option in enumerate(proposal.options)
        ],
    )
    if proposal.outcome is not None and proposal.outcome.num_steps:
        outcome = proposal.outcome
        click.echo(
            f"  actual: {outcome.step_s:.2f} s/step, {outcome.tokens_per_s:,.0f} tokens/s, goodput "
            f"{outcome.goodput:.1%}; first step {outcome.first_commit_s:.1f} s after the decision"
        )
    click.echo("")


@click.command()
@click.argument("run_id", required=False, metavar="[RUN]")
@click.option("--limit", default=20, show_default=True, help="How many runs.")
@json_option
def runs(run_id: str | None, limit: int, as_json: bool) -> None:
    """List past and present runs, or show one: its goodput ledger, proposals and decisions."""
    settings = Settings.from_env()
    history = History.open(settings.database_url)
    if run_id is None:
        found = history.list_runs(limit=limit)
        if as_json:
            print_json(found)
            return
        if not found:
            click.echo("no run recorded yet; start one with `counterpoise up`")
            return
        now = time.time()
        print_table(
            ["run", "status", "started", ">steps", ">loss", ">wall", ">time goodput"],
            [
                [
                    run.run,
                    run.status,
                    ago(run.started_at, now),
                    str(run.steps),
                    f"{run.last_loss:.4f}" if run.last_loss is not None else "-",
                    f"{run.wall_s:.0f} s",
                    f"{run.time_goodput:.1%}" if run.time_goodput is not None else "-",
                ]
                for run in found
            ],
        )
        return
    _print_run(history, run_id, as_json=as_json)


def _print_run(history: History, run_id: str, *, as_json: bool) -> None:
    detail = history.run(run_id)
    if detail is None:
        raise click.ClickException(f"run {run_id!r} is not recorded; see `counterpoise runs`")
    ledger = history.ledger(run_id)
    events, decisions = history.events(run_id), history.decisions(run_id)
    if as_json:
        print_json(
            {
                "run": msgspec.to_builtins(detail),
                "ledger": ledger,
                "events": msgspec.to_builtins(events),
                "decisions": msgspec.to_builtins(decisions),
            }
        )
        return
    click.echo(f"{detail.run}  {detail.status}")
    for bucket, seconds in sorted(ledger.items(), key=lambda item: -item[1]):
        click.echo(f"  {bucket:22} {seconds:10.1f} s")
    click.echo(f"  {'wall time':22} {sum(ledger.values()):10.1f} s\n")
    for event in events:
        click.echo(f"  {time.strftime('%H:%M:%S', time.localtime(event.at))}  {event.message}")
    for decision in decisions:
        click.echo(
            f"  {time.strftime('%H:%M:%S', time.localtime(decision.at))}  {decision.proposal} "
            f"{decision.verdict.replace('_', ' ')} by {decision.who} ({decision.via})"
        )
