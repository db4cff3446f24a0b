"""The shape strip of a live run, as Overview and Replicas show it."""

from __future__ import annotations

import streamlit as st

from app.components.parts import shape_strip
from app.queries import LiveSnapshot
from app.shapes import most_pressing, rack_looks, shape_rows
from storage.records import RunState


def live_shape(snapshot: LiveSnapshot, state: RunState, key: str) -> None:
    """One row a replica; of very many, those that are not whole first, with a word on the rest."""
    shown, note = most_pressing(state.replicas)
    looks = rack_looks(snapshot.racks, shown)
    shape_strip(shape_rows(shown, state.global_batch, looks), key, legend=True)
    if note:
        st.caption(note)
