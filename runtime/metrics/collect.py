"""What Prometheus gets at a scrape: read from the live store, one round per run.

A rack is always there; single GPUs only up to a limit, so that a scrape of 32,768 GPUs stays small.
"""

from __future__ import annotations

import numpy as np

from runtime.metrics.exposition import Exposition, labels_of
from storage.live.port import LiveStore, LiveStoreDown
from storage.records import GPU_STATES, RackRecord, RecordError, RunState

GPU_LIMIT = 4608
# An ended run's last numbers are there for one more scrape or two
LINGER_S = 300.0
ENDED = ("stopped", "failed")
_GPU_COLUMNS = {
    "gpu_power_watts": "power_w",
    "gpu_cap_watts": "cap_w",
    "gpu_temperature_celsius": "temp_c",
    "gpu_utilisation_ratio": "util",
    "gpu_clock_megahertz": "clock_mhz",
}


def collect(store: LiveStore, now: float, gpu_limit: int = GPU_LIMIT) -> str:
    """The exposition; with `counterpoise_live_store_up 0` and no more when the store is away."""
    out = Exposition()
    try:
        _add_all(out, store, now, gpu_limit)
    except (LiveStoreDown, RecordError):
        out = Exposition()
        out.add("live_store_up", 0)
        return out.text()
    out.add("live_store_up", 1)
    return out.text()


def _add_all(out: Exposition, store: LiveStore, now: float, gpu_limit: int) -> None:
    journals = store.list_journals()
    for state in store.list_runs():
        is_active = state.status not in ENDED
        if not is_active and now - (state.ended_at or state.updated_at) > LINGER_S:
            continue
        _add_run(out, state, now, is_active=is_active)
        _add_replicas(out, state)
        _add_proposals(out, store, state.run, now)
        last, acknowledged = journals.get(state.run, (0, 0))
        out.add("journal_unrecorded", max(0, last - acknowledged), labels_of(run=state.run))
        if is_active:
            racks = store.get_racks(state.run)
            each = sum(record.num_gpus for record in racks.values()) <= gpu_limit
            for record in racks.values():
                _add_rack(out, record, now, each=each)
    _add_notifier(out, store)


def _add_run(out: Exposition, state: RunState, now: float, *, is_active: bool) -> None:
    run = labels_of(run=state.run)
    info = labels_of(
        run=state.run,
        name=state.name,
        status=state.status,
        device=state.device,
        emulated=str(state.emulated).lower(),
        policy=state.policy,
    )
    out.add("run_info", 1, info)
    out.add("run_active", is_active, run)
    out.add("generation", state.generation, run)
    out.add("steps_total", state.step, run)
    if state.loss is not None:
        out.add("loss", state.loss, run)
    out.add("step_seconds", state.step_s, run)
    out.add("healthy_step_seconds", state.ideal_step_s, run)
    out.add("tokens_per_second", state.tokens_per_s, run)
    out.add("goodput_ratio", state.time_goodput, labels_of(run=state.run, kind="time"))
    out.add("goodput_ratio", state.token_goodput, labels_of(run=state.run, kind="token"))
    out.add("data_age_seconds", max(0.0, now - state.updated_at), run)
    out.add("wall_seconds_total", state.wall_s, run)
    for bucket, spent_s in state.ledger.items():
        out.add("ledger_seconds_total", spent_s, labels_of(run=state.run, bucket=bucket))


def _add_replicas(out: Exposition, state: RunState) -> None:
    for one in state.replicas:
        labels = labels_of(run=state.run, replica=one.replica, rack=one.rack)
        out.add("replica_degree", len(one.live), labels)
        out.add("replica_slots", len(one.gpus), labels)
        out.add("replica_training", one.mode == "training", labels)
        out.add("replica_samples", one.num_samples, labels)
        out.add("replica_step_seconds", one.step_s, labels)
        out.add("replica_boost_watts", one.boost_w, labels)


def _add_proposals(out: Exposition, store: LiveStore, run: str, now: float) -> None:
    proposals = store.list_proposals(run)
    counts = {"open": 0}
    for one in proposals:
        counts[one.state] = counts.get(one.state, 0) + 1
    for state, count in counts.items():
        out.add("proposals", count, labels_of(run=run, state=state))
    waiting = [one.expires_at for one in proposals if one.state == "open"]
    if waiting:
        out.add("proposal_expires_seconds", max(0.0, min(waiting) - now), labels_of(run=run))


def _add_rack(out: Exposition, record: RackRecord, now: float, *, each: bool) -> None:
    rack = labels_of(run=record.run, rack=record.rack)
    counts = np.bincount(np.frombuffer(record.states, np.uint8), minlength=len(GPU_STATES))
    for name, count in zip(GPU_STATES, counts, strict=True):
        out.add("gpus", int(count), labels_of(run=record.run, rack=record.rack, state=name))
    out.add("rack_power_watts", float(np.nansum(record.column("power_w"))), rack)
    out.add("rack_cap_watts", float(np.nansum(record.column("cap_w"))), rack)
    out.add("rack_budget_watts", record.budget_w, rack)
    known = record.column("temp_c")
    if np.isfinite(known).any():
        out.add("rack_temperature_celsius", float(np.nanmax(known)), rack)
    out.add("rack_data_age_seconds", max(0.0, now - record.at), rack)
    if not each:
        return
    slots = [
        labels_of(run=record.run, rack=record.rack, slot=slot) for slot in range(record.num_gpus)
    ]
    for family, column in _GPU_COLUMNS.items():
        for labels, value in zip(slots, record.column(column).tolist(), strict=True):
            # What the device does not know is left out: NaN would look like a reading
            if value == value:  # noqa: PLR0124
                out.add(family, value, labels)


def _add_notifier(out: Exposition, store: LiveStore) -> None:
    state = store.get_notifier()
    for one in state.channels if state else ():
        for outcome in ("delivered", "refused", "dropped"):
            labels = labels_of(channel=one.name, outcome=outcome)
            out.add("notices_total", getattr(one, outcome), labels)
        out.add("notices_waiting", one.pending, labels_of(channel=one.name))
        out.add("channel_failing", one.failing_since is not None, labels_of(channel=one.name))
