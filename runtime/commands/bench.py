"""`counterpoise bench`: measure, and say whether the targets are reached."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import click

from runtime.bench.benchmark import Benchmark
from runtime.bench.registry import BENCHMARKS
from runtime.bench.side_by_side import markdown, rows
from runtime.commands.common import json_option, print_json, print_table
from runtime.errors import CounterpoiseError, UserError


@click.command()
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--list", "list_names", is_flag=True, help="Print the names, one a line.")
@click.option("--full", is_flag=True, help="The long variant, where there is one.")
@click.option(
    "--table",
    type=click.File(),
    help="Measure nothing: print the comparison with others from JSON, figures by name.",
)
@json_option
def bench(
    name: str | None, list_names: bool, full: bool, table: TextIO | None, as_json: bool
) -> None:
    """Measure what was promised, on this machine, with real worker processes.

    \b
    parity    the loss, parameters and samples of a run that loses and regains
              GPUs, against the same steps in one process
    recovery  seconds from SIGKILL, and from an approval, to the next committed
              step on two racks of 8
    startup   seconds from `counterpoise up` to the first step and a loaded page
    dashboard 20 viewers of a run of 1,152 GPUs: tick time, core, memory, page switch
              (--full: for half an hour, to see whether memory grows)
    history   what the History page asks of 1,000 recorded runs
              (--full: of ten million step rows)
    sync      direct against reshard gradient sync: bytes inside a healthy rack,
              exposed time, and a mixed shape against a uniform one
    units     heads of the busiest slot over the even share, whole and shared by
              sample
    health    kernel log lines a second, and the core that watching 72 GPUs takes
    peers     steady state and recovery beside a bare loop, DTensor with DDP, torchft
              and a torchrun restart (extra `peers`; --full: wider, and hung ranks)
    goodput   what each policy commits of the ideal over 10 minutes of kills and
              repairs, simulated with the planner; checked against a real run
    cluster   the NTP paper's availability figures for 32,768 GPUs, simulated

    Each takes up to a minute. Progress goes to stderr; figures, with their targets, to stdout. A
    missed target is told in the table and is no error. Measure on a quiet machine.
    """
    if list_names:
        for each in BENCHMARKS:
            click.echo(each)
        return
    if table is not None:
        click.echo(markdown(rows(_figures_by_name(table))))
        return
    if name not in BENCHMARKS:
        given = f"benchmark {name!r} is not known" if name else "which benchmark?"
        raise UserError(f"{given}; there are: {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    began = time.monotonic()
    try:
        with _orderly_end():
            measure = (benchmark.measure_full if full else None) or benchmark.measure
            figures = measure(lambda line: click.echo(f"  {line}", err=True))
    except CounterpoiseError as error:
        raise click.ClickException(f"{name} could not be measured: {error}") from error
    figures["bench_s"] = round(time.monotonic() - began, 1)
    if as_json:
        print_json(figures)
    else:
        _print_figures(benchmark, figures)


def _figures_by_name(table: TextIO) -> dict[str, Any]:
    try:
        found = json.load(table)
    except ValueError as error:
        raise UserError(f"{table.name} is no JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise UserError(f'{table.name} must hold {{"name of a bench": its figures, ...}}')
    return found


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """A SIGTERM unwinds the stack, so that what a benchmark started is ended before we are."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_figures(benchmark: Benchmark, figures: dict[str, Any]) -> None:
    targets = {target.figure: target for target in benchmark.targets(figures)}
    rows = []
    for figure, value in figures.items():
        if isinstance(value, list | dict):
            continue
        target = targets.get(figure)
        rows.append(
            [figure, _text(value), "", "", ""]
            if target is None
            else [
                figure,
                _text(value),
                f"<= {_text(target.at_most)}",
                "reached" if target.is_reached(figures) else "MISSED",
                target.why,
            ]
        )
    click.echo(f"{benchmark.name}: {benchmark.summary}\n")
    print_table(["figure", ">value", ">target", "", "what it is held against"], rows)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
