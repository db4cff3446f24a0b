"""The NVML backend on a real GPU, where there is one: reads, probes, sets nothing that stays."""

from __future__ import annotations

from collections.abc import Iterator

import pynvml
import pytest

from runtime.power.backends.nvml import NvmlGpu
from runtime.power.port import CapOutOfRange, PowerError


@pytest.fixture
def gpu() -> Iterator[NvmlGpu]:
    try:
        backend = NvmlGpu(pynvml, 0)
    except PowerError as error:
        pytest.skip(f"no GPU here: {error}")
    yield backend
    backend.close()


def test_it_reads_physical_numbers(gpu: NvmlGpu) -> None:
    limits, reading = gpu.limits(), gpu.read()
    assert 0.0 < limits.min_w <= limits.normal_w <= limits.max_w
    assert limits.min_w <= reading.cap_w <= limits.max_w
    assert 0.0 < reading.power_w < 2.0 * limits.max_w
    assert 0.0 < reading.temp_c < 110.0


def test_a_cap_is_set_and_put_back_or_the_command_is_named(gpu: NvmlGpu) -> None:
    before_w, limits = gpu.read().cap_w, gpu.limits()
    with pytest.raises(CapOutOfRange):
        gpu.set_cap(limits.max_w + 1.0)
    if gpu.obstacle:
        assert "nvidia-smi" in gpu.obstacle or "cannot be set" in gpu.obstacle
        with pytest.raises(PowerError):
            gpu.set_cap(limits.min_w)
    else:
        try:
            gpu.set_cap(limits.min_w)
            assert gpu.read().cap_w == pytest.approx(limits.min_w, abs=1.0)
        finally:
            gpu.set_cap(before_w)
    assert gpu.read().cap_w == pytest.approx(before_w, abs=1.0)
