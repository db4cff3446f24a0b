"""Registers the components with Streamlit and mounts them.

Streamlit finds package files of components by scanning installed distributions for a pyproject.toml
beside their files, which an editable install lacks; so the manifest is handed over here, the same
way from a checkout, an editable install and a wheel. The second manifest serves plotly.min.js
straight from the installed plotly package: nothing is copied, nothing comes from the network.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.components.v2.component_manager import BidiComponentManager
from streamlit.components.v2.get_bidi_component_manager import get_bidi_component_manager
from streamlit.components.v2.manifest_scanner import ComponentConfig, ComponentManifest

PREFIX = "counterpoise"
PLOTLY_PREFIX = "counterpoise-plotly"
NAMES = (
    "strip", "tiles", "chart", "shape", "ribbon", "table", "card", "fleet", "focus", "verdict",
    "timeline", "door", "link",
)  # fmt: skip
# Plotly writes its style sheet into the document, so its chart cannot live in a shadow root
OPEN_STYLES = frozenset({"chart"})


def register(manager: BidiComponentManager) -> None:
    """Make every component known to `manager`; does nothing the second time."""
    if manager.get(f"{PREFIX}.{NAMES[-1]}") is not None:
        return
    own = ComponentManifest(
        name=PREFIX,
        version="1",
        components=[ComponentConfig(name=name, asset_dir="assets") for name in NAMES],
    )
    library = ComponentManifest(
        name=PLOTLY_PREFIX,
        version=version("plotly"),
        components=[ComponentConfig(name="asset", asset_dir="package_data")],
    )
    manager.register_from_manifest(library, Path(str(files("plotly"))))
    manager.register_from_manifest(own, Path(__file__).parent)


@st.cache_resource(max_entries=len(NAMES))
def _renderer(name: str) -> Callable[..., Any]:
    return st.components.v2.component(
        f"{PREFIX}.{name}", js=f"{name}.js", isolate_styles=name not in OPEN_STYLES
    )


def mount(name: str, data: dict[str, Any] | bytes, key: str, **options: Any) -> Any:
    """Mount component `name`. The key must be the same at every tick: it is what keeps the node."""
    register(get_bidi_component_manager())
    return _renderer(name)(key=key, data=data, **options)
