"""The components as functions: plain values in, what the user picked out. Each owns its looks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import streamlit as st

from app.components.registry import mount
from app.palette import BUCKET_LOOKS, CELL_CODES, CELL_LOOKS, Look
from app.shapes import ShapeRow
from app.words import percent, seconds
from storage.records import BUCKETS


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One big number. sub: a line of context below it; title: what the number means."""

    label: str
    value: str
    unit: str = ""
    sub: str = ""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Column:
    """kind: "right" for numbers, "wide" for sentences that may wrap, "plain" for words."""

    label: str
    kind: Literal["plain", "right", "wide"] = "plain"
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell is text, `{"time": epoch}`, `{"age": epoch}` or `marked(...)`. id: lasting."""

    id: str
    cells: tuple[Any, ...]
    strong: bool = False


def marked(look: Look, text: str | None = None, title: str = "") -> dict[str, Any]:
    """A table cell with the mark of a state."""
    return {"look": look.data(), "text": look.word if text is None else text, "title": title}


def tiles(items: Sequence[Tile], key: str) -> None:
    mount("tiles", {"tiles": [vars(tile) for tile in items]}, key)


def shape_strip(
    rows: Sequence[ShapeRow], key: str, *, caption: str = "", legend: bool = False
) -> None:
    data = {
        "rows": [_shape_row(row) for row in rows],
        "looks": [look.data() for look in CELL_LOOKS.values()],
        "caption": caption,
        "legend": legend,
    }
    mount("shape", data, key)


def _shape_row(row: ShapeRow) -> dict[str, Any]:
    """codes: positions in `CELL_LOOKS`. prefix: of the GPU ids where they are prefix and slot, as
    most are; else gpus has them all. With 72 slots a row this is most of a tick's bytes."""
    gpus = [gpu for _, gpu in row.cells]
    prefix = f"{gpus[0].rpartition('/')[0]}/" if gpus else ""
    regular = all(gpu == f"{prefix}{slot}" for slot, gpu in enumerate(gpus))
    return {
        "label": row.label,
        "sub": row.sub,
        "right": row.right,
        "codes": [CELL_CODES[name] for name, _ in row.cells],
        "prefix": prefix,
        "gpus": None if regular else gpus,
    }


def ribbon(ledger: Mapping[str, float], wall_s: float, key: str) -> None:
    """The goodput ledger as a bar; says its sum and the wall time, so that a gap cannot hide."""
    total = sum(ledger.values())
    sum_line = f"Sum of the buckets {seconds(total)}, wall time {seconds(wall_s)}."
    _ribbon(ledger, "Goodput ledger", sum_line, key)


def ribbon_now(ledger: Mapping[str, float], key: str) -> None:
    """The same for the last minutes."""
    _ribbon(ledger, "Goodput ledger of the last minutes", "", key, compact=True)


def _ribbon(
    ledger: Mapping[str, float], label: str, sum_line: str, key: str, *, compact: bool = False
) -> None:
    total = sum(ledger.values())
    parts = []
    for bucket in BUCKETS:
        spent = ledger.get(bucket, 0.0)
        if spent <= 0:
            continue
        look = BUCKET_LOOKS[bucket]
        parts.append(
            {
                "word": look.word,
                "colour": look.colour,
                "hatch": look.hatch,
                "title": look.means,
                "text": seconds(spent),
                "percent": percent(spent / total),
                "share": round(spent / total, 5),
            }
        )
    mount("ribbon", {"parts": parts, "label": label, "sum": sum_line, "compact": compact}, key)


def table(
    columns: Sequence[Column],
    rows: Sequence[Row],
    key: str,
    *,
    label: str,
    empty: str,
    max_height: int | None = None,
) -> None:
    mount("table", _table_data(columns, rows, label, empty, max_height), key)


def picking_table(
    columns: Sequence[Column],
    rows: Sequence[Row],
    key: str,
    *,
    label: str,
    empty: str,
    selected: str | None,
    max_height: int | None = None,
) -> str | None:
    """A table whose rows can be picked; returns the id of the row picked last, None before that."""
    data = _table_data(columns, rows, label, empty, max_height)
    picked = mount(
        "table", data | {"selectable": True, "selected": selected}, key, on_row_change=_nothing
    ).row
    return picked if isinstance(picked, str) else None


def _table_data(
    columns: Sequence[Column],
    rows: Sequence[Row],
    label: str,
    empty: str,
    max_height: int | None,
) -> dict[str, Any]:
    ages = any(isinstance(cell, dict) and "age" in cell for row in rows for cell in row.cells)
    return {
        "columns": [vars(column) for column in columns],
        "rows": [{"id": row.id, "cells": list(row.cells), "strong": row.strong} for row in rows],
        "label": label,
        "empty": empty,
        "max_height": max_height,
        # Only where it is needed: data that does not change costs the browser nothing
        "now": time.time() if ages else 0,
    }


def focus_on(label: str, key: str) -> None:
    """Put a dialog's focus on its button `label`."""
    mount("focus", {"label": label}, key, height=1)


def linked_heading(text: str, key: str, **query: str) -> None:
    """A heading with a button that copies the address of this page with `query`."""
    name, link = st.columns([5, 1], vertical_alignment="bottom")
    with name:
        heading(text)
    with link:
        copy_link(key, **query)


def copy_link(key: str, **query: str) -> None:
    """A button that copies the address of this page with `query`."""
    mount("link", dict(query), key)


def heading(text: str) -> None:
    """Heading of a section, without the anchor link that Streamlit adds."""
    st.subheader(text, anchor=False)


def _nothing() -> None:
    """Streamlit hands out a component's state only where a callback is registered."""
