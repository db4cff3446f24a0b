"""The Prometheus endpoint over every live store, and the dashboard that is made for it."""

from __future__ import annotations

import json
import math
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml

from runtime.errors import UserError
from runtime.health.prometheus import ExpositionReader
from runtime.metrics.collect import LINGER_S, collect
from runtime.metrics.exposition import CONTENT_TYPE, FAMILIES, PREFIX
from runtime.metrics.server import MetricsServer
from storage.live.memory import MemoryStore
from storage.live.port import LiveStore, LiveStoreDown
from storage.notifier_state import ChannelState, NotifierState
from storage.records import RunState
from tests.contract import records
from tests.contract.records import RUN
from tests.support.feeder import Feeder

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "counterpoise.json").read_text())
_SAMPLE = re.compile(r'^([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)$')
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Series:
    """Every sample; fails where the text is not what the format's description asks for."""
    series: Series = {}
    family = ""
    seen: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in seen, f"{family} comes twice"
            seen.append(family)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family
            assert kind in ("gauge", "counter")
            assert (kind == "counter") == name.endswith("_total")
        else:
            match = _SAMPLE.match(line)
            assert match, line
            assert match[1] == family
            key = (match[1], frozenset(_LABEL.findall(match[2] or "")))
            assert key not in series, f"twice: {line}"
            series[key] = float(match[3])
    return series


def value(series: Series, family: str, **labels: str) -> float:
    return series[PREFIX + family, frozenset(labels.items())]


def busy_store(store: LiveStore) -> RunState:
    """A run that lost a GPU and waits, as the dashboard's tests have it, and a notifier."""
    feeder = Feeder(store, run=RUN, prefill=20)
    feeder.begin()
    feeder.fault("r1/3", "kill")
    feeder._append_all()
    feeder._publish()
    channel = ChannelState(name="slack a", pending=2, delivered=5, failing_since=1.0)
    store.put_notifier(NotifierState(at=1.0, host="h", base_url="b", channels=(channel,)))
    state = store.get_run(RUN)
    assert state is not None
    return state


def test_everything_is_there_and_right(store: LiveStore) -> None:
    state = busy_store(store)
    series = parse(collect(store, state.updated_at + 3.0))
    assert {name for name, _ in series} == {PREFIX + name for name in FAMILIES}
    assert value(series, "live_store_up") == 1
    assert value(series, "steps_total", run=RUN) == state.step
    assert value(series, "tokens_per_second", run=RUN) == state.tokens_per_s
    assert value(series, "goodput_ratio", run=RUN, kind="token") == state.token_goodput
    assert value(series, "data_age_seconds", run=RUN) == pytest.approx(3.0)
    assert value(series, "replica_degree", run=RUN, replica="1", rack="r1") == 7
    assert value(series, "replica_training", run=RUN, replica="1", rack="r1") == 0
    assert value(series, "gpus", run=RUN, rack="r1", state="failed") == 1
    assert value(series, "gpus", run=RUN, rack="r1", state="healthy") == 7
    assert value(series, "proposals", run=RUN, state="open") == 1
    spent = [v for (name, _), v in series.items() if name == f"{PREFIX}ledger_seconds_total"]
    assert sum(spent) == pytest.approx(value(series, "wall_seconds_total", run=RUN), abs=0.5)
    rack = store.get_racks(RUN)["r0"]
    watts = float(np.nansum(rack.column("power_w")))
    assert value(series, "rack_power_watts", run=RUN, rack="r0") == pytest.approx(watts)
    one = value(series, "gpu_power_watts", run=RUN, rack="r0", slot="2")
    assert one == pytest.approx(float(rack.column("power_w")[2]))
    assert value(series, "notices_total", channel="slack a", outcome="delivered") == 5
    assert value(series, "channel_failing", channel="slack a") == 1
    assert value(series, "journal_unrecorded", run=RUN) == store.last_seq(RUN)


def test_our_own_reader_understands_every_line(store: LiveStore) -> None:
    reader = ExpositionReader()
    reader.read(collect(store, busy_store(store).updated_at).splitlines())
    assert reader.num_not_understood == 0


def test_odd_names_and_numbers_are_written_as_the_format_wants() -> None:
    store = MemoryStore()
    name = 'a "b" \\ c\nd'
    store.put_run(records.run_state(name=name, loss=math.nan, tokens_per_s=math.inf))
    unknown = np.full(8, np.nan, "<f4").tobytes()
    store.put_racks([records.rack(temp_c=unknown, power_w=unknown)])
    series = parse(collect(store, 200.0))
    (labels,) = [dict(labels) for family, labels in series if family == f"{PREFIX}run_info"]
    assert labels["name"] == r"a \"b\" \\ c\nd"
    assert math.isnan(value(series, "loss", run=RUN))
    assert math.isinf(value(series, "tokens_per_second", run=RUN))
    assert not [key for key in series if key[0] == f"{PREFIX}gpu_temperature_celsius"]
    assert value(series, "rack_power_watts", run=RUN, rack="rack-0") == 0


def test_a_huge_run_gives_racks_only_and_is_quick() -> None:
    store = MemoryStore()
    store.put_run(records.run_state())
    store.put_racks([records.rack(f"rack-{number:03}", gpus=72) for number in range(455)])
    begun = time.process_time()
    series = parse(collect(store, 200.0))
    assert time.process_time() - begun < 5.0
    names = {name for name, _ in series}
    assert f"{PREFIX}gpu_power_watts" not in names
    gpus = [v for (name, _), v in series.items() if name == f"{PREFIX}gpus"]
    assert sum(gpus) == 455 * 72


def test_an_ended_run_lingers_and_goes() -> None:
    store = MemoryStore()
    store.put_run(records.run_state(status="stopped", ended_at=300.0))
    series = parse(collect(store, 310.0))
    assert value(series, "run_active", run=RUN) == 0
    assert (f"{PREFIX}run_active", frozenset({("run", RUN)})) not in parse(
        collect(store, 301.0 + LINGER_S)
    )


class Away(MemoryStore):
    def list_runs(self) -> list[RunState]:
        raise LiveStoreDown("away")


def test_a_store_that_is_away_is_a_metric() -> None:
    assert parse(collect(Away(), 1.0)) == {(f"{PREFIX}live_store_up", frozenset()): 0.0}


def test_it_is_served_over_http_and_reads_once_a_second() -> None:
    made: list[int] = []

    def make() -> str:
        made.append(1)
        return collect(MemoryStore(), 1.0)

    with MetricsServer("127.0.0.1", 0, make) as server:
        url = f"http://127.0.0.1:{server.port}"
        for _ in range(5):
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
                assert reply.headers["Content-Type"] == CONTENT_TYPE
                assert value(parse(reply.read().decode()), "live_store_up") == 1
        assert len(made) < 5
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url, timeout=10)
        with pytest.raises(UserError, match="--port"):
            MetricsServer("127.0.0.1", server.port, make)


# the ready dashboard -------------------------------------------------------------------------
def expressions() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    found += [one["expr"] for one in DASHBOARD["annotations"]["list"]]
    return [*found, *(one["query"]["query"] for one in DASHBOARD["templating"]["list"][1:])]


def test_every_metric_and_label_of_the_dashboard_is_served() -> None:
    store = MemoryStore()
    served: dict[str, set[str]] = {}
    for name, labels in parse(collect(store, busy_store(store).updated_at)):
        served.setdefault(name, set()).update(key for key, _ in labels)
    asked = expressions()
    assert len(asked) > 20
    for expression in asked:
        names = re.findall(rf"{PREFIX}\w+", expression)
        assert names, expression
        for name in names:
            assert name in served, f"{name} of {expression!r} is not served"
        every = set.union(*(served[name] for name in names))
        for inside in re.findall(r"\{([^}]*)\}|by \(([^)]*)\)", expression):
            for label in re.findall(r"(\w+)(?=\s*[=!]|\s*$|,)", inside[0] or inside[1]):
                assert label in every, f"label {label} of {expression!r}"
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert any(
                    label in served[name] for name in re.findall(rf"{PREFIX}\w+", target["expr"])
                )


def test_its_panels_lie_side_by_side() -> None:
    cells: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        mine = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not mine & cells, panel["title"]
        cells |= mine


def test_the_monitoring_services_fit_the_others() -> None:
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())["services"]
    more = yaml.safe_load((DEPLOY / "monitoring.yml").read_text())["services"]
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    ((target,),) = [one["static_configs"][0]["targets"] for one in scrape["scrape_configs"]]
    assert target == "metrics:9464"
    assert "metrics" in compose
    for service in more.values():
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY.parent / source).exists(), source
    provisioning = DEPLOY / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    folder = yaml.safe_load((provisioning / "dashboards" / "counterpoise.yml").read_text())
    path = folder["providers"][0]["options"]["path"]
    assert any(f"{path}/counterpoise.json" in volume for volume in more["grafana"]["volumes"])


def test_state_without_loss_is_served() -> None:
    store = MemoryStore()
    store.put_run(msgspec.structs.replace(records.run_state(), loss=None))
    assert (f"{PREFIX}loss", frozenset({("run", RUN)})) not in parse(collect(store, 200.0))
