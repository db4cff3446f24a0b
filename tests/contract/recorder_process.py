"""A recorder as a process of its own, for tests that kill it: Redis URL, database URL."""

from __future__ import annotations

import sys
import threading

from storage.history.database import open_history
from storage.history.schema import upgrade
from storage.live.redis_store import RedisStore
from storage.recorder import Recorder


def main(redis_url: str, database_url: str) -> None:
    """Records until it is killed."""
    engine = open_history(database_url)
    upgrade(engine)
    store = RedisStore.for_service(redis_url)
    # Near the times of the tests' records, which would be thinned as old otherwise
    Recorder(store, engine, clock=lambda: 5000.0, stop=threading.Event()).run_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
