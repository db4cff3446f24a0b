"""Records: what goes in comes out, and what was not put in is refused."""

from __future__ import annotations

import math
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.commands import Command, CommandResult
from storage.live.proposal_fields import from_fields, to_fields
from storage.records import (
    EventHappened,
    JournalEntry,
    Proposal,
    RackRecord,
    RecordError,
    ReplicaState,
    RunState,
    decode_json,
    decode_packed,
    encode_json,
    encode_packed,
)

KINDS: list[Any] = [RunState, RackRecord, JournalEntry, Command, CommandResult, Proposal]

INTEGERS = st.integers(-(2**63), 2**63 - 1)  # as MessagePack has them
TEXT = st.text(max_size=6)
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    float: st.floats(),
    str: TEXT,
    bool: st.booleans(),
    bytes: st.binary(max_size=6),
    type(None): st.none(),
    Any: ANYTHING,
}


def of(kind: Any) -> st.SearchStrategy[Any]:
    """Records of a kind, and whatever their fields are made of."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{name: of(hint) for name, hint in get_type_hints(kind).items()})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, UnionType):
        return st.one_of([of(one) for one in inner])
    if origin is dict:
        return st.dictionaries(of(inner[0]), of(inner[1]), max_size=2)
    assert origin is tuple, kind
    variadic = inner[-1] is Ellipsis
    items = st.lists(of(inner[0]), max_size=2) if variadic else st.tuples(*map(of, inner))
    return items.map(tuple)


def racks() -> st.SearchStrategy[RackRecord]:
    def build(num_gpus: int, fill: float) -> RackRecord:
        column = np.full(num_gpus, fill, dtype="<f4").tobytes()
        return RackRecord(
            run="r", rack="rack-0", at=1.0, emulated=True, budget_w=1.0, normal_cap_w=1.0,
            max_cap_w=1.0, states=bytes(num_gpus), power_w=column, cap_w=column, temp_c=column,
            util=column, clock_mhz=column, step_s=column,
        )  # fmt: skip

    return st.builds(build, st.integers(0, 72), st.floats(width=32))


RECORDS = st.one_of(
    st.tuples(racks(), st.just(RackRecord)),
    *(st.tuples(of(kind), st.just(kind)) for kind in KINDS if kind is not RackRecord),
)


def same(left: Any, right: Any) -> bool:
    """Equal, NaN included."""
    return repr(left) == repr(right)


@given(made=RECORDS)
def test_packed_records_come_back_as_they_were(made: tuple[Any, Any]) -> None:
    record, kind = made
    assert same(decode_packed(encode_packed(record), kind), record)


@given(made=RECORDS)
def test_json_is_valid_or_refused(made: tuple[Any, Any]) -> None:
    record, kind = made
    try:
        again = decode_json(encode_json(record), kind)
    except RecordError:
        # JSON has no NaN: it is null there, which a plain number may not be
        assert b"null" in encode_json(record)
    else:
        assert encode_json(again) == encode_json(record)


@given(data=st.binary(max_size=200), kind=st.sampled_from(KINDS))
def test_random_bytes_are_refused(data: bytes, kind: Any) -> None:
    for decode in (decode_packed, decode_json):
        try:
            decode(data, kind)
        except RecordError:
            continue


@given(made=RECORDS, data=st.data())
def test_damaged_records_are_refused_or_valid(made: tuple[Any, Any], data: st.DataObject) -> None:
    record, kind = made
    body = bytearray(encode_packed(record))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    try:
        decode_packed(bytes(body), kind)
    except RecordError:
        return


@pytest.mark.parametrize("nested", [b"\x91" * 100_000, b"\x81\xa1a" * 100_000])
def test_deep_nesting_is_refused(nested: bytes) -> None:
    event = msgspec.msgpack.encode(
        {"type": "event", "seq": 1, "at": 1.0, "run": "r", "kind": "k", "severity": "info"}
        | {"message": "m", "details": msgspec.Raw(nested + b"\xc0")}
    )
    with pytest.raises(RecordError):
        decode_packed(event, JournalEntry)
    with pytest.raises(RecordError):
        decode_json(b'{"type":"event","details":' + b"[" * 100_000, JournalEntry)


def test_a_record_of_another_schema_with_new_fields_still_decodes() -> None:
    body = msgspec.msgpack.encode(
        {"id": "c", "at": 1.0, "ok": True, "code": "done", "message": "", "added_later": 5}
    )
    assert decode_packed(body, CommandResult).code == "done"


def test_numbers_of_numpy_are_numbers() -> None:
    details = {"step_s": np.float64(1.5), "num": np.int64(3), "ok": np.bool_(True)}
    event = EventHappened(
        seq=1, at=np.float64(2.0), run="r", kind="k", severity="info", message="", details=details
    )
    again = decode_packed(encode_packed(event), JournalEntry)
    assert again.details == {"step_s": 1.5, "num": 3, "ok": True}
    assert decode_json(encode_json(event), JournalEntry) == again


@pytest.mark.parametrize("changes", [{"states": b"\0\0"}, {"states": b"\x09"}, {"util": b"abc"}])
def test_a_rack_with_columns_of_unequal_length_is_refused(changes: dict[str, bytes]) -> None:
    column = bytes(4)
    rack = {
        "run": "r", "rack": "k", "at": 1.0, "emulated": True, "budget_w": 1.0, "max_cap_w": 1.0,
        "normal_cap_w": 1.0, "states": b"\0", "power_w": column, "cap_w": column,
        "temp_c": column, "util": column, "clock_mhz": column, "step_s": column,
    }  # fmt: skip
    assert decode_packed(msgspec.msgpack.encode(rack), RackRecord).num_gpus == 1
    with pytest.raises(RecordError, match=r"GPUs|allowed"):
        decode_packed(msgspec.msgpack.encode(rack | changes), RackRecord)


@given(proposal=of(Proposal))
def test_proposals_come_back_from_their_hash(proposal: Proposal) -> None:
    fields = {
        name.encode(): value if isinstance(value, bytes) else value.encode()
        for name, value in to_fields(proposal).items()
    }
    assert same(from_fields(fields), proposal)
    changed = {b"state": b"approved", b"revision": str(proposal.revision + 1).encode()}
    changed |= {b"decided_by": "bo ünï".encode(), b"decided_at": b"1.5", b"chosen": b"2"}
    merged = from_fields(fields | changed)
    assert (merged.state, merged.revision) == ("approved", proposal.revision + 1)
    assert (merged.decided_by, merged.decided_at, merged.chosen) == ("bo ünï", 1.5, 2)
    assert same(merged.options, proposal.options)
    for name, value in [(b"state", b"odd"), (b"chosen", b"x"), (b"decided_at", b"x")]:
        with pytest.raises(RecordError):
            from_fields(fields | changed | {name: value})
    # What scripts alone look at may be missing.
    for name in (b"body", b"state", b"state_reason", b"revision", b"decided_by", b"decided_at"):
        with pytest.raises(RecordError):
            from_fields({key: value for key, value in fields.items() if key != name})


def test_infinity_survives_in_a_replica() -> None:
    state = ReplicaState(
        replica=0, rack="k", mode="out", gpus=(), live=(), num_samples=0, units={}, step_s=math.inf
    )
    assert decode_packed(encode_packed(state), ReplicaState).step_s == math.inf
