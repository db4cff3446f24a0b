"""Where a worker process begins.

It names the worker module only inside the process, so that an agent can point its forkserver here
without importing torch itself.
"""

from multiprocessing.connection import Connection


def worker_main(
    config_json: bytes, gpu: str, store: tuple[str, int], connection: Connection
) -> None:
    """Run the worker of `gpu`; see `runtime.control.worker.worker_main`."""
    from runtime.control.worker import worker_main as run

    run(config_json, gpu, store, connection)
