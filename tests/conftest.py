"""Fixtures all tests share: real servers, a real browser, and an environment without our variables.

A missing service skips the test on a developer's machine and fails it where CI is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import settings

from tests.support import services

UNIT_TIMEOUT_S = 20
MARKER_OF_FIXTURE = {
    "chromium": "browser",
    "postgres_url": "postgres",
    "redis_server": "redis_server",
}

# The machine may be busy: slow is not wrong. In CI every run draws the same examples.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def missing(reason: object) -> None:
    """Skips the test here, fails it in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"missing in CI: {reason}", pytrace=False)
    pytest.skip(str(reason))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by the services they use, so that `-m "not browser"` needs no bookkeeping."""
    unit = Path(__file__).parent / "unit"
    for item in items:
        for fixture, marker in MARKER_OF_FIXTURE.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
        if unit in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT_TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """Takes away the developer's COUNTERPOISE_ variables: no test may touch their stores."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("COUNTERPOISE_") and not name.startswith("COUNTERPOISE_TEST_"):
                patch.delenv(name)
        yield


@pytest.fixture
def redis_server(request: pytest.FixtureRequest) -> Iterator[services.RedisServer]:
    """A server of the test's own, with `kill` and `restart`.

    Parametrised indirectly by kind (`embedded`, `system`), it is a server of that kind.
    """
    with ExitStack() as stack:
        try:
            server = stack.enter_context(services.running_redis(getattr(request, "param", "any")))
        except services.MissingServiceError as e:
            missing(e)
        yield server


@pytest.fixture
def redis_url(redis_server: services.RedisServer) -> str:
    """URL of `redis_server`, empty at the start of the test."""
    return redis_server.url


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[sa.URL]:
    """The server that COUNTERPOISE_TEST_DATABASE_URL names, else one of our own for the session."""
    with ExitStack() as stack:
        if given := os.environ.get("COUNTERPOISE_TEST_DATABASE_URL"):
            url = sa.make_url(given)
        else:
            try:
                url = stack.enter_context(services.running_postgres()).url
            except services.MissingServiceError as e:
                missing(e)
        yield url


@pytest.fixture
def postgres_url(postgres_server: sa.URL) -> Iterator[str]:
    """URL of an empty database that lives as long as the test."""
    with services.fresh_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def chromium() -> Path:
    """Path of the browser."""
    from tests.support.browser import find_chromium

    try:
        return find_chromium()
    except services.MissingServiceError as e:
        missing(e)
        raise
