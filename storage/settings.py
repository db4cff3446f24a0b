"""Where this installation keeps its state: home folder, address of Redis, address of the history.

Decided from the environment alone, so that every process that sees the same environment agrees.
Passwords live in these addresses, so anything shown to a person goes through `redact_url`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

HOME_VARIABLE = "COUNTERPOISE_HOME"
REDIS_VARIABLE = "COUNTERPOISE_REDIS_URL"
DATABASE_VARIABLE = "COUNTERPOISE_DATABASE_URL"

# A Unix socket path may have 107 bytes on Linux and 103 on macOS.
MAX_SOCKET_PATH_BYTES = 100
_SECRET_PARAMETERS = frozenset({"password", "passwd", "pass", "sslpassword", "ssl_password"})


class SettingsError(Exception):
    """An environment variable that cannot be used: names it, its value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved addresses. The URLs may carry passwords: show and log the redacted ones only."""

    home: Path
    redis_url: str = field(repr=False)
    database_url: str = field(repr=False)
    external_redis: bool

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the environment (or `env`) and create the home folder, readable by its owner only.

        Raises:
            SettingsError: names the variable, its (redacted) value and what is allowed.
        """
        env = os.environ if env is None else env
        home = _make_home(env.get(HOME_VARIABLE, ""))
        socket = socket_path(home)
        if socket.parent != home:
            # In /tmp somebody else could have put a server of theirs at this path
            make_private_folder(socket.parent)
        redis_url = env.get(REDIS_VARIABLE, "").strip()
        database_url = env.get(DATABASE_VARIABLE, "").strip()
        return cls(
            home=home,
            redis_url=_check_redis(redis_url) if redis_url else socket_url(socket),
            database_url=_check_database(database_url) if database_url else _sqlite_url(home),
            external_redis=bool(redis_url),
        )

    @property
    def redis_redacted(self) -> str:
        return redact_url(self.redis_url)

    @property
    def database_redacted(self) -> str:
        return redact_url(self.database_url)

    @property
    def redis_socket(self) -> Path:
        """Socket of the embedded server of this home (used unless `external_redis`)."""
        return socket_path(self.home)


def redact_url(url: str) -> str:
    """`url` with every password replaced by `***`; safe for messages and logs."""
    try:
        parts = urlsplit(url)
        query = urlencode(
            [
                (key, "***" if key.lower() in _SECRET_PARAMETERS else value)
                for key, value in parse_qsl(parts.query, keep_blank_values=True)
            ],
            safe="*/",
        )
        userinfo, at, host = parts.netloc.rpartition("@")
        user, colon, _ = userinfo.partition(":")
        netloc = f"{user}{':***' if colon else ''}{at}{host}"
        # urlunsplit drops the empty authority of unix:///path
        prefix = f"{parts.scheme}://" if "://" in url else ""
        rest = urlunsplit(("", "", parts.path, query, ""))
    except ValueError:
        return re.sub(r"^([a-z0-9+]*://)?.*$", r"\1***", url, flags=re.DOTALL)
    if not prefix:
        # Not an address: it may be a bare password, and nothing tells which part of it
        return "***" if url else ""
    return f"{prefix}{netloc}{rest}"


def socket_path(home: Path) -> Path:
    """The Unix socket of the embedded Redis of `home`: the same path for whoever computes it.

    In the home folder, or, where that path is too long for a socket, in a private folder in /tmp
    named by user and a hash of the home (not in $TMPDIR: it differs between shells of one user).
    """
    path = home / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:12]
    return Path("/tmp") / f"counterpoise-{os.getuid()}-{digest}" / "redis.sock"


def socket_url(path: Path) -> str:
    return f"unix://{quote(str(path))}"


def socket_of(url: str) -> Path | None:
    """The socket path of a `unix://` address, None for the others."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "unix" else None


def make_private_folder(path: Path) -> None:
    """Create `path` with mode 0700; refuse one that somebody else owns.

    Raises:
        SettingsError: it cannot be created, is not a folder, or is not ours.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat(follow_symlinks=False)
    except OSError as error:
        raise SettingsError(
            f"cannot create the folder {path}: {error.strerror}; "
            f"set {HOME_VARIABLE} to a folder that can be written"
        ) from error
    if status.st_uid != os.getuid():
        raise SettingsError(
            f"the folder {path} belongs to user {status.st_uid}, not to this user ({os.getuid()}); "
            f"set {HOME_VARIABLE} to a folder of your own"
        )


def _make_home(value: str) -> Path:
    if "\0" in value:
        raise SettingsError(f"{HOME_VARIABLE} is {value!r}; allowed: the path of a folder")
    home = Path(value).expanduser() if value.strip() else Path.cwd() / ".counterpoise"
    home = home.resolve()
    make_private_folder(home)
    return home


def _check_redis(url: str) -> str:
    allowed = "redis://[user:password@]host[:port][/db], rediss://... or unix:///path/to/socket"
    try:
        parts = urlsplit(url)
        valid = (parts.scheme in ("redis", "rediss") and bool(parts.hostname)) or (
            parts.scheme == "unix" and bool(parts.path)
        )
        _ = parts.port
    except ValueError:
        valid = False
    if not valid:
        raise SettingsError(f"{REDIS_VARIABLE} is {redact_url(url)!r}; allowed: {allowed}")
    return url


def _check_database(url: str) -> str:
    allowed = (
        "postgresql://user:password@host[:port]/database or sqlite:////absolute/path/history.db"
    )
    scheme, separator, rest = url.partition("://")
    try:
        _ = urlsplit(url).port
    except ValueError:
        separator = ""
    if separator and scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        return f"postgresql+psycopg://{rest}"
    # "sqlite://" alone is a database in memory, which no other process could read
    if (
        separator
        and scheme == "sqlite"
        and rest.startswith("/")
        and len(rest) > 1
        and ":memory:" not in rest
    ):
        return url
    raise SettingsError(f"{DATABASE_VARIABLE} is {redact_url(url)!r}; allowed: {allowed}")


def _sqlite_url(home: Path) -> str:
    return f"sqlite:///{quote(str(home / 'history.db'))}"
