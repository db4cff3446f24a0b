"""A lesser role's credentials can read, but write neither commands nor proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from storage.live.acl import ROLES, acl_file, password_variable
from storage.live.port import LiveStoreDown
from storage.live.redis_store import RedisStore
from storage.settings import SettingsError
from tests.conftest import missing
from tests.contract import records
from tests.support import services

RUN = records.RUN
ENV = {password_variable(role): f"a-long-password-of-{role}" for role in ROLES}


@pytest.fixture(params=["embedded", "system"])
def url_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """URL by role of a server that has loaded the ACL file."""
    try:
        with services.running_redis(request.param) as server:
            with redis.Redis.from_url(server.url) as admin:
                # The default user last: it is who sets up the others.
                for line in reversed(acl_file(ENV).splitlines()):
                    _, name, *rules = line.split()
                    admin.execute_command("ACL", "SETUSER", name, *rules)
            yield (
                lambda role: (
                    f"unix://{role}:{ENV[password_variable(role)]}@{server.url.removeprefix('unix://')}"
                )
            )
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
    assert not any(password in acl_file(ENV) for password in ENV.values())
