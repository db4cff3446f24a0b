"""A whole run whose processes each sign in to Redis with rights of their own; what those rights, a
viewer's page and a forged, altered or replayed command cannot do; and that no secret is left lying.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import redis
import sqlalchemy as sa
from playwright.sync_api import Page

from storage.commands import CommandResult, Decide
from storage.identity import Role, sign
from storage.live.redis_store import RedisStore
from storage.records import Proposal, encode_packed
from tests.conftest import missing
from tests.support import leaks, services
from tests.support.acl import PASSWORDS, GuardedRedis, guarded_redis
from tests.support.services import wait_until
from tests.support.up import Up

GPU = "rack-0/1"
DATABASE_PASSWORD = "database-pass-word-0123"
KEYS = {
    "COUNTERPOISE_CONTROL_KEY": "control-key-0123456789abcdef0123456789abcdef",
    "COUNTERPOISE_APP_KEY": "app-key-0123456789abcdef0123456789abcdef",
    "COUNTERPOISE_CLI_KEY": "cli-key-0123456789abcdef0123456789abcdef",
}
SECRETS = (
    KEYS
    | PASSWORDS
    | {f"{name} in an address": quote(one, safe="") for name, one in PASSWORDS.items()}
    | {"the database's": DATABASE_PASSWORD}
)
CONFIG = """
name = "guarded"
[model]
num_layers = 2
hidden = 32
num_query_heads = 8
num_kv_heads = 2
head_dim = 4
mlp_hidden = 56
mlp_block = 8
[train]
seq_len = 16
global_batch = 12
micro_batch = 6
[cluster]
racks = [{ name = "rack-0", gpus = 2 }, { name = "rack-1", gpus = 2 }]
[emulated]
step_s = 0.3
"""


@pytest.fixture
def guarded() -> Iterator[GuardedRedis]:
    try:
        with guarded_redis() as running:
            yield running
    except services.MissingServiceError as error:
        missing(error)


@pytest.fixture
def up(guarded: GuardedRedis, postgres_url: str, tmp_path: Path) -> Iterator[Up]:
    # The server trusts whoever reaches its socket: it takes any password
    database = sa.make_url(postgres_url).set(password=DATABASE_PASSWORD)
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    running = Up(
        tmp_path / "home", "--fresh", "--config", str(config),
        environment=KEYS | PASSWORDS | {
            "COUNTERPOISE_REDIS_URL": guarded.url,
            "COUNTERPOISE_DATABASE_URL": database.render_as_string(hide_password=False),
        },
    )  # fmt: skip
    yield running
    running.kill_hard()


class Intruder:
    """Somebody with one role's credentials for Redis."""

    def __init__(self, guarded: GuardedRedis, role: str, run: str) -> None:
        self.url = guarded.url_of(role)
        self.run = run
        self.store = RedisStore.for_ui(self.url)

    def raw(self, *command: Any) -> Any:
        with redis.Redis.from_url(self.url) as client:
            return client.execute_command(*command)  # type: ignore[no-untyped-call]

    def proposal(self, name: str) -> Proposal:
        found = self.store.get_proposal(self.run, name)
        assert found is not None
        return found

    def put(self, command: Decide) -> CommandResult:
        """Write a command past the page and past the live store's own checks; the answer to it."""
        self.raw("XADD", f"cp:run:{self.run}:commands", "*", "d", encode_packed(command))

        def answered() -> bool:
            return self.store.get_result(self.run, command.id) is not None

        wait_until(answered, 15.0, f"an answer to {command.id}")
        answer = self.store.get_result(self.run, command.id)
        assert answer is not None
        return answer


def _decide(proposal: Proposal, who: str = "mallory") -> Decide:
    return Decide(
        id=uuid.uuid4().hex, at=time.time(), who=who, via="browser", proposal=proposal.id,
        generation=proposal.generation, revision=proposal.revision, verdict="approved",
    )  # fmt: skip


def _signed(proposal: Proposal, role: Role, run: str, key: str = "COUNTERPOISE_APP_KEY") -> Decide:
    return sign(_decide(proposal, who="vera"), run, role, KEYS[key].encode())


@pytest.mark.timeout(300)
def test_a_run_under_rights_of_its_own_and_who_cannot_touch_it(
    guarded: GuardedRedis, up: Up, page: Page
) -> None:
    up.start()
    url = up.await_line(r"dashboard +(http://127\.0\.0\.1:\d+)").group(1)
    up.await_line(r"training +first step committed")
    run = up.cli("status")["run"]
    assert up.cli("fault", "kill", GPU)["ok"]
    wait_until(lambda: bool(up.cli("proposals")), 30.0, "a proposal")
    name = up.cli("proposals")[0]["id"]

    _lesser_credentials_cannot_write(guarded, run, name)
    forged = _forged_altered_and_replayed_commands_are_refused(guarded, run, name)

    page.goto(f"{url}/reconfigure?run={run}")
    page.get_by_role("button", name="Approve…").click()
    page.get_by_role("dialog").get_by_role("button", name="Approve", exact=True).click()
    viewer = RedisStore.for_ui(guarded.url_of("viewer"))
    wait_until(lambda: _state(viewer, run, name) == "applied", 30.0, "an applied proposal")
    _a_replayed_decision_counts_once(guarded, run, name, forged)
    expected = {(user, what) for user, _, what in guarded.refusals()}

    _only_this_machine_is_let_in(up)
    _no_secret_is_in_sight(up, page)
    assert up.interrupt() == 0
    wait_until(lambda: not up.processes(), 10.0, f"an end of {up.processes()}")
    # Nothing that a process of ours wanted was refused, up to the last of them
    assert {(user, what) for user, _, what in guarded.refusals()} == expected
    assert not {user for user, _ in expected} & {"controller", "default"}
    _the_audit_tells_it(up, run, forged)
    viewer.close()
    assert leaks.containing([up.home, up.log, guarded.server.folder], SECRETS) == []


def _only_this_machine_is_let_in(up: Up) -> None:
    addresses = leaks.listening(up.processes())
    assert len(addresses) > 2, "the dashboard, the controller and its rendezvous listen"
    assert [one for one in addresses if not one.startswith(("127.", "::1"))] == []


def _no_secret_is_in_sight(up: Up, page: Page) -> None:
    seen = {
        "command lines": leaks.command_lines(up.processes()),
        "address": page.url,
        "page": page.content(),
        "terminal": up.said(),
    }
    shown = [(where, name) for where in seen for name, one in SECRETS.items() if one in seen[where]]
    assert shown == []


def _state(store: RedisStore, run: str, name: str) -> str:
    found = store.get_proposal(run, name)
    return found.state if found else ""


def _lesser_credentials_cannot_write(guarded: GuardedRedis, run: str, name: str) -> None:
    assert guarded.refusals() == [], "a process of the run was refused something"
    writes = (
        ("XADD", f"cp:run:{run}:commands", "*", "d", "x"),
        ("HSET", f"cp:run:{run}:proposal:{name}", "state", "approved"),
        ("HSET", f"cp:run:{run}:state", "body", "x"),
        ("XADD", f"cp:run:{run}:journal", "999999-0", "d", "x"),
        ("DEL", f"cp:run:{run}:proposal:{name}"),
        ("XADD", "cp:notes", "*", "d", "x"),
        ("RENAME", f"cp:run:{run}:journal", "cp:x"),
        ("EVAL", "return redis.call('DEL', KEYS[1])", 1, f"cp:run:{run}:state"),
        ("CONFIG", "SET", "maxmemory", "1"),
        ("FLUSHALL",),
    )
    may = {
        "app": {("XADD", 0), ("HSET", 1), ("XADD", 5)},
        "viewer": set[tuple[str, int]](),
        "agent": set[tuple[str, int]](),
        "recorder": set[tuple[str, int]](),
        "notifier": set[tuple[str, int]](),
    }
    for role, allowed in may.items():
        intruder = Intruder(guarded, role, run)
        for index, write in enumerate(writes):
            if (write[0], index) in allowed:
                continue
            with pytest.raises(redis.exceptions.ResponseError) as caught:
                intruder.raw(*write)
            assert "permission" in str(caught.value), (role, write, caught.value)
        intruder.store.close()


def _forged_altered_and_replayed_commands_are_refused(
    guarded: GuardedRedis, run: str, name: str
) -> list[str]:
    """With the app's own credentials, past the page: ids of what was tried."""
    intruder = Intruder(guarded, "app", run)
    standing = intruder.proposal(name)
    signed = _signed(standing, "approver", run)
    tried = {
        "not signed": _decide(standing),
        "forged": msgspec.structs.replace(_decide(standing), role="admin", signature="0" * 64),
        "altered": msgspec.structs.replace(signed, id=uuid.uuid4().hex, who="mallory"),
        "a role of another": msgspec.structs.replace(
            _signed(standing, "viewer", run), role="approver"
        ),
        "role viewer": _signed(standing, "viewer", run),
        "for another run": _signed(standing, "approver", "another-run"),
        "by another key": _signed(standing, "approver", run, "COUNTERPOISE_CLI_KEY"),
    }
    for what, command in tried.items():
        answer = intruder.put(command)
        assert (answer.ok, answer.code) == (False, "not_allowed"), (what, answer)
        # Not by the live store's own way either: what it took for an answer is taken back
        assert intruder.proposal(name).state == "open", what
    # Written straight into the live store: the run does not go by it
    intruder.raw("HSET", f"cp:run:{run}:proposal:{name}", "state", "approved")
    answer = intruder.put(_decide(standing))
    assert answer.code == "not_allowed"
    wait_until(lambda: intruder.proposal(name).state == "open", 10.0, "the truth again")
    intruder.store.close()
    return [command.id for command in tried.values()]


def _a_replayed_decision_counts_once(
    guarded: GuardedRedis, run: str, name: str, forged: list[str]
) -> None:
    intruder = Intruder(guarded, "app", run)
    entries = intruder.raw("XRANGE", f"cp:run:{run}:commands", "-", "+")
    body = next(
        fields[b"d"] for _, fields in entries
        if b"approved" in fields[b"d"] and not any(one.encode() in fields[b"d"] for one in forged)
        and b"mallory" not in fields[b"d"]
    )  # fmt: skip
    before = intruder.proposal(name)
    length = len(intruder.store.tail_journal(run, 5000))
    intruder.raw("XADD", f"cp:run:{run}:commands", "*", "d", body)
    wait_until(
        lambda: any(
            getattr(one, "code", "") == "duplicate"
            for one in intruder.store.tail_journal(run, 5000)[length - 1 :]
        ),
        15.0,
        "the answer to a replay",
    )
    after = intruder.proposal(name)
    assert (after.state, after.decided_at) == ("applied", before.decided_at)
    intruder.store.close()


def _the_audit_tells_it(up: Up, run: str, forged: list[str]) -> None:
    rows = up.cli("audit", "list", "--limit", "1000")
    refused = {row["id"] for row in rows if row["result"].startswith("not_allowed")}
    assert set(forged) <= refused
    done = [row for row in rows if row["what"].startswith("decide") and row["result"][:4] == "done"]
    assert [row["via"] for row in done] == ["browser"]
    assert [row["run"] for row in done] == [run]
    assert sum(row["result"].startswith("duplicate") for row in rows) == 1
    assert any(row["what"] == "signed in" and row["result"] == "done" for row in rows)
    assert up.cli("audit", "verify")["ok"]
