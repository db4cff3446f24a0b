"""Settings: what the environment may say, and what a message may show of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from sqlalchemy import make_url

from storage.settings import (
    MAX_SOCKET_PATH_BYTES,
    Settings,
    SettingsError,
    redact_url,
    socket_of,
    socket_path,
    socket_url,
)


def test_without_variables_everything_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_env({})
    home = tmp_path / ".counterpoise"
    assert settings.home == home
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert not settings.external_redis
    assert socket_of(settings.redis_url) == settings.redis_socket == home / "redis.sock"
    assert make_url(settings.database_url).database == str(home / "history.db")


@pytest.mark.parametrize("name", ["with space", "100%", "a?b#c", "ünï", "x:y@z"])
def test_any_folder_can_be_home(tmp_path: Path, name: str) -> None:
    home = tmp_path / name
    settings = Settings.from_env({"COUNTERPOISE_HOME": str(home)})
    assert make_url(settings.database_url).database == str(home / "history.db")
    assert socket_of(settings.redis_url) == socket_path(home)
    assert socket_of(socket_url(home / "s")) == home / "s"


def test_a_long_home_has_a_short_socket_path(tmp_path: Path) -> None:
    home = tmp_path / ("long-" * 30)
    path = socket_path(home)
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
    assert path == socket_path(home)
    assert path != socket_path(home.with_name("other-" * 30))
    assert str(os.getuid()) in path.parent.name


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("postgres://u:p@h/db", "postgresql+psycopg://u:p@h/db"),
        ("postgresql://u:p@h:5433/db", "postgresql+psycopg://u:p@h:5433/db"),
        ("postgresql+psycopg://h/db?sslmode=require", "postgresql+psycopg://h/db?sslmode=require"),
        ("sqlite:////var/lib/h.db", "sqlite:////var/lib/h.db"),
    ],
)
def test_databases(tmp_path: Path, given: str, used: str) -> None:
    env = {"COUNTERPOISE_HOME": str(tmp_path), "COUNTERPOISE_DATABASE_URL": given}
    assert Settings.from_env(env).database_url == used


@pytest.mark.parametrize("url", ["redis://h", "rediss://u:p@h:6380/2", "unix:///run/redis.sock"])
def test_an_external_redis(tmp_path: Path, url: str) -> None:
    env = {"COUNTERPOISE_HOME": str(tmp_path), "COUNTERPOISE_REDIS_URL": url}
    settings = Settings.from_env(env)
    assert settings.external_redis
    assert settings.redis_url == url


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("COUNTERPOISE_REDIS_URL", "localhost:6379"),
        ("COUNTERPOISE_REDIS_URL", "http://u:s3cret@h"),
        ("COUNTERPOISE_REDIS_URL", "redis://:s3cret@h:notaport"),
        ("COUNTERPOISE_REDIS_URL", "redis://"),
        ("COUNTERPOISE_REDIS_URL", "unix://"),
        ("COUNTERPOISE_DATABASE_URL", "mysql://u:s3cret@h/db"),
        ("COUNTERPOISE_DATABASE_URL", "postgresql+psycopg2://u:s3cret@h/db"),
        ("COUNTERPOISE_DATABASE_URL", "postgresql://u:s3cret@h:x/db"),
        ("COUNTERPOISE_DATABASE_URL", "sqlite://"),
        ("COUNTERPOISE_DATABASE_URL", "sqlite:///:memory:"),
        ("COUNTERPOISE_DATABASE_URL", "s3cret"),
        ("COUNTERPOISE_DATABASE_URL", "postgresql://[s3cret"),
        ("COUNTERPOISE_HOME", "/proc/version/home"),
        ("COUNTERPOISE_HOME", "/tmp/a\0b"),
    ],
)
def test_a_bad_value_is_named_without_its_password(
    tmp_path: Path, variable: str, value: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({"COUNTERPOISE_HOME": str(tmp_path), variable: value})
    message = str(caught.value)
    assert variable in message
    assert "allowed" in message or "set " in message
    assert "s3cret" not in message


def test_a_home_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(SettingsError, match="belongs to"):
        Settings.from_env({"COUNTERPOISE_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:pw@h", "redis://:***@h"),
        ("postgresql://u:p%40w@h/db", "postgresql://u:***@h/db"),
        ("postgresql://h/db?user=u&password=pw", "postgresql://h/db?user=u&password=***"),
        ("unix:///run/x.sock?password=pw", "unix:///run/x.sock?password=***"),
        ("unix://u:pw@/run/x.sock", "unix://u:***@/run/x.sock"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("pw", "***"),
        ("", ""),
    ],
)
def test_redaction(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_settings_do_not_print_passwords(tmp_path: Path) -> None:
    env = {
        "COUNTERPOISE_HOME": str(tmp_path),
        "COUNTERPOISE_REDIS_URL": "redis://:s3cret@h",
        "COUNTERPOISE_DATABASE_URL": "postgresql://u:s3cret@h/db",
    }
    settings = Settings.from_env(env)
    assert "s3cret" not in f"{settings!r}{settings.redis_redacted}{settings.database_redacted}"
