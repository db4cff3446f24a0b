"""nvidia-smi's XML and Prometheus expositions: what is read, refused, counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.health.catalogue import CatalogueError, load_catalogue, parse_catalogue
from runtime.health.observation import Observation
from runtime.health.parse import ParsedFile, kind_of
from runtime.health.prometheus import ExpositionReader
from runtime.health.reading import Reading, judge
from runtime.health.smi_xml import SmiError, SmiReader

CATALOGUE = load_catalogue()
SAMPLES = Path(__file__).parents[3] / "shared" / "data"

XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <attached_gpus>2</attached_gpus>
  <gpu id="00000000:01:00.0">
    <serial>1650000000001</serial><uuid>GPU-aaaaaaaa-0000-0000-0000-000000000001</uuid>
    <gpu_reset_status><reset_required>{reset}</reset_required></gpu_reset_status>
    <gpu_recovery_action>{recovery}</gpu_recovery_action>
    <ecc_errors><volatile><sram_uncorrectable_parity>{ecc}</sram_uncorrectable_parity>
      <dram_uncorrectable>0</dram_uncorrectable></volatile>
      <aggregate><dram_uncorrectable>7</dram_uncorrectable>
        <sram_threshold_exceeded>{threshold}</sram_threshold_exceeded></aggregate>
      <tpc_repair_pending>{repair}</tpc_repair_pending>
      <unrepairable_memory>{broken}</unrepairable_memory></ecc_errors>
    <remapped_rows><remapped_row_pending>{pending}</remapped_row_pending>
      <remapped_row_failure>{failure}</remapped_row_failure></remapped_rows>
    <clocks_event_reasons>
      <clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
    </clocks_event_reasons>
    <temperature><gpu_temp>{temp}</gpu_temp></temperature>
    <fabric><state>Completed</state><health><bandwidth>{bandwidth}</bandwidth>
      <route_unhealthy>{route}</route_unhealthy></health></fabric>
  </gpu>
  <gpu id="00000000:02:00.0"><uuid>GPU-bbbbbbbb-0000-0000-0000-000000000002</uuid></gpu>
</nvidia_smi_log>
"""
FINE = {
    "reset": "No", "recovery": "None", "ecc": "0", "pending": "No", "failure": "No",
    "hot": "Not Active", "temp": "41 C", "threshold": "No", "repair": "No", "broken": "N/A",
    "bandwidth": "Full", "route": "False",
}  # fmt: skip


def smi(**values: str) -> tuple[list[Observation], SmiReader]:
    reader = SmiReader()
    readings = reader.read([XML.format(**(FINE | values)).encode()])
    return [judge(each, "nvidia_smi", CATALOGUE) for each in readings], reader


@pytest.mark.parametrize(
    ("values", "code", "verdict"),
    [
        ({}, None, "healthy"),
        ({"reset": "Yes"}, "reset_required", "failed"),
        ({"recovery": "Drain and Reset"}, "recovery_action", "draining"),
        ({"recovery": "GPU Reset"}, "recovery_action", "failed"),
        ({"recovery": "Reset"}, "recovery_action", "failed"),
        ({"recovery": "Reboot"}, "recovery_action", "failed"),
        ({"recovery": "Drain P2P"}, "recovery_action", "draining"),
        ({"reset": "Requested functionality has been deprecated"}, None, "healthy"),
        ({"bandwidth": "Degraded"}, "fabric_degraded", "suspect"),
        ({"route": "True"}, "fabric_unhealthy", "suspect"),
        ({"ecc": "3"}, "ecc_uncorrected", "suspect"),
        ({"pending": "Yes"}, "row_remap_pending", "suspect"),
        ({"failure": "Yes"}, "row_remap_failure", "draining"),
        ({"hot": "Active"}, "hw_thermal_slowdown", "degraded"),
        ({"temp": "[GPU is lost]"}, "gpu_lost", "failed"),
        ({"temp": "GPU requires reset"}, "reset_required", "failed"),
        ({"temp": "ERR!"}, "read_error", "suspect"),
        ({"temp": "[Unknown Error]"}, "read_error", "suspect"),
        ({"threshold": "Yes"}, "ecc_threshold_exceeded", "draining"),
        ({"repair": "Yes"}, "repair_pending", "suspect"),
        ({"broken": "Yes"}, "unrepairable_memory", "draining"),
        ({"recovery": "Polish it"}, "recovery_action", "suspect"),
        ({"pending": "N/A", "ecc": "N/A", "temp": "N/A"}, None, "healthy"),
    ],
)
def test_smi_findings(values: dict[str, str], code: str | None, verdict: str) -> None:
    (first, second), reader = smi(**values)
    assert (first.gpu, first.code, first.verdict) == ("0000:01:00.0", code, verdict)
    assert (second.gpu, second.verdict) == ("0000:02:00.0", "healthy")
    assert reader.not_understood == []


def test_smi_counts_and_names_what_else_is_wrong() -> None:
    (first, _), _ = smi(ecc="3", failure="Yes")
    assert (first.code, first.subcode) == ("row_remap_failure", "ecc_uncorrected")


def test_smi_values_that_are_neither_are_shown() -> None:
    _, reader = smi(pending="Perhaps", temp="warm")
    assert [each.reason for each in reader.not_understood] == [
        "is neither yes nor no",
        "is not a number",
    ]


@pytest.mark.parametrize(
    "document",
    [
        b'<!DOCTYPE a [<!ENTITY x "xx">]><nvidia_smi_log>&x;</nvidia_smi_log>',
        b'<!DOCTYPE a [<!ENTITY % x SYSTEM "file:///etc/passwd">]><nvidia_smi_log/>',
        b"<html></html>",
        b"<nvidia_smi_log>",
        b"<nvidia_smi_log>" + b"<a>" * 100,
        b"",
    ],
)
def test_smi_refuses_hostile_and_foreign_xml(document: bytes) -> None:
    with pytest.raises(SmiError):
        SmiReader().read([document])


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        ("Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error",
         "0000:cb:00.0"),
        ("Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error",
         "0000:34:00.0"),
        ("Unable to determine the device handle for gpu 0000:46:00.0: GPU is lost.  Reboot the "
         "system to recover this GPU", "0000:46:00.0"),
        ("Unable to determine the device handle for GPU0: Unknown Error", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["before", "after", "alone"])
def test_smi_names_a_gpu_that_it_cannot_open_outside_its_xml(
    line: str, gpu: str | None, where: str
) -> None:
    document = XML.format(**FINE)
    text = {"before": f"{line}\n{document}", "after": f"{document}\n{line}\n", "alone": line}[where]
    assert kind_of(text) == "nvidia_smi"
    for size in (7, 1 << 16):
        data, reader = text.encode(), SmiReader()
        readings = reader.read([data[i : i + size] for i in range(0, len(data), size)])
        (lost,) = [each for each in readings if each.lost]
        seen = judge(lost, "nvidia_smi", CATALOGUE)
        assert (seen.gpu, seen.code, seen.verdict) == (gpu, "gpu_lost", "failed")
        assert seen.line == (1 + document.count("\n") + 1 if where == "after" else 1)
        assert len(readings) == (1 if where == "alone" else 3)
        assert reader.not_understood == []
        if where == "before":
            assert readings[1].line == 1 + 5


def test_smi_shows_what_else_is_no_xml() -> None:
    reader = SmiReader()
    reader.read([b"WARNING: infoROM is corrupted\n" + XML.format(**FINE).encode()])
    assert [(each.line, each.reason) for each in reader.not_understood] == [(1, "is no XML")]
    with pytest.raises(SmiError, match=r"it begins with .NVIDIA-SMI has failed"):
        SmiReader().read([b"NVIDIA-SMI has failed because it couldn't communicate"])


def test_smi_refuses_what_is_too_large() -> None:
    chunk = b"<nvidia_smi_log>" + b" " * (1 << 20)
    with pytest.raises(SmiError, match="larger"):
        SmiReader().read([chunk, *[b" " * (1 << 20)] * 70])


@given(st.binary(max_size=400))
def test_smi_fuzz(data: bytes) -> None:
    whole = XML.format(**FINE).encode()
    for document in (data, b"<nvidia_smi_log><gpu id='1:00.0'>" + data, data + whole, whole + data):
        try:
            SmiReader().read([document])
        except SmiError:
            continue


PROM = """# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a",pci_bus_id="00000000:08:00.0",err_msg="x \\"y\\""} 79
DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-b",pci_bus_id="00000000:09:00.0"} 0
DCGM_FI_DEV_ROW_REMAP_FAILURE{gpu="1",UUID="GPU-b"} 1
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="2",UUID="GPU-c"} 9223372036854775794
DCGM_FI_DEV_CLOCKS_EVENT_REASONS{gpu="2",UUID="GPU-c"} 64
DCGM_EXP_XID_ERRORS_COUNT{gpu="3",UUID="GPU-d",xid="31",window_size_in_ms="300000"} 4
DCGM_EXP_XID_ERRORS_COUNT{gpu="4",UUID="GPU-i",xid="79",window_size_in_ms="300000"} 2
DCGM_EXP_XID_ERRORS_COUNT{gpu="4",UUID="GPU-i",xid="13",window_size_in_ms="300000"} 5
DCGM_FI_DEV_XID_ERRORS{gpu="4",UUID="GPU-i"} 13
nvidia_smi_ecc_errors_uncorrected_volatile_total{uuid="e"} 2
nvidia_smi_gpu_recovery_action{uuid="f"} 1
nvidia_smi_clocks_event_reasons_hw_power_brake_slowdown{uuid="g"} 1
nvidia_smi_temperature_gpu{uuid="h"} NaN
go_goroutines 12
nvidia_smi_failed_scrapes_total 0
"""


def test_exposition_findings() -> None:
    reader = ExpositionReader()
    readings = reader.read(PROM.splitlines())
    seen = {each.gpu: each for each in (judge(r, "prometheus", CATALOGUE) for r in readings)}
    assert {gpu: (each.code, each.verdict, each.count) for gpu, each in seen.items()} == {
        "0000:08:00.0": (79, "failed", 1),
        "0000:09:00.0": ("row_remap_failure", "draining", 1),
        "GPU-c": ("hw_thermal_slowdown", "degraded", 1),
        "GPU-d": (31, "healthy", 4),
        "GPU-i": (79, "failed", 2),  # The last Xid hides no worse one.
        "e": ("ecc_uncorrected", "suspect", 2),
        "f": ("recovery_action", "failed", 1),
        "g": ("hw_power_brake_slowdown", "degraded", 1),
    } | ({"h": (None, "healthy", 1)} if "h" in seen else {})
    assert reader.num_not_understood == 0


@pytest.mark.parametrize("line", ["DCGM_FI{gpu=} 1", "a b c d", 'x{a="b"}', "x{a='1'} 2", "x one"])
def test_exposition_counts_bad_lines(line: str) -> None:
    reader = ExpositionReader()
    assert reader.read([line]) == []
    assert reader.num_not_understood == 1


@given(st.lists(st.text(max_size=60), max_size=20))
def test_exposition_fuzz(lines: list[str]) -> None:
    reader = ExpositionReader()
    reader.read(
        [*lines, *[f'DCGM_FI_DEV_XID_ERRORS{{gpu="0",x="{line}"}} {line}' for line in lines]]
    )
    assert reader.num_lines == 2 * len(lines)


def test_kinds_of_files() -> None:
    assert kind_of(XML) == "nvidia_smi"
    assert kind_of(PROM) == "prometheus"
    assert kind_of('   DCGM_FI_DEV_GPU_TEMP{gpu="0"} 41\n') == "prometheus"
    assert kind_of("<6>[1.0] NVRM: hello") == "kernel_log"
    assert kind_of("") == "kernel_log"


def test_a_reading_without_anything_known_is_healthy() -> None:
    assert judge(Reading(), "nvml", CATALOGUE).verdict == "healthy"


def test_the_catalogue_covers_what_the_field_reports() -> None:
    assert len(CATALOGUE) == 109
    for code in (13, 31, 43, 45):
        assert CATALOGUE.entry(code).verdict == "healthy"
    for code in (79, 95, 119, 120):
        assert CATALOGUE.entry(code).verdict == "failed"
    assert CATALOGUE.entry(4321).verdict == "suspect"
    with pytest.raises(CatalogueError):
        parse_catalogue("head\nnot a catalogue")


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples from the field are not here")
@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("kernel_log_xid119.log", [119] * 5),
        ("nvidia_smi_a100.xml", [None]),
        ("h100_load.prom", [None]),
    ],
)
def test_samples_from_the_field(name: str, codes: list[int | None]) -> None:
    parsed = ParsedFile(SAMPLES / name, CATALOGUE)
    assert [each.code for each in parsed.events()] == codes
    assert parsed.num_not_understood == 0
