"""`counterpoise policy`: what may be done unasked and who decides the rest, shown and changed."""

from __future__ import annotations

import time
import uuid

import click

from runtime.commands.common import (
    ago,
    ask,
    find_run,
    json_option,
    open_active_run,
    open_live,
    print_json,
    print_table,
    run_option,
    wait_option,
    who,
)
from runtime.errors import UserError
from storage.commands import SetPolicy
from storage.policy_state import ANSWER_WORDS, MODE_MEANS, PolicyState
from storage.records import RunState
from storage.settings import Settings


@click.group()
def policy() -> None:
    """Show or change who decides what, while the run goes on."""


@policy.command()
@run_option
@json_option
def show(run_id: str, as_json: bool) -> None:
    """What holds now, kind by kind, and the last changes."""
    state = find_run(open_live(Settings.from_env()), run_id)
    found = _policy_of(state)
    if as_json:
        print_json(found)
        return
    click.echo(f"{found.words}: {MODE_MEANS[found.mode]}")
    print_table(
        ["action", "now", "its own answer", ">approvals", "decided by"],
        [
            [
                rule.kind,
                ANSWER_WORDS[rule.answer],
                ANSWER_WORDS[rule.own],
                str(rule.num_approvals),
                f"{rule.decider} or higher",
            ]
            for rule in found.rules
        ],
    )
    for key in ("expires_s", "deadline_s", "evidence_max_age_s", "quiet_hours"):
        click.echo(f"{key} = {found.values[key] or 'none'}")
    for one in reversed(found.changes):
        click.echo(
            f"{ago(one.at, time.time())}: {one.who} ({one.role or one.via}): {one.words} "
            f"({one.reason})"
        )


@policy.command("set")
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE...")
@click.option("--reason", required=True, help="Why; recorded with the change.")
@run_option
@wait_option
@json_option
def set_(changes: tuple[str, ...], reason: str, run_id: str, wait_s: float, as_json: bool) -> None:
    """Change keys of the policy; they are those of the configuration's [policy].

    \b
    counterpoise policy set mode=act --reason "nobody is here until Monday"
    counterpoise policy set shrink=auto approvals.drop=2 deciders.drop=admin --reason "..."
    counterpoise policy set 'quiet_hours=[{begin="22:00", end="06:00"}]' --reason "..."
    """
    store, state = open_active_run(run_id)
    command = SetPolicy(
        id=uuid.uuid4().hex,
        at=time.time(),
        who=who(),
        via="cli",
        changes=dict(_split(change) for change in changes),
        revision=_policy_of(state).revision,
        reason=reason,
    )
    ask(store, state, command, wait_s, as_json=as_json)


def _split(change: str) -> tuple[str, str]:
    key, is_there, value = change.partition("=")
    if not is_there or not key.strip():
        raise UserError(f"{change!r} is no change; allowed: KEY=VALUE, for example mode=act")
    return key.strip(), value.strip()


def _policy_of(state: RunState) -> PolicyState:
    if state.policy_state is None:
        raise UserError(f"run {state.run} says nothing of its policy: its runtime is too old")
    return state.policy_state
