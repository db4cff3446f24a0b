"""A Redis with the users of `counterpoise redis-acl`, and one more that looks at refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import redis

from storage.live.acl import ROLES, acl_file, as_role, password_variable
from storage.settings import Settings
from tests.support import services

PASSWORDS = {password_variable(role): f"a-long/pass@word-of-{role}" for role in ROLES}
INSPECTOR = "inspector"


@dataclass
class GuardedRedis:
    """url: without a user, as COUNTERPOISE_REDIS_URL names it."""

    server: services.RedisServer
    env: dict[str, str] = field(default_factory=lambda: dict(PASSWORDS))

    @property
    def url(self) -> str:
        return self.server.url

    def url_of(self, role: str) -> str:
        """The address that a process of this role makes of it."""
        home = str(self.server.folder)
        settings = Settings.from_env(
            {"COUNTERPOISE_HOME": home, "COUNTERPOISE_REDIS_URL": self.url}
        )
        return as_role(settings, role, env=self.env).redis_url

    def refusals(self) -> list[tuple[str, str, str]]:
        """(user, context, what) of everything that the server has refused so far."""
        url = self.url.replace("unix://", f"unix://{INSPECTOR}:{INSPECTOR}@")
        with redis.Redis.from_url(url) as inspector:
            return [
                (one["username"], one["context"], one["object"])
                for one in inspector.acl_log()  # type: ignore[no-untyped-call]
            ]


@contextmanager
def guarded_redis(kind: str = "any") -> Iterator[GuardedRedis]:
    """Raises `services.MissingServiceError` where there is no server of that kind."""
    with services.running_redis(kind) as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command(
                "ACL", "SETUSER", INSPECTOR, "on", f">{INSPECTOR}", "+acl|log", "+@connection"
            )
            # The default user last: it is who sets up the others.
            for line in reversed(acl_file(PASSWORDS).splitlines()):
                _, name, *rules = line.split()
                admin.execute_command("ACL", "SETUSER", name, *rules)
        yield GuardedRedis(server)
