"""The shell's side of deciding: real commands, on a real store, against a real coordinator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config import PolicyConfig
from runtime.plan.policy_config import Approvals
from storage.live.redis_store import RedisStore
from tests.conftest import missing
from tests.support import services
from tests.support.control_cluster import sim_config
from tests.support.live_cluster import LiveCluster


class Shell:
    """`counterpoise` commands over one run."""

    def __init__(self, home: Path, url: str) -> None:
        self._env = os.environ | {"COUNTERPOISE_HOME": str(home), "COUNTERPOISE_REDIS_URL": url}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What it said; `code` is the exit code it must end with."""
        done = subprocess.run(
            [sys.executable, "-m", "counterpoise", *arguments],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture(scope="module")
def server() -> Iterator[services.RedisServer]:
    try:
        with services.running_redis() as running:
            yield running
    except services.MissingServiceError as error:
        missing(error)


def started(
    request: pytest.FixtureRequest, server: services.RedisServer, policy: PolicyConfig
) -> LiveCluster:
    """A run of its own that has lost rack-0/1."""
    store = RedisStore.for_service(server.url)
    run = f"shell-{request.node.name}"
    config = msgspec.structs.replace(sim_config(3, 3, 3, policy=policy), name=run)
    made = LiveCluster(config, store, run)
    request.addfinalizer(store.close)
    request.addfinalizer(made.stop)
    made.start()
    made.act(lambda cluster: cluster.kill("rack-0/1"))
    made.proposal(lambda one: one.state == "open")
    return made


@pytest.fixture
def shell(server: services.RedisServer, tmp_path: Path) -> Shell:
    return Shell(tmp_path, server.url)


def test_policy_is_shown_and_changed(
    request: pytest.FixtureRequest, server: services.RedisServer, shell: Shell
) -> None:
    run = started(request, server, PolicyConfig())
    at = ("--run", run.run)
    assert "act with approval: what has no answer of its own" in shell("policy", "show", *at)
    words = shell("policy", "set", "mode=sleep", "--reason", "a test", *at, code=1)
    assert "`mode` is 'sleep'; allowed: 'act' or 'act_with_approval'" in words
    assert "KEY=VALUE" in shell("policy", "set", "mode", "--reason", "x", *at, code=2)
    window = 'quiet_hours=[{begin="22:00", end="06:00", zone="Europe/Berlin"}]'
    words = shell(
        "policy", "set", "mode=recommend", window, "approvals.drop=2", "--reason", "demo", *at
    )
    assert words.startswith("done: the policy is recommend")
    assert "the policy's mode is recommend" in shell("approve", "p1", "--yes", *at, code=1)
    shown = shell("policy", "show", *at)
    assert "recommend: proposals are shown; nobody can carry them out" in shown
    assert "mode act_with_approval to recommend" in shown
    assert "(demo)" in shown
    found = shell.json("policy", "show", *at)
    assert (found["revision"], found["values"]["approvals"]["drop"]) == (1, 2)


def test_refusals_say_which_and_what_changed_since(
    request: pytest.FixtureRequest, server: services.RedisServer, shell: Shell
) -> None:
    run = started(request, server, PolicyConfig(evidence_max_age_s=0.5))
    at = ("--run", run.run)
    opened = run.proposal(lambda one: one.id == "p1")
    services.wait_until(lambda: time.time() > opened.evidence_at + 0.6, 5.0, "old evidence")
    words = shell("approve", "p1", "--yes", *at, code=1)
    assert words.startswith("stale: proposal p1: the evidence is too old: the newest was seen")
    assert "Since it was proposed" in words
    assert "The runtime has looked again: p2 proposes" in words
    words = shell("approve", "p1", "--yes", *at, code=1)
    assert "stale: Proposal p1 is stale: the evidence is too old" in words
    assert shell("policy", "set", "evidence_max_age_s=600", "--reason", "slow", *at)
    run.proposal(lambda one: one.id == "p2" and one.evidence_max_age_s == 600.0)
    words = shell("approve", "p2", "--yes", "--option", "1", *at, code=2)
    assert "--reason is empty" in words
    assert shell("approve", "p2", "--yes", *at).startswith("done: proposal p2 approved")
    assert "decided: Proposal p2 is already" in shell("approve", "p2", "--yes", *at, code=1)
    run.proposal(lambda one: one.id == "p2" and one.state == "applied")
    assert "opened proposal p3" in shell("undo", "p2", "--reason", "only a try", *at)
    inverse = run.proposal(lambda one: one.undoes == "p2")
    assert (inverse.kind, inverse.state) == ("drop", "open")
    run.act(lambda cluster: cluster.kill("rack-1/1"))
    run.proposal(lambda one: one.id == "p3" and one.state == "stale")
    words = shell("approve", "p3", "--yes", *at, code=1)
    assert "stale: Proposal p3 is stale: generation" in words
    assert "rack-1/1 failed" in words


def test_one_person_is_not_two(
    request: pytest.FixtureRequest, server: services.RedisServer, shell: Shell
) -> None:
    policy = PolicyConfig(approvals=Approvals(shrink=2), expires_s=25.0)
    run = started(request, server, policy)
    at = ("--run", run.run)
    words = shell("approve", "p1", "--yes", *at)
    assert words.startswith("done: 1 of 2 approvals, by ")
    words = shell("approve", "p1", "--yes", *at, code=1)
    assert "behind it already; another person must approve it" in words
    assert "1 of 2 approvals" in shell("proposals", "p1", *at)
    run.proposal(lambda one: one.id == "p1" and one.state == "expired", "an expiry")
    words = shell("approve", "p1", "--yes", *at, code=1)
    assert "expired: Proposal p1 has expired: nobody answered within 25 s" in words
