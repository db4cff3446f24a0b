"""`counterpoise power`: budgets, draw and caps per rack, a new budget, and measuring the curve."""

from __future__ import annotations

import math
import time
import uuid
from pathlib import Path

import click
import numpy as np

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
from storage.commands import SetBudget
from storage.live.port import LiveStore
from storage.records import EventHappened, RackRecord, ReplicaState, RunState
from storage.settings import Settings

TAIL = 3000
SHOWN_EVENTS = 10
CAP_EVENTS = ("cap_changed", "budget_changed", "batch_reshared")


@click.group()
def power() -> None:
    """Look after the racks' watts: budgets, caps, boosts, headroom.

    \b
    Each rack has a budget: the sum of its GPUs' caps never passes it. When a replica loses a GPU,
    the governor gives the others just enough more to keep pace, and takes it back when the GPU
    returns, when one runs hot, or when the budget is cut.
        counterpoise power show
        counterpoise power budget rack-0 7200 --reason "facility asks"
        counterpoise power calibrate --out curve.toml
    """


@power.command()
@run_option
@json_option
def show(run_id: str, as_json: bool) -> None:
    """Show budget against draw per rack, caps, boosts and what the boost could still cover.

    headroom: how many more failures of a rack's GPUs power can make up for, by the model's curve
    and the budget that stands. Below the table: the newest caps set, by whom and why.
    """
    store = open_live(Settings.from_env())
    state = find_run(store, run_id)
    racks = store.get_racks(state.run)
    events = _cap_events(store, state.run)
    rows = [_rack(racks[one.rack], one) for one in state.replicas if one.rack in racks]
    if as_json:
        print_json({"run": state.run, "emulated": state.emulated, "racks": rows, "journal": events})
        return
    _print_racks(state, rows)
    if events:
        click.echo("\nNewest caps:")
        for event in events[-SHOWN_EVENTS:]:
            at = time.strftime("%H:%M:%S", time.localtime(event.at))
            click.echo(f"  {at}  {event.message}")


@power.command()
@click.argument("rack")
@click.argument("watts", type=float)
@click.option("--reason", default="", help="Kept with the change.")
@wait_option
@run_option
@json_option
def budget(rack: str, watts: float, reason: str, wait_s: float, run_id: str, as_json: bool) -> None:
    """Set the power budget of RACK to WATTS (0: back to the configured one).

    Caps above it are lowered within two seconds, boosts first; the batch is shared out anew where
    that costs pace. Less than all GPUs of the rack at their lowest cap is refused.
    """
    if not 0.0 <= watts < math.inf:
        raise UserError(f"WATTS is {watts:g}; allowed: 0 (as configured) or more")
    store, state = open_active_run(run_id)
    command = SetBudget(
        id=uuid.uuid4().hex,
        at=time.time(),
        who=who(),
        via="cli",
        rack=rack,
        budget_w=watts,
        reason=reason,
    )
    ask(store, state, command, wait_s, as_json=as_json)


@power.command()
@click.option("--config", "config_path", default=None,
              type=click.Path(path_type=Path, dir_okay=False),
              help="TOML file that says which device; default: an emulated one.")  # fmt: skip
@click.option("--gpu", default=0, show_default=True, help="NVML index of a real GPU.")
@click.option("--steps", default=9, show_default=True, help="How many caps.")
@click.option("--seconds", default=5.0, show_default=True, help="How long at each cap (real GPU).")
@click.option("--low", "low_w", default=0.0, help="Lowest cap in watts; default: half the normal.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=None,
              help="Curve file to write; default: only show.")  # fmt: skip
@json_option
def calibrate(
    config_path: Path | None,
    gpu: int,
    steps: int,
    seconds: float,
    low_w: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Sweep caps on a GPU, time the same work at each, and write the curve to plan by.

    On a real GPU this needs root and an idle device; its cap is put back afterwards. Give the file
    to the planner with [power] curve_file = "curve.toml".
    """
    from runtime.power import calibrate as measuring
    from runtime.power.port import PowerError

    config = load_config(config_path)
    emulated = config.cluster.device == "emulated"
    if not 2 <= steps <= 100 or not 0.1 <= seconds <= 600.0:
        raise UserError(
            f"--steps is {steps}, allowed: 2 to 100; --seconds is {seconds:g}, allowed: 0.1 to 600"
        )
    from runtime.power.measured import emulated_bench, nvml_bench

    def tell(point: measuring.Point) -> None:
        if not as_json:
            click.echo(
                f"{point.cap_w:7.0f} W cap  {point.drawn_w:7.0f} W drawn  {point.temp_c:5.1f} °C  "
                f"pace {point.pace:.4g}"
            )

    try:
        bench = emulated_bench(config) if emulated else nvml_bench(config, gpu, seconds)
        limits = bench.backend.limits()
        caps = measuring.sweep_caps(limits, steps, low_w)
        points = measuring.sweep(bench.backend, caps, bench.pace, tell)
        curve = measuring.curve_points(points, limits.normal_w)
    except PowerError as error:
        raise UserError(str(error)) from error
    text = measuring.curve_file(
        curve, device=bench.device, normal_w=limits.normal_w, emulated=emulated
    )
    if out is not None:
        _write(out, text)
    if as_json:
        print_json({"device": bench.device, "emulated": emulated, "normal_cap_w": limits.normal_w,
                    "points": points, "curve": curve})  # fmt: skip
    elif out is not None:
        click.echo(f'wrote {out}; plan by it with [power] curve_file = "{out.name}"')
    else:
        click.echo("\n" + text, nl=False)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from error


def _cap_events(store: LiveStore, run: str) -> list[EventHappened]:
    return [
        entry
        for entry in store.tail_journal(run, TAIL)
        if isinstance(entry, EventHappened) and entry.kind in CAP_EVENTS
    ]


def _rack(record: RackRecord, replica: ReplicaState) -> dict[str, object]:
    caps, draw = record.column("cap_w"), record.column("power_w")
    return {
        "rack": record.rack,
        "budget_w": round(record.budget_w, 1),
        "drawn_w": round(float(np.nansum(draw)), 1),
        "caps_w": [round(float(cap), 1) for cap in caps],
        "sum_of_caps_w": round(float(np.nansum(caps)), 1),
        "normal_cap_w": record.normal_cap_w,
        "max_cap_w": record.max_cap_w,
        "boosted": int((caps > record.normal_cap_w + 0.5).sum()),
        "boost_w": round(max(0.0, float(np.nanmax(caps)) - record.normal_cap_w), 1),
        "hottest_c": round(float(np.nanmax(record.column("temp_c"))), 1),
        "headroom_failures": replica.boostable_failures,
        "backend": record.backend,
        "emulated": record.emulated,
        "notice": record.notice,
    }


def _print_racks(state: RunState, rows: list[dict[str, object]]) -> None:
    kind = "emulated devices" if state.emulated else state.device
    click.echo(f"{state.run}  {kind}\n")
    print_table(
        ["rack", ">budget", ">caps", ">drawn", ">boosted", ">boost", ">hottest", ">headroom", "by"],
        [
            [
                str(row["rack"]),
                _watts(row["budget_w"]),
                _watts(row["sum_of_caps_w"]),
                _watts(row["drawn_w"]),
                str(row["boosted"]),
                _watts(row["boost_w"]),
                f"{row['hottest_c']} °C",
                _headroom(row["headroom_failures"]),
                str(row["backend"]),
            ]
            for row in rows
        ],
    )
    for row in rows:
        if row["notice"]:
            click.echo(f"{row['rack']}: {row['notice']}")


def _watts(value: object) -> str:
    return f"{value:,.0f} W" if isinstance(value, int | float) else "-"


def _headroom(failures: object) -> str:
    if not isinstance(failures, int) or failures < 0:
        return "-"
    return f"{failures} failure" + ("" if failures == 1 else "s")
