"""A config that cannot be used is refused with the key, the value and what is allowed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config import Config, load_config, parse_config
from runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"trian": {}},
            "`trian` is no key of the config; did you mean `train`? allowed at the top: name",
        ),
        (
            {"train": {"learning_rate": 1.0}},
            "`train.learning_rate` is no key of the config; allowed in `train`: text, seq_len",
        ),
        ({"train": {"lrr": 1.0}}, "did you mean `train.lr`?"),
        ({"train": {"lr": "fast"}}, "`train.lr` is 'fast'; allowed: a number"),
        ({"train": {"lr": -1.0}}, "`train.lr` is -1.0; allowed: more than 0"),
        ({"train": {"lr": float("inf")}}, "`train.lr` is inf; allowed: more than 0"),
        ({"train": {"lr": float("nan")}}, "`train.lr` is nan; allowed: more than 0"),
        ({"train": {"seq_len": 1.5}}, "`train.seq_len` is 1.5; allowed: a whole number"),
        ({"train": {"sync": "ring"}}, "`train.sync` is 'ring'; allowed: 'direct'"),
        ({"train": {"betas": [0.9]}}, "`train.betas` is [0.9]; allowed: a list of 2"),
        ({"train": {"betas": [0.9, "x"]}}, "`train.betas[1]` is 'x'; allowed: a number"),
        ({"train": {"betas": [0.9, 1.0]}}, "`train.betas` is (0.9, 1.0); allowed: both 0 or more"),
        ({"train": 3}, "`train` is 3; allowed: a table with text, seq_len"),
        ({"model": {"tied": 1}}, "`model.tied` is 1; allowed: true or false"),
        ({"model": {"head_dim": 7}}, "`model.head_dim` is 7; allowed: an even number"),
        (
            {"policy": {"shrink": "never"}},
            "`policy.shrink` is 'never'; allowed: 'approve' or 'auto' or 'auto_after_deadline' or "
            "'by_mode' or 'observe' or 'recommend'",
        ),
        ({"cluster": {"racks": [{"gpus": 8}]}}, "`cluster.racks[0].name` is missing"),
        (
            {"cluster": {"racks": [{"name": "a", "gpus": 99}]}},
            "`cluster.racks[0].gpus` is 99; allowed: 1 to 72",
        ),
        (
            {"cluster": {"racks": [{"name": "a"}, {"name": "b", "gpus": 17}]}},
            "`cluster.racks.b.gpus` is 17; allowed: 1 to 16, so that every slot holds a query head",
        ),
        (
            {"cluster": {"racks": [{"name": "a", "power_budget_w": 900.0}]}},
            "`cluster.racks.a.power_budget_w` is 900.0; allowed: 0 (enough for every normal cap) "
            "or 1600 and more",
        ),
        ({"cluster": {"racks": [{"name": "a"}, {"name": "a"}]}}, "distinct names"),
        (
            {"health": {"gpus": {"GPU-5f": "rack-2/0"}}},
            "`health.gpus.GPU-5f` is 'rack-2/0'; allowed: rack-0/0 to rack-0/7, rack-1/0 to",
        ),
        (
            {"health": {"switches": {"0000:c2:00.0": "rack_0"}}},
            "`health.switches.0000:c2:00.0` is 'rack_0'; allowed: rack-0, rack-1",
        ),
        ({"cluster": {"racks": "a"}}, "`cluster.racks` is 'a'; allowed: a list"),
        (
            {"cluster": {"device": "emulated", "backend": "nccl"}},
            "`cluster.backend` is 'nccl'; allowed: \"gloo\" with device",
        ),
        ({"name": "two\nlines"}, "`name` is 'two\\nlines'; allowed: a printable name"),
        ({"control": {"port": 70000}}, "`control.port` is 70000; allowed: 0 (any free port)"),
    ],
)
def test_says_key_value_and_what_is_allowed(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, origin="run.toml")
    assert str(caught.value).startswith("run.toml: `")
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["[train", "name = 1\nname = 2", "\x00"])
def test_a_file_that_is_no_toml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.toml"):
        load_config(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no\\.toml"):
        load_config(tmp_path / "no.toml")


def test_what_is_stored_with_the_run_reads_back() -> None:
    config = parse_config({"train": {"lr": 0.01}, "name": "mine"}, origin="run.toml")
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


@pytest.mark.parametrize("page", ["README.md", "docs/policy.md"])
def test_what_the_documents_show_is_a_config(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    configs = [parse_config(tomllib.loads(block), origin=page) for block in blocks]
    assert configs
    assert configs[0].policy.approvals.drop == 2
