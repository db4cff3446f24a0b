"""Commands that look through the audit and verify its chain."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

import click
from sqlalchemy import Engine

from runtime.commands.common import json_option, print_json, print_table
from runtime.errors import UserError
from storage.history.audit import list_audit, verify
from storage.history.database import open_history
from storage.history.schema import schema_state
from storage.settings import Settings


@click.group()
def audit() -> None:
    """Who asked for what, in which role, why, and what came of it.

    Every command that was carried out or refused, every decision of policy and every sign-in has a
    row; each row holds the hash of the one before it.
    """


@audit.command("list")
@click.option("--run", "run_id", default="", metavar="RUN", help="Of this run only.")
@click.option("--search", default="", help="Text in who, role, what, why or result.")
@click.option("--limit", default=50, show_default=True, help="How many rows.")
@json_option
def list_rows(run_id: str, search: str, limit: int, as_json: bool) -> None:
    """List the newest rows, newest first."""
    engine = _history()
    try:
        rows = list_audit(engine, run=run_id, search=search, limit=limit)
    finally:
        engine.dispose()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    if not rows:
        click.echo("no row matches; the recorder writes one for every command, decision, sign-in")
        return
    print_table(
        [">no", "when", "who", "role", "by", "what", "why", "result"],
        [
            [
                str(row.number),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.at)),
                row.who,
                row.role,
                row.via,
                row.what[:80],
                row.reason[:40],
                row.result[:60],
            ]
            for row in rows
        ],
    )


@audit.command("verify")
@click.option(
    "--expect", default="", metavar="NUMBER:HASH",
    help="A head noted earlier: finds a chain written anew, or cut off at its end.",
)  # fmt: skip
@json_option
def verify_chain(expect: str, as_json: bool) -> None:
    """Walk the whole chain; exits with 1 and names the first row that does not fit.

    Prints the head, NUMBER:HASH. Keep one elsewhere now and then (the recorder logs it every hour).
    """
    noted = _noted(expect) if expect else None
    engine = _history()
    try:
        found = verify(engine, noted)
    finally:
        engine.dispose()
    if as_json:
        print_json(asdict(found) | {"ok": found.ok})
    elif found.ok:
        click.echo(f"{found.num_rows} rows, unbroken; head {found.num_rows}:{found.head or '-'}")
    else:
        where = f"row {found.broken}" if found.broken is not None else "the audit"
        click.echo(f"{where}: {found.why} ({found.num_rows} rows before it are good)", err=True)
    if not found.ok:
        sys.exit(1)


def _history() -> Engine:
    engine = open_history(Settings.from_env().database_url)
    state = schema_state(engine)
    if state.state != "ready":
        engine.dispose()
        raise UserError(state.message)
    return engine


def _noted(text: str) -> tuple[int, str]:
    number, _, digest = text.partition(":")
    if not number.isdigit() or len(digest) != 64:
        raise UserError(f"--expect is {text!r}; allowed: NUMBER:HASH as `audit verify` prints it")
    return int(number), digest
