"""Incidents: each from the first evidence to the verified recovery, and what it cost.

Reads the history every few seconds; without it, what the live store still has.
"""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from app import context, header
from app.components.parts import Tile, heading, linked_heading, tiles
from app.incident_parts import alternative_table, incident_list, part_table, timeline
from app.lookback import PastIncidents, with_newest
from app.notifier_parts import who_is_told
from app.words import gpu_hours, plural, seconds
from storage.history.incidents import Incident

REFRESH_S = 5.0


def render() -> None:
    run = context.selected_run()
    if run is None:
        header.nothing_runs(context.reader().runs()[1])
        return
    st.fragment(_incidents, run_every=REFRESH_S)(run)
    st.fragment(who_is_told, run_every=REFRESH_S)()


@dataclass(frozen=True)
class _Source:
    past: PastIncidents
    note: str = ""


def _incidents(run: str) -> None:
    source = _source(run)
    past = source.past
    if source.note:
        st.caption(source.note)
    known = {one.id: one for one in past.incidents}
    asked = st.query_params.get("incident")
    tiles(_sums(past), "incident_sums")
    picked = incident_list(
        past.incidents, past.costs, past.until, "incidents", selected=asked, max_height=320
    )
    if picked and picked != st.session_state.get("incident_picked"):
        st.session_state["incident_picked"] = picked
        st.query_params["incident"] = picked
        st.rerun(scope="fragment")
    if asked and asked not in known:
        st.markdown(f"This run has no incident {asked}.")
    if not known:
        return
    newest = max(known.values(), key=lambda one: (one.is_open, one.begin))
    _detail(known.get(asked or "", newest), past)


def _source(run: str) -> _Source:
    past = context.lookback().incidents(run)
    live = context.snapshot()
    if past is not None and (past.incidents or not live.recent.incidents):
        return _Source(with_newest(past, live.recent, live.updated_at))
    recent = live.recent
    here = PastIncidents(incidents=recent.incidents, costs=recent.costs, until=live.updated_at)
    note = "The history cannot be read now: these are the incidents the live store still knows."
    return _Source(here, note if past is None else "")


def _sums(past: PastIncidents) -> list[Tile]:
    open_ = sum(one.is_open for one in past.incidents)
    cost = sum(one.gpu_hours for one in past.costs.values())
    waited = [part for one in past.costs.values() for part in one.parts if part.part == "waited"]
    recovered = [one.end - one.begin for one in past.incidents if one.end is not None]
    typical = sorted(recovered)[len(recovered) // 2] if recovered else None
    value, _, unit = gpu_hours(cost).rpartition(" ")
    return [
        Tile(label="Open", value=str(open_), sub=f"of {plural(len(past.incidents), 'incident')}"),
        Tile(label="Cost so far", value=value, unit=unit, sub="lost while they were open"),
        Tile(
            label="Waited for decisions",
            value=seconds(sum(one.wall_s for one in waited)),
            sub=gpu_hours(sum(one.gpu_hours for one in waited)),
        ),
        Tile(label="Typical recovery", value=seconds(typical), sub="median, evidence to verified"),
    ]


def _detail(incident: Incident, past: PastIncidents) -> None:
    run = context.selected_run() or ""
    linked_heading(incident.title, f"link_{incident.id}", run=run, incident=incident.id)
    where = ", ".join(incident.gpus) or "no GPU named"
    st.caption(f"Replica {incident.replica} · {where} · incident {incident.id}")
    timeline(incident, past.until, f"timeline_{incident.id}")
    cost = past.costs.get(incident.id)
    if cost is None:
        st.caption("Its cost is not known: the ledger of that time is not recorded.")
        return
    heading("What each part cost")
    part_table(cost, f"parts_{incident.id}")
    if cost.alternatives:
        heading("What the alternatives would have cost")
        alternative_table(cost, f"alternatives_{incident.id}")
        st.caption(
            "Over the same time, by the pace this run measured in that shape; where it never had "
            "the shape, by the planner's prediction."
        )
    _links(incident)


def _links(incident: Incident) -> None:
    gpu, cards, _ = st.columns([1, 1, 3])
    run = context.selected_run() or ""
    if incident.gpus and gpu.button(
        f"Show {incident.gpus[0]}", key="incident_gpu", width="stretch"
    ):
        context.open_page("racks", run=run, gpu=incident.gpus[0])
    if incident.proposals and cards.button(
        "Show its proposal", key="incident_card", width="stretch"
    ):
        context.open_page("reconfigure", run=run, proposal=incident.proposals[-1])
