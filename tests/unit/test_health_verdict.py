"""The verdict book and the address map: what condemns a GPU, what clears it, who it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.health.address_map import AddressMap
from runtime.health.catalogue import load_catalogue
from runtime.health.config import VerdictConfig
from runtime.health.kernel_log import KernelLogReader
from runtime.health.observation import Identity, Observation
from runtime.health.verdict import VerdictBook, left_out
from storage.records import GPU_STATES, GpuState

GPU = "rack-0/3"
CONFIG = VerdictConfig()
T0 = 2_000_000_000.0


def xid(code: int, verdict: GpuState, *, cause: int | None = None, count: int = 1) -> Observation:
    return Observation(
        source="kernel_log", gpu=GPU, code=code, cause_of=cause, verdict=verdict, count=count
    )


def reading(code: str | None, verdict: GpuState) -> Observation:
    return Observation(source="nvml", gpu=GPU, code=code, verdict=verdict, snapshot=True)


def log(*lines: str) -> list[Observation]:
    addresses = AddressMap([GPU], {"0000:9b:00.0": GPU})
    seen = KernelLogReader(load_catalogue(), 2031).read(lines)
    return [addresses.placed(each) for each in seen]


def state(book: VerdictBook) -> GpuState:
    return book.verdict(GPU).state


def test_what_was_never_heard_of_is_healthy() -> None:
    assert VerdictBook(CONFIG).verdict(GPU).state == "healthy"


def test_application_faults_never_condemn_hardware() -> None:
    book = VerdictBook(CONFIG)
    for code in (13, 31, 43) * 50:
        assert book.observe(xid(code, load_catalogue().entry(code).verdict), T0) == []
    assert state(book) == "healthy"
    assert book.verdict(GPU).evidence  # It is kept all the same.


def test_job_clean_up_never_condemns() -> None:
    book = VerdictBook(CONFIG)
    lines = [
        "[1.0] NVRM: Xid (PCI:0000:9b:00): 13, pid=1, name=x, Graphics Exception",
        *["[1.1] NVRM: Xid (PCI:0000:9b:00): 45, pid=1, name=x, Ch 01"] * 20,
    ]
    for each in log(*lines):
        book.observe(each, T0)
    assert state(book) == "healthy"


def test_a_fallen_gpu_is_failed_with_evidence_and_age() -> None:
    book = VerdictBook(CONFIG)
    lines = [
        "[1.0] NVRM: Xid (PCI:0000:9b:00): 79, pid=1, GPU has fallen off the bus.",
        "[1.1] NVRM: Xid (PCI:0000:9b:00): 45, pid=1, name=x, Ch 01 caused by previous Xid 79",
    ]
    changed = [verdict for each in log(*lines) for verdict in book.observe(each, T0)]
    assert [each.state for each in changed] == ["failed"]
    verdict = book.verdict(GPU)
    assert verdict.action == "RESTART_BM"
    assert "Xid 79" in verdict.reason
    assert [text for _, text in verdict.evidence] == [
        "kernel log: Xid 79",
        "kernel log: Xid 45 after Xid 79",
    ]
    assert verdict.age_s(T0 + 60.0) == 60.0
    book.tick(T0 + 1e6)
    assert state(book) == "failed"  # Time alone heals nothing that is lost.


def test_a_suspicion_clears_by_itself_and_repeats_add_up() -> None:
    book = VerdictBook(CONFIG)
    book.observe(xid(94, "suspect"), T0)
    assert state(book) == "suspect"
    assert [each.state for each in book.tick(T0 + CONFIG.clear_s)] == ["healthy"]
    for at in (700.0, 800.0):
        book.observe(xid(94, "suspect"), T0 + at)
    assert state(book) == "draining"  # Three within the hour.
    other = VerdictBook(CONFIG)
    other.observe(xid(94, "suspect", count=3), T0)
    assert state(other) == "draining"


def test_a_cleared_fault_clears_after_a_quiet_time() -> None:
    book = VerdictBook(CONFIG)
    book.observe(reading("hw_thermal_slowdown", "degraded"), T0)
    assert state(book) == "degraded"
    book.observe(reading(None, "healthy"), T0 + 5.0)
    assert state(book) == "degraded"  # Not at once: it may come back.
    book.observe(reading("hw_thermal_slowdown", "degraded"), T0 + 6.0)
    book.tick(T0 + 30.0)
    assert state(book) == "degraded"
    book.observe(reading(None, "healthy"), T0 + 31.0)
    assert [each.state for each in book.tick(T0 + 31.0 + CONFIG.settle_s)] == ["healthy"]


def test_one_source_does_not_clear_what_another_holds() -> None:
    book = VerdictBook(CONFIG)
    book.observe(xid(48, "draining"), T0)
    book.observe(reading(None, "healthy"), T0 + 1.0)
    book.tick(T0 + 1000.0)
    assert state(book) == "draining"


def test_recovery_action_none_takes_back_what_the_log_held() -> None:
    book = VerdictBook(CONFIG)
    change = "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from "
    for each in log(f"{change}0x0 (None) to 0x1 (GPU Reset Required)"):
        book.observe(each, T0)
    assert state(book) == "failed"
    for each in log(f"{change}0x1 (GPU Reset Required) to 0x0 (None)"):
        book.observe(each, T0 + 1.0)
    book.tick(T0 + 1.0 + CONFIG.settle_s)
    assert state(book) == "healthy"


def test_repair() -> None:
    book = VerdictBook(CONFIG)
    book.observe(xid(79, "failed"), T0)
    assert [each.state for each in book.repair_began(GPU, T0 + 1)] == ["repairing"]
    assert left_out(book.bad()) == {GPU}
    assert [each.state for each in book.repaired(GPU, T0 + 2)] == ["healthy"]


def test_a_flapping_gpu_is_quarantined_longer_each_time() -> None:
    book, now, lengths = VerdictBook(CONFIG), T0, []
    for _ in range(5):
        book.observe(xid(119, "failed"), now)
        book.repaired(GPU, now + 1.0)
        until = book.verdict(GPU).quarantined_until
        lengths.append(until - now if until is not None else 0.0)
        if until is not None:
            assert state(book) == "draining"
            assert "quarantined" in book.verdict(GPU).reason
            now = until - 60.0
            book.tick(until)
            assert state(book) == "healthy"
            now = until
        now += 10.0
    assert lengths == [0.0, 0.0, 600.0, 1200.0, 2400.0]


def test_a_killed_worker_is_no_flapping_hardware() -> None:
    book = VerdictBook(CONFIG)
    gone = Observation(source="worker", gpu=GPU, code="exited", verdict="failed")
    for turn in range(10):
        book.observe(gone, T0 + turn)
        book.repaired(GPU, T0 + turn + 0.5)
    assert state(book) == "healthy"


def test_an_operator_may_pardon() -> None:
    book = VerdictBook(CONFIG)
    for turn in range(3):
        book.observe(xid(119, "failed"), T0 + turn)
        book.repaired(GPU, T0 + turn + 0.5)
    assert state(book) == "draining"
    book.pardon(GPU, T0 + 9.0)
    assert state(book) == "healthy"


CODES = st.sampled_from([13, 45, 48, 79, 94, "ecc_uncorrected", None])
SEEN = st.builds(
    Observation,
    source=st.sampled_from(["kernel_log", "nvml", "worker", "report"]),
    gpu=st.sampled_from([GPU, "rack-0/4", None]),
    code=CODES,
    verdict=st.sampled_from([each for each in GPU_STATES if each != "repairing"]),
    count=st.integers(1, 9),
    snapshot=st.booleans(),
)


@given(st.lists(st.tuples(st.floats(0, 5000), st.one_of(SEEN, st.just("repair"))), max_size=60))
def test_any_history_ends_healthy_after_repair_and_time(
    history: list[tuple[float, Observation | str]],
) -> None:
    book, now = VerdictBook(CONFIG), T0
    for passed_s, event in history:
        now += passed_s
        before = state(book)
        changed = (
            book.observe(event, now)
            if isinstance(event, Observation)
            else book.repair_began(GPU, now)
        )
        assert all(each.state in GPU_STATES for each in changed)
        if isinstance(event, Observation) and event.gpu == GPU and event.verdict == "failed":
            assert state(book) == ("repairing" if before == "repairing" else "failed")
        assert len(book.verdict(GPU).evidence) <= 20
    book.repaired(GPU, now)
    book.tick(now + CONFIG.quarantine_max_s + 1.0)
    assert state(book) == "healthy"


# who is who ------------------------------------------------------------------------------------

A, B, C = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")


def at(pci: str, uuid: str = "", serial: str = "") -> Identity:
    return Identity(pci=pci, uuid=uuid, serial=serial)


def test_addresses_follow_the_board_over_a_reboot() -> None:
    addresses = AddressMap(["r/0", "r/1"])
    addresses.learn([at("0000:02:00.0", B), at("0000:01:00.0", A)])
    assert addresses.gpu_of(pci="00000000:01:00.0") == "r/0"
    assert addresses.gpu_of(uuid=B.removeprefix("GPU-").upper()) == "r/1"
    again = AddressMap(["r/0", "r/1"], known=addresses.remember())
    again.learn([at("0000:07:00.0", A), at("0000:03:00.0", B)])  # Renumbered, and in other order.
    assert again.gpu_of(pci="0000:07:00.0") == "r/0"
    assert again.gpu_of(pci="0000:03:00.0") == "r/1"
    assert again.gpu_of(pci="0000:01:00.0") is None


def test_a_swapped_board_takes_the_slot_of_its_address() -> None:
    addresses = AddressMap(["r/0", "r/1"])
    addresses.learn([at("0000:01:00.0", A), at("0000:02:00.0", B)])
    addresses.learn([at("0000:01:00.0", C), at("0000:02:00.0", B)])
    assert addresses.gpu_of(uuid=C) == "r/0"


def test_the_config_pins_by_uuid_serial_or_address() -> None:
    pins = {A: "r/1", "1650000000001": "r/0", "0000:05:00.0": "r/2", B: "elsewhere/9"}
    addresses = AddressMap(["r/0", "r/1", "r/2"], pins)
    assert addresses.gpu_of(pci="0000:05:00") == "r/2"
    addresses.learn([at("0000:01:00.0", A), at("0000:02:00.0", C, "1650000000001")])
    assert addresses.gpu_of(pci="0000:01:00.0") == "r/1"
    assert addresses.gpu_of(pci="0000:02:00.0") == "r/0"


def test_part_of_the_host_assigns_nobody() -> None:
    addresses = AddressMap(["r/0", "r/1"])
    addresses.learn([at("0000:01:00.0", A)], complete=False)
    assert addresses.gpu_of(pci="0000:01:00.0") is None


def test_blanked_names_are_no_names() -> None:
    addresses = AddressMap(["r/0", "r/1"])
    blank = "GPU-00000000-0000-0000-0000-000000000000"
    addresses.learn([at("0000:01:00.0", blank), at("0000:02:00.0", blank)])
    assert addresses.gpu_of(pci="0000:02:00.0") == "r/1"
    assert addresses.gpu_of(uuid=blank) is None


def test_placed() -> None:
    addresses = AddressMap(["r/0"], {"0000:05:00.0": "r/0"})
    seen = Observation(source="kernel_log", gpu="0000:05:00.0", pci="0000:05:00.0", code=79)
    assert addresses.placed(seen).gpu == "r/0"
    unknown = Observation(source="kernel_log", gpu="0000:06:00.0", pci="0000:06:00.0", code=79)
    assert addresses.placed(unknown).gpu is None


def test_a_source_that_changes_its_word_takes_no_event_back() -> None:
    """NVML and exporters tell of Xids as they happen, and of the GPU's state beside them."""
    book = VerdictBook(CONFIG)
    xid79 = Observation(source="nvml", gpu=GPU, code=79, verdict="failed")
    book.observe(xid79, T0)
    book.observe(reading("hw_thermal_slowdown", "degraded"), T0 + 1)
    book.observe(reading(None, "healthy"), T0 + 2)
    book.tick(T0 + 100)
    assert state(book) == "failed"
    book.repaired(GPU, T0 + 101)
    assert state(book) == "healthy"
