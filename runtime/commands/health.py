"""`counterpoise health`: what sources say of GPUs, read from files, and what a person knows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from runtime.commands.common import (
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
from runtime.config import load_config
from runtime.errors import UserError
from runtime.health.catalogue import load_catalogue
from runtime.health.fail_slow import Slow, SlowDetector
from runtime.health.observation import NotUnderstood, Observation
from runtime.health.parse import ParsedFile, bounded_lines
from runtime.health.step_times import StepTimes, StepTimesError
from storage.settings import Settings

file_argument = click.argument(
    "path", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
config_option = click.option(
    "--config", "config_path", type=click.Path(path_type=Path, dir_okay=False), default=None,
    help="TOML file; its [health.xid] rules over the catalogue.",
)  # fmt: skip
# Sources tell how they are when they begin, and when that changes.
TAIL = 20_000
_EVENT_KEYS = (
    "gpu", "source", "code", "subcode", "cause_of",
    "severity", "verdict", "action", "count", "line",
)  # fmt: skip


@click.group()
def health() -> None:
    """Read what the field says of GPUs, and tell the runtime what it cannot see."""


@health.command()
@file_argument
@config_option
@json_option
def parse(path: Path, config_path: Path | None, as_json: bool) -> None:
    """Understand a kernel log, `nvidia-smi -q -x` or a Prometheus exposition.

    The kind of file is found out. A kernel log gives one line an event, the others one a GPU. What
    names an Xid, or should be a sample, and was not understood is listed too.
    """
    rulings = load_config(config_path).health.xid
    parsed = ParsedFile(path, load_catalogue(rulings))
    events = parsed.events()
    if as_json:
        _stream_events(parsed, events)
        return
    found = list(events)
    click.echo(f"{path}: {parsed.kind.replace('_', ' ')}, {len(found)} understood\n")
    if found:
        print_table(
            [">line", "gpu", "code", "subcode", "after", "verdict", "action", ">count"],
            [_event_row(event) for event in found],
        )
    _print_not_understood(parsed.not_understood, parsed.num_not_understood)


@health.command()
@file_argument
@config_option
@json_option
def slow(path: Path, config_path: Path | None, as_json: bool) -> None:
    """Find slow workers in a CSV of step times (columns worker, time, duration).

    from and to are in the file's time; the ratio is against what is usual among its peers.
    """
    allowance = load_config(config_path).health.slow_ratio
    times, detector = StepTimes(), SlowDetector(allowance=1.0 + (allowance - 1.0) / 2)
    try:
        for each in times.rounds(bounded_lines(path)):
            detector.take(each.at, each.durations)
    except StepTimesError as error:
        raise UserError(f"{path}: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    found = sorted([*detector.finished, *detector.slow()], key=lambda each: each.begin)
    workers = [each for each in found if each.worker]
    if as_json:
        print_json([_slow_object(each) for each in workers])
        if times.num_not_understood:
            click.echo(f"{times.num_not_understood} rows were not understood", err=True)
        return
    click.echo(f"{path}: {len(workers)} stretches of slowness\n")
    if found:
        print_table(
            ["worker", ">from", ">to", ">ratio", ">found"], [_slow_row(each) for each in found]
        )
    _print_not_understood(times.not_understood, times.num_not_understood)


@health.command()
@click.argument("gpu", metavar="RACK/SLOT")
@click.argument(
    "state", type=click.Choice(["healthy", "suspect", "degraded", "draining", "failed"])
)
@click.option("--reason", required=True, help="What you know, or who says so; kept as evidence.")
@run_option
@wait_option
@json_option
def report(gpu: str, state: str, reason: str, run_id: str, wait_s: float, as_json: bool) -> None:
    """Tell the runtime what an operator or another system knows of a GPU.

    draining and failed open a proposal to go on without it; healthy ends what was held against it.
    """
    from storage.commands import Report

    store, run = open_active_run(run_id)
    command = Report(
        id=uuid.uuid4().hex,
        at=time.time(),
        who=who(),
        via="cli",
        gpu=gpu,
        state=state,  # type: ignore[arg-type]
        reason=reason,
    )
    ask(store, run, command, wait_s, as_json=as_json)


@health.command()
@run_option
@json_option
def sources(run_id: str, as_json: bool) -> None:
    """Show what watches the GPUs of a run, host by host, and why what does not watch does not."""
    from storage.records import EventHappened

    store = open_live(Settings.from_env())
    run = find_run(store, run_id).run
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in store.tail_journal(run, TAIL):
        if isinstance(entry, EventHappened) and entry.kind == "health_source":
            key = (str(entry.details.get("host")), str(entry.details.get("source")))
            newest[key] = {**entry.details, "since": entry.at}
    rows = [newest[key] for key in sorted(newest)]
    if as_json:
        print_json({"run": run, "sources": rows})
    elif rows:
        shown = [
            [str(row[name]) for name in ("host", "source", "status", "reason")] for row in rows
        ]
        print_table(["host", "source", "state", "why"], shown)
    else:
        click.echo(
            "No source has said how it is. On real devices NVML and the kernel log are watched; on "
            "emulated ones those that [health] names."
        )


def event_object(event: Observation) -> dict[str, Any]:
    """An observation as `parse --json` prints it."""
    return {key: getattr(event, key) for key in _EVENT_KEYS}


def _stream_events(parsed: ParsedFile, events: Iterator[Observation]) -> None:
    """One JSON document, written as the events come: a log may hold millions."""
    encode = msgspec.json.encode
    click.echo('{"events": [')
    separator, number = "", 0
    for event in events:
        click.echo(f"{separator}  {encode(event_object(event)).decode()}", nl=False)
        separator, number = ",\n", number + 1
    rest = {
        "num_events": number,
        "num_not_understood": parsed.num_not_understood,
        "not_understood": parsed.not_understood,
        "kind": parsed.kind,
    }
    click.echo(f"\n], {encode(rest).decode()[1:]}")


def _event_row(event: Observation) -> list[str]:
    return [
        str(event.line or "-"),
        event.gpu or "?",
        str(event.code) if event.code is not None else "-",
        event.subcode or "",
        f"Xid {event.cause_of}" if event.cause_of is not None else "",
        event.verdict,
        event.action,
        str(event.count),
    ]


def _slow_object(found: Slow) -> dict[str, Any]:
    worker: int | str = found.worker
    if found.worker.isascii() and found.worker.isdigit():
        worker = int(found.worker)
    return {
        "worker": worker,
        "from": found.begin,
        "to": found.end,
        "ratio": round(found.ratio, 4),
    }


def _slow_row(found: Slow) -> list[str]:
    return [
        found.worker or "(all)",
        f"{found.begin:g}",
        f"{found.end:g}" if found.ended else f"{found.end:g}, still",
        f"{found.ratio:.2f}",
        f"{found.found:g}",
    ]


def _print_not_understood(lines: list[NotUnderstood], number: int) -> None:
    if number:
        click.echo(f"\n{number} not understood" + (" (the last ones):" if number > 5 else ":"))
    for each in lines[-20:]:
        click.echo(f"  line {each.line} {each.reason}: {each.text[:160]}")
