"""`metrics`, the process that Prometheus scrapes."""

from __future__ import annotations

import logging
import threading
import time

import click

from runtime.commands.serving import on_signals, set_up_logging
from runtime.control.lineage import end_with_parent
from runtime.errors import UserError
from runtime.metrics.collect import GPU_LIMIT, collect
from runtime.metrics.server import MetricsServer
from storage.live.acl import as_role
from storage.live.redis_store import RedisStore
from storage.settings import Settings

DEFAULT_PORT = 9464


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=int, default=DEFAULT_PORT, show_default=True)
@click.option(
    "--gpu-limit", type=int, default=GPU_LIMIT, show_default=True,
    help="Runs with more GPUs than this give numbers per rack only.",
)  # fmt: skip
def metrics(host: str, port: int, gpu_limit: int) -> None:
    """Serve the runs' metrics to Prometheus at http://HOST:PORT/metrics."""
    for name, value, most in (("--port", port, 65535), ("--gpu-limit", gpu_limit, 1_000_000)):
        if not 0 <= value <= most:
            raise UserError(f"{name} is {value}; allowed: 0 to {most}")
    set_up_logging()
    stop = threading.Event()
    on_signals(stop.set)
    end_with_parent()
    store = RedisStore.for_ui(as_role(Settings.from_env(), "viewer").redis_url)
    with MetricsServer(host, port, lambda: collect(store, time.time(), gpu_limit)) as server:
        logging.getLogger(__name__).info("metrics at http://%s:%d/metrics", host, server.port)
        stop.wait()
