"""A real run on a real Redis: outages, a store that forgot, racing deciders."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from storage.commands import CommandResult, Decide, Stop
from storage.live.redis_store import RedisStore
from storage.records import Proposal
from tests.support.control_run import DEADLINE_S, Trial, run_config, trial
from tests.support.services import RedisServer, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    made = RedisStore.for_service(redis_server.url)
    yield made
    made.close()


def journal_arrived(made: Trial, store: RedisStore) -> None:
    """Every entry of the journal file is in the stream, once and in order."""
    journal = made.journal()
    stream = store.read_journal(made.run.run, 0, count=len(journal) + 1)
    assert [entry.seq for entry in stream] == list(range(1, len(journal) + 1))
    assert stream == journal


def standing(store: RedisStore, run: str) -> list[Proposal]:
    return [p for p in store.list_proposals(run) if p.state == "open"]


@pytest.mark.parametrize("forgets", [False, True], ids=["keeps", "forgets"])
def test_training_goes_on_while_redis_is_away_and_nothing_is_lost(
    tmp_path: Path, redis_server: RedisServer, store: RedisStore, forgets: bool
) -> None:
    with trial(run_config(2, 2), tmp_path, store=store) as made:
        wait_until(lambda: store.last_seq("local") > 0, DEADLINE_S, "the first entries")
        redis_server.kill()
        made.more_steps(10)
        # A failure meanwhile is handled as ever.
        made.kill("rack-0/1")
        made.left_out(0)
        made.more_steps(10)
        steps = made.drill.commits[-9:]
        gaps = [after.at - before.at for before, after in pairwise(steps)]
        assert max(gaps) < 10 * min(step.step_s for step in steps), "training never pauses"
        if forgets:
            for left in redis_server.folder.glob("appendonlydir"):
                shutil.rmtree(left)
        redis_server.restart()
        wait_until(lambda: bool(standing(store, "local")), DEADLINE_S, "the proposal in the store")
        assert standing(store, "local") == [made.open_for(0)]
        wait_until(
            lambda: (state := store.get_run("local")) is not None and state.generation == 2,
            DEADLINE_S,
            "the newest state",
        )
        made.stop()
        journal_arrived(made, store)
        state = store.get_run("local")
        assert state is not None
        assert (state.status, state.step) == ("stopped", len(made.drill.commits))
        assert not standing(store, "local")
    made.check()


def test_of_many_who_decide_at_once_one_does(
    tmp_path: Path, redis_server: RedisServer, store: RedisStore
) -> None:
    with trial(run_config(2, 2), tmp_path, store=store) as made:
        made.kill("rack-0/1")
        made.left_out(0)
        wait_until(lambda: bool(standing(store, "local")), DEADLINE_S, "the proposal in the store")
        (proposal,) = standing(store, "local")
        barrier = threading.Barrier(20)
        results: list[tuple[str, CommandResult]] = []

        def click(number: int) -> None:
            ui = RedisStore.for_ui(redis_server.url)
            command = Decide(
                id=f"click-{number // 2}",
                at=time.time(),
                who=f"operator {number // 2}",
                via="browser",
                proposal=proposal.id,
                generation=proposal.generation,
                revision=proposal.revision,
                verdict="approved" if number % 4 < 2 else "rejected",
                reason="asked of ten people at once",
            )
            barrier.wait(timeout=10.0)
            results.append((command.id, ui.submit("local", command, time.time())))
            ui.close()

        # Ten people, each of whose clicks arrives twice.
        threads = [threading.Thread(target=click, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=15.0)
        assert len(results) == 20
        winners = {who for who, result in results if result.ok}
        assert len(winners) == 1
        codes = sorted(result.code for _, result in results)
        assert codes.count("accepted") == 1
        assert codes.count("duplicate") == 10
        assert codes.count("decided") == 9
        (winner,) = winners
        wait_until(lambda: store.get_result("local", winner) is not None, DEADLINE_S, "the answer")
        answer = store.get_result("local", winner)
        assert answer is not None
        assert answer.ok
        final = ("applied", "rejected")
        wait_until(
            lambda: (
                (p := store.get_proposal("local", proposal.id)) is not None and p.state in final
            ),
            DEADLINE_S,
            "the end of the proposal",
        )
        stop = Stop(id="stop-1", at=time.time(), who="ada", via="cli")
        assert store.submit("local", stop, time.time()).code == "accepted"
        assert store.submit("local", stop, time.time()).code == "duplicate"
        assert made.run.join(DEADLINE_S).status == "stopped"
        decided = store.get_proposal("local", proposal.id)
        assert decided is not None
        assert decided.decided_by == f"operator {winner.removeprefix('click-')}"
        journal_arrived(made, store)
    made.check()


def test_an_answer_that_redis_took_too_early_is_taken_back(
    tmp_path: Path, redis_server: RedisServer, store: RedisStore
) -> None:
    """The store had not heard yet that the proposal had lapsed: it took the approval, the
    controller refuses it, and the store learns the truth."""
    with trial(run_config(2, 2, 2), tmp_path, store=store) as made:
        made.kill("rack-0/1")
        made.left_out(0)
        wait_until(lambda: bool(standing(store, "local")), DEADLINE_S, "the proposal in the store")
        (proposal,) = standing(store, "local")
        redis_server.kill()
        made.kill("rack-1/1")
        made.left_out(0, 1)
        redis_server.restart()
        # Before anything else: the old form is what the store kept.
        command = Decide(
            id="early",
            at=time.time(),
            who="ada",
            via="browser",
            proposal=proposal.id,
            generation=proposal.generation,
            revision=proposal.revision,
            verdict="approved",
        )
        first = store.submit("local", command, time.time())
        assert first.code in ("accepted", "stale")
        wait_until(
            lambda: (
                (p := store.get_proposal("local", proposal.id)) is not None and p.state == "stale"
            ),
            DEADLINE_S,
            "the truth in the store",
        )
        if first.code == "accepted":
            wait_until(
                lambda: store.get_result("local", "early") is not None, DEADLINE_S, "the answer"
            )
            answer = store.get_result("local", "early")
            assert answer is not None
            assert (answer.ok, answer.code) == (False, "stale")
        assert made.shape() == [(), (), (0, 1)]
        made.stop()
        journal_arrived(made, store)
    made.check()
