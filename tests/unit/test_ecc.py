"""ECC errors from NVML to the map: counted, not counted, and none there to count."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from app.components.fleet import LENSES, NO_VALUE, pack
from app.gpu_detail import _ecc
from app.shapes import rack_looks
from runtime.config import Config
from runtime.control.telemetry import HostTelemetry
from runtime.health.address_map import AddressMap
from runtime.health.catalogue import load_catalogue
from runtime.health.sources.nvml import NvmlSource
from runtime.health.sources.watch import Watch
from storage.records import RackRecord
from tests.contract import records
from tests.support.fake_nvml import FakeGpu, FakeNvml

ECC = next(lens for lens in LENSES if lens.id == "ecc")
NUM_GPUS = 4


def counted(**changes: object) -> dict[str, int]:
    """What a watch over NVML knows of four GPUs; `changes` are the second one's."""
    gpus = [FakeGpu(f"00000000:0{i}:00.0", f"GPU-{i}") for i in range(1, NUM_GPUS + 1)]
    for name, value in changes.items():
        setattr(gpus[1], name, value)
    source = NvmlSource(load_catalogue(), nvml=FakeNvml(gpus))
    source.open()
    addresses = AddressMap(
        [f"rack-0/{slot}" for slot in range(NUM_GPUS)],
    )
    watch = Watch([source], addresses=addresses, sink=lambda _: None, poll_s=1.0)
    watch.take(source, source.poll(0.0))
    return watch.ecc()


def record_of(ecc: dict[str, int]) -> RackRecord:
    telemetry = HostTelemetry(Config(), host="localhost", store=None, clock=lambda: 1.0)
    telemetry.count_ecc(lambda: ecc)
    return telemetry.advance(1.0, 0.0)[0]


def test_errors_travel_from_nvml_to_the_record() -> None:
    ecc = counted(ecc_uncorrected=7)
    assert ecc == {"rack-0/0": 0, "rack-0/1": 7, "rack-0/2": 0, "rack-0/3": 0}
    shown = record_of(ecc).column("ecc")
    assert shown[:4].tolist() == [0.0, 7.0, 0.0, 0.0]
    assert np.isnan(shown[4:]).all()


def test_a_gpu_that_does_not_count_is_no_zero() -> None:
    assert set(counted(unsupported={"ecc"})) == {"rack-0/0", "rack-0/2", "rack-0/3"}
    record = record_of({})
    assert record.ecc == b""
    assert np.isnan(record.column("ecc")).all()


def test_a_record_with_half_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="`ecc` has 4 bytes; expected none or 32"):
        records.rack(ecc=b"\0" * 4)


def packed(**changes: object) -> tuple[dict[str, object], list[int]]:
    """Lens and values of the map's blob."""
    racks = {"rack-0": records.rack(**changes)}
    blob = pack(racks, rack_looks(racks, ()), ECC, None)
    (length,) = struct.unpack("<I", blob[:4])
    values = np.frombuffer(blob[4 + length + 8 :], "<u2")
    return json.loads(blob[4 : 4 + length])["lens"], values.tolist()


def test_the_lens_shows_errors_beside_gpus_that_do_not_count() -> None:
    column = np.array([0, 3, np.nan, 0, 0, 0, 0, np.nan], "<f4")
    lens, values = packed(ecc=column.tobytes(), emulated=False)
    assert (lens["low"], lens["high"], lens["none"]) == (0.0, 3.0, "")
    assert values == [0, NO_VALUE - 1, NO_VALUE, 0, 0, 0, 0, NO_VALUE]


def test_the_lens_says_why_it_shows_nothing() -> None:
    lens, values = packed()
    assert set(values) == {NO_VALUE}
    assert "emulated devices" in str(lens["none"])
    assert "no health source" in str(packed(emulated=False)[0]["none"])
    assert "emulated" in _ecc(float("nan"), True).sub
    assert "not counted" in _ecc(float("nan"), False).sub
    assert _ecc(3.0, False).value == "3"
