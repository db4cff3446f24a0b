"""Kernel logs in the forms of the field, joined, told apart, counted, fuzzed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.health.catalogue import Catalogue, load_catalogue
from runtime.health.kernel_log import KernelLogReader
from runtime.health.observation import Observation, normal_pci
from tests.support.health_lines import IRRELEVANT, NOT_UNDERSTOOD, NVLINK, ONE_LINE, Expected

CATALOGUE = load_catalogue()


def read(*lines: str, catalogue: Catalogue = CATALOGUE) -> list[Observation]:
    return list(KernelLogReader(catalogue, 2031).read(lines))


def codes(*lines: str) -> list[tuple[int | str | None, int | None]]:
    return [(each.code, each.cause_of) for each in read(*lines)]


@pytest.mark.parametrize(("line", "expected"), ONE_LINE.items())
def test_forms_of_one_line(line: str, expected: Expected) -> None:
    (seen,) = read(line)
    assert (seen.gpu, seen.code, seen.subcode, seen.cause_of, seen.verdict) == expected
    assert (seen.line, seen.count, seen.source) == (1, 1, "kernel_log")


@pytest.mark.parametrize(("message", "expected"), NVLINK.items())
def test_nvlink_errors_are_decoded_as_far_as_they_are_documented(
    message: str, expected: tuple[str, str, str]
) -> None:
    (seen,) = read(f"[9.1] NVRM: Xid (PCI:0018:01:00): {message}")
    assert (seen.subcode, seen.verdict, seen.action) == expected
    assert seen.code == int(message[:3].rstrip(","))


@pytest.mark.parametrize("line", NOT_UNDERSTOOD)
def test_a_bad_line_is_counted_and_never_guessed(line: str) -> None:
    reader = KernelLogReader(CATALOGUE, 2031)
    assert list(reader.read(["[1.0] something else", line])) == []
    assert reader.num_not_understood == 1
    assert reader.not_understood[0].line == 2


def test_other_lines_are_neither_events_nor_bad() -> None:
    reader = KernelLogReader(CATALOGUE, 2031)
    assert list(reader.read(IRRELEVANT)) == []
    assert reader.num_not_understood == 0


def test_equal_xids_each_count() -> None:
    line = "[1.0] NVRM: Xid (PCI:0000:9b:00): 119, pid=1, name=a, Expected function 10 (FREE)"
    assert len(read(line, line, line)) == 3
    repeated = "Mar  4 08:00:02 node kernel: message repeated 4 times: [ ]"
    assert [each.count for each in read(line, "[1.0] other\n", line)] == [1, 1]
    assert [each.count for each in read(line, repeated)] in ([1, 4], [1])


@pytest.mark.parametrize(
    "lines",
    [
        ("[9.1] NVRM: Xid (PCI:0000:9b:00): 119, pid=1, name=x, Timeout after 6s of waiting",
         "for RPC response from GPU4 GSP! Expected function 103 (GSP_RM_ALLOC) (0x2081 0x4)."),
        ("[9.1] NVRM: Xid (PCI:0000:9b:00):",
         "[9.1] 119, pid=1, name=x, Expected function 103 (GSP_RM_ALLOC)"),
        ("4,7,9100000,-;NVRM: Xid (PCI:0000:9b:00): 119, pid=1, name=x, Expected func",
         "4,8,9100001,c;tion 103 (GSP_RM_ALLOC)"),
        ("4,7,9100000,-;NVRM: Xid (PCI:0000:9b:00): 119, Expected function 103 (GSP_RM_ALLOC)",
         " SUBSYSTEM=pci", " DEVICE=+pci:0000:9b:00.0"),
    ],
)  # fmt: skip
def test_wrapped_lines_are_joined(lines: tuple[str, ...]) -> None:
    (seen,) = read(*lines)
    assert (seen.code, seen.subcode, seen.line) == (119, "103 GSP_RM_ALLOC", 1)


def test_a_cause_that_was_wrapped_is_no_event_of_its_own() -> None:
    first = "[9.1] NVRM: Xid (PCI:0000:9b:00): 45, pid=1, name=x, Ch 01 caused by previous"
    assert codes(first, "Xid 149") == [(45, 149)]


def test_a_line_with_a_prefix_begins_anew() -> None:
    first = "kern  :err   : [Tue Mar  4 08:00:01 2031] NVRM: Xid (PCI:0000:3b:00): 46, pid=1"
    other = "kern  :info  : [Tue Mar  4 08:00:01 2031] usb 1-1: new device"
    (seen,) = read(first, other)
    assert "usb" not in seen.text


def test_fallen_off_the_bus_over_several_lines() -> None:
    lines = (
        "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",
        "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "               NVRM: fallen off the bus and is not responding to commands.",
        "[ 1843.439662] NVRM: The NVIDIA probe routine failed for 1 device(s).",
    )
    (seen,) = read(*lines)
    assert (seen.gpu, seen.code, seen.line) == ("0000:b3:00.0", 79, 1)
    assert seen.action == "RESTART_BM"


def test_one_fall_told_twice_is_one() -> None:
    number = "[5.1] NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', GPU has fallen off the bus."
    words = "[5.2] NVRM: GPU 0000:91:00.0: GPU has fallen off the bus."
    assert codes(number, words) == [(79, None)]
    assert codes(words, number) == [(79, None)]
    assert codes(number, words.replace("91", "92")) == [(79, None), (79, None)]
    assert codes(number, words.replace("5.2", "9995.2")) == [(79, None), (79, None)]


@pytest.mark.parametrize("cause", [48, 74, 79, 94, 95, 119, 145])
def test_cleaning_up_after_another_xid_condemns_nothing(cause: int) -> None:
    first = f"[5.1] NVRM: Xid (PCI:0000:91:00): {cause}, pid=1, name=x, something"
    after = "[6.0] NVRM: Xid (PCI:0000:91:00): 45, pid=1, name=x, Ch 00000001"
    _, follower = read(first, after)
    assert (follower.cause_of, follower.verdict, follower.action) == (cause, "healthy", "IGNORE")
    elsewhere = after.replace("91", "92")
    assert codes(first, elsewhere)[1] == (45, None)
    late = after.replace("6.0", "600.0")
    assert codes(first, late)[1] == (45, None)


def test_details_of_an_sxid_are_no_further_events() -> None:
    first = "[1.1] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    detail = "[1.1] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Severity 1 Engine instance 30"
    data = "[1.1] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Data {0x50610002, 0x1}"
    assert codes(first, detail, data) == [(20034, None)]
    assert codes(first, detail, data, first, detail) == [(20034, None)] * 2


def test_details_of_an_sxid_stand_for_it_where_it_was_lost() -> None:
    detail = "[1.1] nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 10002, Severity 5 Engine instance 00"
    data = "[1.1] nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 10002, Data {0x1c0, 0x1}"
    (seen,) = read(detail, data)
    assert (seen.code, seen.verdict) == (10002, "suspect")  # How bad, the lost line said.
    other = "[1.1] nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 23001, Data {0x1c0, 0x1}"
    assert [each.verdict for each in read(detail, other)] == ["suspect", "failed"]


def test_identities_are_learnt_from_the_log() -> None:
    reader = KernelLogReader(CATALOGUE, 2031)
    uuid = "GPU-12345678-1234-1234-1234-123456789abc"
    lines = [
        f"[1.0] NVRM: GPU at PCI:0000:9b:00: {uuid}",
        "[1.0] NVRM: GPU Board Serial Number: 1650000000042",
    ]
    assert list(reader.read(lines)) == []
    (identity,) = reader.identities.values()
    assert (identity.pci, identity.uuid, identity.serial) == ("0000:9b:00.0", uuid, "1650000000042")


def test_the_config_rules_over_the_catalogue() -> None:
    line = "[1.0] NVRM: Xid (PCI:0000:9b:00): 63, pid=1, Row Remapper: marked"
    assert read(line)[0].verdict == "healthy"
    assert read(line, catalogue=load_catalogue({"63": "drain"}))[0].verdict == "draining"
    nvlink = "[1.0] NVRM: Xid (PCI:0000:9b:00): 149, NETIR Fatal XC0 i0 Link 09 (0x1)"
    assert read(nvlink, catalogue=load_catalogue({"149": "ignore"}))[0].verdict == "healthy"


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("0000:9b:00", "0000:9b:00.0"),
        ("00000000:9B:00.0", "0000:9b:00.0"),
        ("9b:00.0", "0000:9b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("1:2:3:4:5", ""),
        ("zz:00", ""),
    ],
)
def test_addresses_have_one_spelling(text: str, normal: str) -> None:
    assert normal_pci(text) == normal


PIECES = st.sampled_from(
    ["NVRM: ", "Xid ", "(PCI:0000:9b:00)", ": ", "79", ", ", "pid=1, ", "name=x, ", "[1.0] ",
     "fallen off the bus", "The NVIDIA GPU 0000:b3:00.0", "SXid ", "nvidia-nvswitch0: ", "\n",
     "caused by previous Xid ", "6,1,2,-;", "6,1,2,c;", "{", '"MESSAGE":', "\\x0a", "\0", "154",
     "recovery action changed from 0x0 (None) to ", "145, RLW Fatal XC0 i0 Link 1 (0x1",
     "74, NVLink: fatal error detected on link 3(", "0xffffffff, ", "0x1c6 ",
     "149, NETIR_LINK_EVT Fatal XC0 i0 Link 1 ("]
)  # fmt: skip


@given(st.lists(st.one_of(st.lists(PIECES, max_size=12).map("".join), st.text(max_size=80))))
def test_fuzz_never_raises_and_stays_bounded(lines: list[str]) -> None:
    reader = KernelLogReader(CATALOGUE, 2031)
    seen = list(reader.read(lines))
    assert reader.num_lines == len(lines)
    assert len(reader.not_understood) <= 100
    for each in seen:
        assert each.line is None or 1 <= each.line <= len(lines)


def test_a_line_without_end_costs_no_time() -> None:
    began = time.perf_counter()
    read("NVRM: Xid (PCI:0000:9b:00): 119, name=" + "x, (" * 500_000)
    read("[" * 100_000 + "NVRM: Xid")
    assert time.perf_counter() - began < 2.0
