"""Every source against a fake outside: what it sees, and the clear word when it is missing."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from runtime.health.address_map import AddressMap
from runtime.health.config import HealthConfig
from runtime.health.observation import Observation
from runtime.health.sources.feeds import FileFeed, JournaldFeed, KmsgFeed
from runtime.health.sources.kernel import KernelLogSource
from runtime.health.sources.nvml import NvmlSource
from runtime.health.sources.watch import Watch, open_watch, proc_identities, sources_of
from tests.support.fake_nvml import FakeGpu, FakeNvml
from tests.support.health_sources import CATALOGUE, XID, soon

# NVML ------------------------------------------------------------------------------------------


@pytest.fixture
def gpus() -> list[FakeGpu]:
    return [FakeGpu(f"00000000:0{i}:00.0", f"GPU-{i}{i}{i}{i}{i}{i}{i}{i}") for i in (1, 2)]


@pytest.fixture
def nvml(gpus: list[FakeGpu]) -> FakeNvml:
    return FakeNvml(gpus)


def found(source: NvmlSource) -> dict[str | None, tuple[object, str]]:
    return {each.gpu: (each.code, each.verdict) for each in source.poll(0.0)}


@pytest.mark.parametrize(
    ("change", "code", "verdict"),
    [
        ({}, None, "healthy"),
        ({"ecc_uncorrected": 2}, "ecc_uncorrected", "suspect"),
        ({"rows": (0, 1, 1, 0)}, "row_remap_pending", "suspect"),
        ({"rows": (0, 1, 0, 1)}, "row_remap_failure", "draining"),
        ({"reasons": 0x40}, "hw_thermal_slowdown", "degraded"),
        ({"reasons": 0x40, "unsupported": {"reasons"}}, "hw_thermal_slowdown", "degraded"),
        ({"reasons": 0x4}, None, "healthy"),
        ({"recovery": 1}, "recovery_action", "failed"),
        ({"recovery": 3}, "recovery_action", "draining"),
        ({"fabric": 0x2 | 0x2 << 4}, None, "healthy"),
        ({"fabric": 0x1}, "fabric_degraded", "suspect"),
        ({"fabric": 0x1 << 4}, "fabric_unhealthy", "suspect"),
        ({"fabric": 0x1, "unsupported": {"fabric"}}, None, "healthy"),
        ({"error": pynvml.NVML_ERROR_GPU_IS_LOST}, "gpu_lost", "failed"),
        ({"error": pynvml.NVML_ERROR_RESET_REQUIRED}, "reset_required", "failed"),
        ({"error": pynvml.NVML_ERROR_NO_PERMISSION}, None, "healthy"),
        (
            {"unsupported": {"ecc", "rows", "reasons", "old_reasons", "fields", "nvlink", "power"}},
            None,
            "healthy",
        ),
    ],
)
def test_nvml_readings(
    nvml: FakeNvml, gpus: list[FakeGpu], change: dict[str, object], code: str, verdict: str
) -> None:
    source = NvmlSource(CATALOGUE, nvml=nvml)
    assert source.open().status == "watching"
    for name, value in change.items():
        setattr(gpus[0], name, value)
    assert found(source) == {
        "0000:01:00.0": (code, verdict),
        "0000:02:00.0": (None, "healthy"),
    }
    source.close()


@pytest.mark.parametrize("unsupported", [set(), {"nvlink"}], ids=["NVLink 4", "NVLink 5"])
def test_nvml_link_errors_count_from_when_we_came(
    nvml: FakeNvml, gpus: list[FakeGpu], unsupported: set[str]
) -> None:
    now = [1000.0]
    gpus[0].unsupported = unsupported
    gpus[0].link_errors = 50
    source = NvmlSource(CATALOGUE, nvml=nvml, clock=lambda: now[0])
    source.open()
    assert found(source)["0000:01:00.0"] == (None, "healthy")
    gpus[0].link_errors, now[0] = 52, 1020.0
    assert found(source)["0000:01:00.0"] == ("nvlink_errors", "suspect")


def test_nvml_events(nvml: FakeNvml, gpus: list[FakeGpu]) -> None:
    source = NvmlSource(CATALOGUE, nvml=nvml)
    source.open()
    for code in (79, 79, 31):
        nvml.xid(gpus[1], code)
    events = [each for each in source.poll(0.01) if not each.snapshot]
    assert [(each.gpu, each.code, each.verdict) for each in events] == [
        ("0000:02:00.0", 79, "failed"),
        ("0000:02:00.0", 79, "failed"),
        ("0000:02:00.0", 31, "healthy"),
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "missing"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "missing"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "denied"),
        (pynvml.NVML_ERROR_UNKNOWN, "failing"),
    ],
)
def test_nvml_that_cannot_be_opened(nvml: FakeNvml, error: int, status: str) -> None:
    nvml.init_error = error
    source = NvmlSource(CATALOGUE, nvml=nvml)
    state = source.open()
    assert state.status == status
    assert state.reason
    assert source.poll(0.0) == []
    source.close()


def test_nvml_after_a_driver_reload(nvml: FakeNvml, gpus: list[FakeGpu]) -> None:
    source = NvmlSource(CATALOGUE, nvml=nvml)
    source.open()
    nvml.reload_driver()
    assert source.poll(0.0) == []
    assert source.state.status == "failing"
    gpus[0].pci = "00000000:07:00.0"  # Renumbered meanwhile.
    assert source.open().status == "watching"
    assert nvml.num_inits == 2
    assert {each.pci for each in source.identities()[0]} == {"0000:07:00.0", "0000:02:00.0"}


def test_a_removed_gpu_does_not_vanish(nvml: FakeNvml, gpus: list[FakeGpu]) -> None:
    source = NvmlSource(CATALOGUE, nvml=nvml)
    source.open()
    gone = gpus.pop(0)
    source.open()
    assert found(source)["0000:01:00.0"] == ("gpu_lost", "failed")
    gpus.insert(0, gone)
    gone.error = pynvml.NVML_ERROR_GPU_IS_LOST
    source.open()
    assert found(source)["0000:01:00.0"] == ("gpu_lost", "failed")


# kernel log ------------------------------------------------------------------------------------


def test_a_file_is_followed_from_its_end_through_rotation(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text(XID * 3)
    source = KernelLogSource(FileFeed(path), CATALOGUE)
    assert source.open().status == "watching"
    with path.open("a") as file:
        file.write(XID)
    assert len(soon(source, lambda seen: len(seen) == 1)) == 1
    path.rename(tmp_path / "kern.log.1")
    assert source.poll(0.0) == []
    path.write_text(XID.replace("79", "95"))
    assert [each.code for each in soon(source, lambda seen: len(seen) == 1)] == [95]
    path.write_text("")
    source.poll(0.0)
    path.write_text(XID)
    soon(source, lambda seen: len(seen) == 1)
    source.close()
    source.close()


def test_a_file_that_is_missing_or_forbidden(tmp_path: Path) -> None:
    source = KernelLogSource(FileFeed(tmp_path / "none"), CATALOGUE)
    assert source.open().status == "missing"
    forbidden = tmp_path / "kern.log"
    forbidden.write_text("")
    forbidden.chmod(0)
    if os.geteuid() != 0:
        state = KernelLogSource(FileFeed(forbidden), CATALOGUE).open()
        assert state.status == "denied"
        assert "dmesg_restrict" in state.reason


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """The next file opened has a number beyond what select() takes (1023)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < 1100:
        opened.append(os.dup(opened[0]))
    yield
    for fd in opened:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_kmsg_records(tmp_path: Path) -> None:
    fifo = tmp_path / "kmsg"
    fifo.write_text("")
    feed = KmsgFeed(fifo)
    feed.open()
    fifo.write_text("3,1,5000000,-;NVRM: Xid (PCI:0000:9b:00): 79, pid=1, gone\n SUBSYSTEM=pci\n")
    try:
        assert feed.lines(1.0) == [
            "3,1,5000000,-;NVRM: Xid (PCI:0000:9b:00): 79, pid=1, gone",
            " SUBSYSTEM=pci",
        ]
    finally:
        feed.close()
    assert KernelLogSource(KmsgFeed(tmp_path / "none"), CATALOGUE).open().status == "missing"


def test_journald_by_its_command() -> None:
    script = f"import time; print({XID!r}, flush=True); time.sleep(0.3)"
    source = KernelLogSource(JournaldFeed((sys.executable, "-c", script)), CATALOGUE)
    assert source.open().status == "watching"
    try:
        soon(source, lambda seen: len(seen) == 1)
        soon(source, lambda _seen: source.state.status == "failing")
        assert "ended" in source.state.reason
    finally:
        source.close()
    missing = KernelLogSource(JournaldFeed(("there-is-no-journalctl",)), CATALOGUE)
    assert missing.open().status == "missing"


# together --------------------------------------------------------------------------------------


def test_watch_places_hands_on_and_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text("")
    config = HealthConfig(
        sources=("kernel_log", "nvidia_smi"),
        kernel_log=str(path),
        nvidia_smi=str(tmp_path / "none"),
        poll_s=0.1,
    )
    came, seen, stop = threading.Event(), list[Observation](), threading.Event()

    def sink(observation: Observation) -> None:
        seen.append(observation)
        came.set()

    addresses = AddressMap(["rack-0/0"], {"0000:9b:00.0": "rack-0/0"})
    watch = Watch(sources_of(config), addresses=addresses, sink=sink, poll_s=config.poll_s)
    threads = watch.start(stop)
    deadline = time.monotonic() + 5
    while watch.states()[0].status != "watching" and time.monotonic() < deadline:
        stop.wait(0.01)
    with path.open("a") as file:
        file.write(XID)
    assert came.wait(2.0)
    assert [(each.gpu, each.code) for each in seen] == [("rack-0/0", 79)]
    while watch.states()[1].status != "missing" and time.monotonic() < deadline:
        stop.wait(0.01)
    assert [each.status for each in watch.states()] == ["watching", "missing"]
    stop.set()
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_watch_hands_on_only_news(nvml: FakeNvml, gpus: list[FakeGpu]) -> None:
    source = NvmlSource(CATALOGUE, nvml=nvml)
    source.open()
    seen: list[Observation] = []
    addresses = AddressMap(["r/0", "r/1"])
    watch = Watch([source], addresses=addresses, sink=seen.append, poll_s=1.0)
    for recovery in (0, 0, 1, 1, 0, 0):
        gpus[1].recovery = recovery
        watch.take(source, source.poll(0.0))
    assert [(each.gpu, each.verdict) for each in seen] == [("r/1", "failed"), ("r/1", "healthy")]


def test_what_was_forgotten_is_news_again(nvml: FakeNvml, gpus: list[FakeGpu]) -> None:
    source = NvmlSource(CATALOGUE, nvml=nvml)
    source.open()
    seen: list[Observation] = []
    watch = Watch([source], addresses=AddressMap(["r/0", "r/1"]), sink=seen.append, poll_s=1.0)
    gpus[1].recovery = 1
    watch.take(source, source.poll(0.0))
    watch.forget({"r/1"})  # Somebody says that it was repaired; NVML says it still wants a reset.
    watch.take(source, source.poll(0.0))
    assert [(each.gpu, each.verdict) for each in seen] == [("r/1", "failed")] * 2


def test_boards_are_remembered_over_a_restart(tmp_path: Path) -> None:
    config = HealthConfig(sources=("nvml",))
    uuid = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
    for pci in ("00000000:01:00.0", "00000000:07:00.0"):
        watch = open_watch(config, ["r/0", "r/1"], lambda _seen: None, tmp_path, real=True)
        gpus = [FakeGpu("00000000:03:00.0", "GPU-bbbbbbbb", "2"), FakeGpu(pci, uuid, "1")]
        source = NvmlSource(CATALOGUE, nvml=FakeNvml(gpus))
        source.open()
        watch.take(source, source.poll(0.0))
    seen = Observation(source="kernel_log", gpu="0000:07:00.0", pci="0000:07:00.0", code=79)
    assert watch._addresses.placed(seen).gpu == "r/0"  # Where it sat first, though renumbered.


def test_without_a_word_real_devices_are_watched() -> None:
    names = [
        [state.name for state in open_watch(HealthConfig(), ["r/0"], print, None, real=r).states()]
        for r in (True, False)
    ]
    assert names == [["nvml", "kmsg"], []]


def test_the_drivers_own_files_name_gpus(tmp_path: Path) -> None:
    folder = tmp_path / "0000:9b:00.0"
    folder.mkdir()
    (folder / "information").write_text("Model: \t NVIDIA X\nGPU UUID: \t GPU-aaaa-1\n")
    (identity,) = proc_identities(tmp_path)
    assert (identity.pci, identity.uuid) == ("0000:9b:00.0", "GPU-aaaa-1")
    assert proc_identities(tmp_path / "none") == []
