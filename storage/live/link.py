"""One connection pool to Redis: the single point where its errors become ours.

Speaks RESP2 so that replies have one form with every server from Redis 7.0 on and every redis-py.
Knows commands and scripts; must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from storage.live.port import LiveStoreDown
from storage.records import RecordError
from storage.settings import redact_url

Argument = bytes | str | int | float
SCRIPTS = (
    "acknowledge",
    "append",
    "drop_run",
    "put_proposal",
    "put_racks",
    "put_run",
    "note",
    "submit",
)


class RedisLink:
    """Sends commands, pipelines and scripts.

    Args:
        url: redis://, rediss:// or unix:// address.
        timeout_s: longest wait for a connection, and for a reply beyond a block.
        num_retries: how often a command is sent again; safe, since every write is idempotent.
    """

    def __init__(self, url: str, *, timeout_s: float, num_retries: int) -> None:
        self.address = redact_url(url)
        backoff = ExponentialBackoff(cap=0.2, base=0.02) if num_retries else NoBackoff()
        try:
            self._client = redis.Redis.from_url(
                url,
                protocol=2,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(backoff, num_retries),
            )
        except (ValueError, TypeError) as error:
            raise LiveStoreDown(f"{self.address} is not an address of a Redis: {error}") from error
        folder = files("storage.live") / "scripts"
        self._scripts = {
            name: self._client.register_script((folder / f"{name}.lua").read_text(encoding="utf-8"))
            for name in SCRIPTS
        }

    def execute(self, *command: Argument) -> Any:
        with self._translated():
            return self._client.execute_command(*command)  # type: ignore[no-untyped-call]

    def pipeline(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Replies of several reads in one round trip."""
        with self._translated(), self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)  # type: ignore[no-untyped-call]
            return list(pipe.execute())

    def script(self, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Run scripts/`name`.lua; all or nothing of it happens."""
        with self._translated():
            return self._scripts[name](keys=list(keys), args=list(arguments))

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise LiveStoreDown(
                f"Redis at {self.address} refuses this user: {error}; "
                "check the user and password in COUNTERPOISE_REDIS_URL"
            ) from error
        except ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                raise RecordError(
                    f"a key in {self.address} holds something else: {error}"
                ) from error
            raise LiveStoreDown(f"Redis at {self.address} refused a command: {error}") from error
        except (RedisError, OSError) as error:
            raise LiveStoreDown(
                f"Redis at {self.address} cannot be reached: {error}; "
                "start it (`counterpoise up` starts one) or set COUNTERPOISE_REDIS_URL"
            ) from error
