"""A lesser role's credentials can read, but write neither commands nor proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from runtime.metrics.collect import collect
from storage.audit import AuditNote
from storage.audit_records import SignedIn
from storage.live.acl import acl_file, as_role, without_others
from storage.live.port import LiveStoreDown
from storage.live.redis_store import RedisStore
from storage.notifier_state import NotifierState
from storage.settings import Settings, SettingsError
from tests.conftest import missing
from tests.contract import records
from tests.support import services
from tests.support.acl import PASSWORDS, guarded_redis

RUN = records.RUN


@pytest.fixture(params=["embedded", "system"])
def url_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """URL by role of a server that has loaded the ACL file."""
    try:
        with guarded_redis(request.param) as guarded:
            yield guarded.url_of
    except services.MissingServiceError as error:
        missing(error)


@pytest.mark.redis_server
@pytest.mark.parametrize("role", ["viewer", "agent", "recorder", "notifier"])
def test_lesser_roles_cannot_write_commands_or_proposals(
    url_of: Callable[[str], str], role: str
) -> None:
    controller = RedisStore.for_service(url_of("controller"))
    controller.put_proposal(records.proposal())
    lesser = RedisStore.for_ui(url_of(role))
    with pytest.raises((LiveStoreDown, redis.RedisError)):
        lesser.submit(RUN, records.decide(), now=1.0)
    with (
        redis.Redis.from_url(url_of(role).replace(f"{role}:", "nobody:", 1)) as nobody,
        pytest.raises(redis.RedisError),
    ):
        nobody.ping()
    with redis.Redis.from_url(url_of(role)) as client:
        for command in (
            ("XADD", f"cp:run:{RUN}:commands", "*", "d", "x"),
            ("HSET", f"cp:run:{RUN}:proposal:p", "state", "approved"),
            ("FLUSHALL",),
            ("ACL", "LIST"),
            ("CONFIG", "GET", "*"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
    assert controller.read_commands(RUN, "", block_ms=1) == []
    assert lesser.list_proposals(RUN) == controller.list_proposals(RUN) != []
    lesser.close()
    controller.close()


@pytest.mark.redis_server
def test_the_app_can_submit_and_no_more(url_of: Callable[[str], str]) -> None:
    app, controller = RedisStore.for_ui(url_of("app")), RedisStore.for_service(url_of("controller"))
    assert app.submit(RUN, records.stop(), now=1.0).ok
    assert len(controller.read_commands(RUN, "", block_ms=1)) == 1
    with redis.Redis.from_url(url_of("app")) as client:
        for key in (f"cp:run:{RUN}:state", f"cp:run:{RUN}:journal", "cp:runs"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command("DEL", key)
    app.close()
    controller.close()


def test_missing_passwords_are_named_and_none_is_printed() -> None:
    with pytest.raises(SettingsError, match="COUNTERPOISE_REDIS_APP_PASSWORD"):
        acl_file({})
    assert not any(password in acl_file(PASSWORDS) for password in PASSWORDS.values())


def test_a_process_signs_in_with_its_own_password_alone(tmp_path: Path) -> None:
    home = {"COUNTERPOISE_HOME": str(tmp_path)}
    settings = Settings.from_env(home | {"COUNTERPOISE_REDIS_URL": "redis://cache:6379/1?x=y"})
    assert as_role(settings, "agent", env={}) == settings
    address = as_role(settings, "agent", env=PASSWORDS)
    assert address.redis_url == "redis://agent:a-long%2Fpass%40word-of-agent@cache:6379/1?x=y"
    assert "word-of-agent" not in address.redis_redacted
    # A command in a container that has one password signs in with that one
    one = {"COUNTERPOISE_REDIS_VIEWER_PASSWORD": "x" * 16}
    assert as_role(settings, "app", "viewer", env=one).redis_url.startswith("redis://viewer:xxx")
    named = Settings.from_env(home | {"COUNTERPOISE_REDIS_URL": "redis://me:secret@cache"})
    with pytest.raises(SettingsError, match="names a user") as caught:
        as_role(named, "agent", env=PASSWORDS)
    assert "secret" not in str(caught.value)
    left = without_others(PASSWORDS | {"PATH": "/bin"}, "agent")
    assert sorted(left) == [
        "COUNTERPOISE_REDIS_AGENT_PASSWORD", "COUNTERPOISE_REDIS_VIEWER_PASSWORD", "PATH",
    ]  # fmt: skip


@pytest.mark.redis_server
def test_each_role_can_do_its_own_work(url_of: Callable[[str], str]) -> None:
    controller = RedisStore.for_service(url_of("controller"))
    stores = {role: RedisStore.for_ui(url_of(role)) for role in ("app", "agent", "recorder")}
    controller.put_run(records.run_state())
    controller.append(RUN, [records.started()])
    controller.put_proposal(records.proposal())
    stores["agent"].put_racks([records.rack()])
    assert stores["app"].submit(RUN, records.decide(), now=1.0).ok
    assert not stores["app"].submit(RUN, records.decide(id="c-2"), now=1.0).ok
    came = SignedIn(id="s1", at=1.0, who="ana", via="browser", event="signed in")
    stores["app"].note(AuditNote(run="", code="", asked=came))
    recorder = stores["recorder"]
    assert recorder.list_journals() == {RUN: (1, 0)}
    assert len(recorder.read_journal_raw(RUN, 0)) == 1
    recorder.acknowledge(RUN, 1)
    assert [note.code for _, _, note in recorder.read_notes(0) if isinstance(note, AuditNote)] == [
        "decided",
        "",
    ]
    recorder.acknowledge_notes(recorder.read_notes(0)[-1][0])
    assert recorder.read_notes(0) == []
    viewer = RedisStore.for_ui(url_of("viewer"))
    assert [run.run for run in viewer.list_runs()] == [RUN]
    assert list(viewer.get_racks(RUN)) == ["rack-0"]
    for one in (controller, viewer, *stores.values()):
        one.close()


@pytest.mark.redis_server
def test_metrics_and_notifier_get_by_with_what_they_may(url_of: Callable[[str], str]) -> None:
    controller = RedisStore.for_service(url_of("controller"))
    controller.put_run(records.run_state())
    controller.append(RUN, [records.started()])
    viewer, notifier = RedisStore.for_ui(url_of("viewer")), RedisStore.for_ui(url_of("notifier"))
    assert "counterpoise_journal_unrecorded" in collect(viewer, 200.0)
    state = NotifierState(at=1.0, host="here", base_url="", channels=())
    assert notifier.list_journals() == {RUN: (1, 0)}
    assert len(notifier.read_journal_raw(RUN, 0)) == 1
    notifier.put_notifier(state)
    assert viewer.get_notifier() == state
    for store in (controller, viewer, notifier):
        store.close()
