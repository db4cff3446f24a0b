"""Journal and live link against a store that goes away, forgets, and comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.control import outbox as outbox_module
from runtime.control.live_link import LiveLink
from runtime.control.outbox import Outbox
from runtime.errors import UserError
from storage.commands import Command, CommandResult, Stop
from storage.live.memory import MemoryStore
from storage.live.port import LiveStoreDown
from storage.records import EventHappened
from tests.contract import records
from tests.contract.records import RUN
from tests.support.services import wait_until


class Flaky:
    """A memory store that can be down, or forget everything."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.down = False
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self.down:
                raise LiveStoreDown("away")
            self.calls.append(name)
            return getattr(self.inner, name)(*arguments, **keywords)

        return call


def event(number: int) -> EventHappened:
    return EventHappened(
        seq=0, at=float(number), run=RUN, kind="test", severity="info", message=f"event {number}"
    )


def seqs(store: Flaky) -> list[int]:
    return [entry.seq for entry in store.inner.read_journal(RUN, 0, count=10_000)]


@contextmanager
def publishing(outbox: Outbox, on_return: Callable[[], None] = lambda: None) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=outbox.publish_forever, args=(stop, on_return), daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(timeout=5.0)
    assert not thread.is_alive()


# journal -----------------------------------------------------------------------------------------


def test_numbers_entries_and_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    outbox = Outbox(path, run=RUN, store=None)
    assert [outbox.write(event(n)).seq for n in range(3)] == [1, 2, 3]
    outbox.close()
    again = Outbox(path, run=RUN, store=None)
    assert again.write(event(3)).seq == 4
    assert [entry.message for entry in again.read_all()] == [f"event {n}" for n in range(4)]  # type: ignore[union-attr]
    again.close()


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_crash_in_the_middle_of_a_line_costs_that_line_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    outbox = Outbox(path, run=RUN, store=None)
    for n in range(3):
        outbox.write(event(n))
    outbox.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    again = Outbox(path, run=RUN, store=None)
    assert again.last_seq == 2
    assert again.write(event(9)).seq == 3
    assert [entry.seq for entry in again.read_all()] == [1, 2, 3]
    again.close()


def test_a_damaged_entry_in_the_middle_is_refused_and_nothing_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    outbox = Outbox(path, run=RUN, store=None)
    for n in range(3):
        outbox.write(event(n))
    outbox.close()
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + b"###\n" + lines[2]
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="damaged at entry 2"):
        Outbox(path, run=RUN, store=None)
    assert path.read_bytes() == damaged


def test_every_entry_reaches_a_store_that_was_away(tmp_path: Path) -> None:
    store = Flaky()
    store.down = True
    outbox = Outbox(tmp_path / "journal", run=RUN, store=store)  # type: ignore[arg-type]
    returned = threading.Event()
    with publishing(outbox, returned.set):
        for n in range(1200):
            outbox.write(event(n))
        assert not returned.is_set()
        store.down = False
        assert returned.wait(5.0)
        assert outbox.flush(5.0, threading.Event())
    assert seqs(store) == list(range(1, 1201))
    outbox.close()


def test_a_store_that_forgot_unnoticed_is_filled_again(tmp_path: Path) -> None:
    store = Flaky()
    outbox = Outbox(tmp_path / "journal", run=RUN, store=store)  # type: ignore[arg-type]
    returns: list[int] = []
    with publishing(outbox, lambda: returns.append(1)):
        for n in range(5):
            outbox.write(event(n))
        wait_until(lambda: len(seqs(store)) == 5, 5.0, "five entries")
        store.inner = MemoryStore()
        outbox.write(event(5))
        wait_until(lambda: len(seqs(store)) == 6, 5.0, "six entries")
        # What is not in the journal (standing proposals) was asked for as well.
        assert returns == [1, 1]
    assert seqs(store) == list(range(1, 7))
    outbox.close()


def test_holds_back_while_the_recorder_is_far_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "HELD_BACK", 10)
    monkeypatch.setattr(outbox_module, "BATCH", 8)
    store = Flaky()
    outbox = Outbox(tmp_path / "journal", run=RUN, store=store)  # type: ignore[arg-type]
    for n in range(40):
        outbox.write(event(n))
    with publishing(outbox):
        wait_until(lambda: len(seqs(store)) == 16, 5.0, "two batches")
        assert not outbox.flush(0.2, threading.Event())
        assert len(seqs(store)) == 16
        store.inner.acknowledge(RUN, 16)
        wait_until(lambda: len(seqs(store)) == 32, 5.0, "two more")
        store.inner.acknowledge(RUN, 32)
        assert outbox.flush(5.0, threading.Event())
    outbox.close()


# live link ---------------------------------------------------------------------------------------


def link(store: Flaky) -> tuple[LiveLink, list[Command | None]]:
    taken: list[Command | None] = []
    made = LiveLink(store, run=RUN, on_command=lambda _, command: taken.append(command))  # type: ignore[arg-type]
    return made, taken


def test_what_could_not_be_written_is_written_later_newest_form_only() -> None:
    store = Flaky()
    made, _ = link(store)
    store.down = True
    first = records.proposal(revision=1)
    made.put_proposal(first)
    made.put_state(records.run_state(updated_at=1.0))
    with pytest.raises(LiveStoreDown):
        made.write_once()
    made.put_proposal(records.proposal(revision=2, state="stale"))
    made.put_state(records.run_state(updated_at=2.0))
    made.put_result(CommandResult(id="c1", at=1.0, ok=True, code="done", message="done"))
    store.down = False
    made.write_once()
    stored = store.inner.get_proposal(RUN, first.id)
    assert stored is not None
    assert (stored.revision, stored.state) == (2, "stale")
    state = store.inner.get_run(RUN)
    assert state is not None
    assert state.updated_at == 2.0
    assert store.inner.get_result(RUN, "c1") is not None
    store.calls.clear()
    made.write_once()
    assert store.calls == []


def test_a_proposal_is_there_before_the_state_that_shows_its_generation() -> None:
    store = Flaky()
    made, _ = link(store)
    made.put_state(records.run_state())
    made.put_proposal(records.proposal())
    made.write_once()
    assert store.calls == ["put_proposal", "put_run"]


def test_a_store_that_forgot_gets_what_stands_again() -> None:
    store = Flaky()
    made, _ = link(store)
    standing, final = records.proposal(), records.proposal(id="p-2", state="rejected")
    made.put_proposal(standing)
    made.put_proposal(final)
    made.write_once()
    store.inner = MemoryStore()
    made.write_again()
    made.write_once()
    assert store.inner.get_proposal(RUN, standing.id) == standing
    assert store.inner.get_proposal(RUN, final.id) is None


def test_commands_submitted_around_an_outage_are_read_once_each() -> None:
    store = Flaky()
    made, taken = link(store)
    stop = threading.Event()
    threads = made.start(stop)
    for n in range(3):
        store.inner.submit(RUN, Stop(id=f"a{n}", at=1.0, who="ada", via="cli"), 1.0)
    wait_until(lambda: len(taken) == 3, 5.0, "three commands")
    store.down = True
    for n in range(3):
        store.inner.submit(RUN, Stop(id=f"b{n}", at=1.0, who="ada", via="cli"), 1.0)
    store.down = False
    wait_until(lambda: len(taken) == 6, 5.0, "six commands")
    stop.set()
    made.put_state(records.run_state())
    for thread in threads:
        thread.join(timeout=5.0)
        assert not thread.is_alive()
    assert [command.id for command in taken if command] == ["a0", "a1", "a2", "b0", "b1", "b2"]
