"""Sources that are asked now and then: nvidia-smi and a Prometheus exporter."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.health.sources.polled import PrometheusSource, SmiSource
from tests.support.health_sources import CATALOGUE


def script(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_nvidia_smi(tmp_path: Path) -> None:
    xml = "<nvidia_smi_log><gpu id='0:9b:00.0'><x>GPU is lost</x></gpu></nvidia_smi_log>"
    source = SmiSource(script(tmp_path / "smi", f"print({xml!r})"), CATALOGUE)
    source.open()
    (seen,) = source.poll(1.0)
    assert (seen.gpu, seen.code, seen.verdict) == ("0000:9b:00.0", "gpu_lost", "failed")
    broken = SmiSource(script(tmp_path / "broken", "print('NVIDIA-SMI has failed')"), CATALOGUE)
    assert broken.poll(1.0) == []
    assert broken.state.status == "failing"
    missing = SmiSource(str(tmp_path / "none"), CATALOGUE)
    missing.poll(1.0)
    assert missing.state.status == "missing"


def test_a_gpu_that_nvidia_smi_no_longer_lists_is_lost(tmp_path: Path) -> None:
    def listing(*buses: str, complaint: str = "") -> None:
        gpus = "".join(f"<gpu id='0:{bus}:00.0'><uuid>GPU-{bus}</uuid></gpu>" for bus in buses)
        text = f"print('<nvidia_smi_log>{{}}</nvidia_smi_log>'.format({gpus!r}))"
        if complaint:
            text = f"import sys; print({complaint!r}, file=sys.stderr)\n{text}\nsys.exit(15)"
        script(tmp_path / "smi", text)

    listing("9b", "9c")
    source = SmiSource(str(tmp_path / "smi"), CATALOGUE)
    source.open()

    def found() -> dict[str | None, object]:
        return {each.gpu: each.code for each in source.poll(1.0)}

    assert found() == {"0000:9b:00.0": None, "0000:9c:00.0": None}
    listing("9b")
    assert found() == {"0000:9b:00.0": None, "0000:9c:00.0": "gpu_lost"}
    told = "Unable to determine the device handle for GPU0000:9C:00.0: Unknown Error"
    listing("9b", complaint=told)
    assert found() == {"0000:9b:00.0": None, "0000:9c:00.0": "gpu_lost"}
    listing("9b", "9c")
    assert found() == {"0000:9b:00.0": None, "0000:9c:00.0": None}


class _Exporter(http.server.BaseHTTPRequestHandler):
    body = ""
    status = 200

    def do_GET(self) -> None:
        data = type(self).body.encode()
        self.send_response(type(self).status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def exporter() -> Iterator[tuple[str, type[_Exporter]]]:
    handler = type("Exporter", (_Exporter,), {})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics", handler
        server.shutdown()
        thread.join()


def test_prometheus_xid_gauge_is_an_event_only_when_it_changes(
    exporter: tuple[str, type[_Exporter]],
) -> None:
    url, handler = exporter
    line = 'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-a",pci_bus_id="00000000:9B:00.0"}} {}\n'
    source = PrometheusSource(url, CATALOGUE)
    source.open()

    def events(value: int) -> list[object]:
        handler.body = line.format(value)
        return [each.code for each in source.poll(1.0) if not each.snapshot]

    assert events(31) == []  # Of unknown age.
    assert events(31) == []
    assert events(79) == [79]
    assert events(79) == []
    handler.status = 403
    source.poll(1.0)
    assert source.state.status == "denied"


def test_a_gpu_that_the_exporter_no_longer_lists_is_lost(
    exporter: tuple[str, type[_Exporter]],
) -> None:
    url, handler = exporter
    source = PrometheusSource(url, CATALOGUE)
    source.open()

    def found(*gpus: str) -> dict[str | None, object]:
        handler.body = "up 1\n" + "".join(
            f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-{gpu}"}} 40\n' for gpu in gpus
        )
        return {each.gpu: each.code for each in source.poll(1.0)}

    assert found("a", "b") == {"GPU-a": None, "GPU-b": None}
    assert found("b") == {"GPU-a": "gpu_lost", "GPU-b": None}
    assert found("a", "b") == {"GPU-a": None, "GPU-b": None}
    assert found() == {}  # The exporter starts anew.
    assert source.state.status == "failing"


def test_prometheus_xid_counts_are_events_when_they_rise(
    exporter: tuple[str, type[_Exporter]],
) -> None:
    url, handler = exporter
    source = PrometheusSource(url, CATALOGUE)
    source.open()

    def events(**counts: int) -> list[tuple[object, int]]:
        lines = ['DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a"} 40']
        lines += [
            f'DCGM_EXP_XID_ERRORS_COUNT{{gpu="0",UUID="GPU-a",xid="{xid[1:]}"}} {count}'
            for xid, count in counts.items()
        ]
        handler.body = "\n".join(lines) + "\n"
        return [(each.code, each.count) for each in source.poll(1.0) if not each.snapshot]

    assert events(x31=4) == []  # Of unknown age.
    assert events(x31=4, x94=1) == [(94, 1)]
    assert events(x31=6, x94=1) == [(31, 2)]
    assert events(x94=1) == []  # The window has moved on.
    assert events(x79=1, x94=2) == [(79, 1), (94, 1)]


def test_prometheus_link_errors_count_from_when_we_came(
    exporter: tuple[str, type[_Exporter]],
) -> None:
    url, handler = exporter
    line = 'DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL{{gpu="0",UUID="GPU-a"}} {}\n'
    source = PrometheusSource(url, CATALOGUE)
    source.open()

    def seen(value: int) -> tuple[object, str, int]:
        handler.body = line.format(value)
        (only,) = source.poll(1.0)
        return only.code, only.verdict, only.count

    assert seen(70) == (None, "healthy", 1)  # Since boot: of unknown age.
    assert seen(72) == ("nvlink_errors", "suspect", 2)


def test_prometheus_without_an_exporter() -> None:
    source = PrometheusSource("http://127.0.0.1:9/metrics", CATALOGUE)
    source.open()
    assert source.poll(1.0) == []
    assert source.state.status == "missing"
