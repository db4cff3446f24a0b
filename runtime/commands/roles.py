"""The long-running processes, each started by `up` or by a service manager of its own host."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import click

from runtime.commands.serving import on_signals, set_up_logging
from runtime.config import Config, load_config
from runtime.control.lineage import end_with_parent, end_with_parent_through_exec
from runtime.errors import UserError
from runtime.plan.memory import require_fit
from storage.identity import WRITERS, not_genuine, refusal, writer_key
from storage.live.acl import as_role
from storage.settings import Settings
from storage.sign_in import SignIn

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="TOML file; default: two racks of 8 emulated GPUs.",
)


@click.command()
@config_option
@click.option("--run", "run_id", default="", help="Run id; default: name and time.")
@click.option("--port", type=int, default=None, help="Listen here instead of control.port.")
@click.option("--fresh", is_flag=True, help="Go on from no earlier run's checkpoint.")
def controller(config_path: Path | None, run_id: str, port: int | None, fresh: bool) -> None:
    """Run the controller of one training run: it plans, decides by policy, owns the generation."""
    from runtime.control.archive import Archive
    from runtime.control.channel import control_key
    from runtime.control.controller import Controller
    from runtime.engine.resume import AFRESH, find_start
    from storage.live.redis_store import RedisStore

    set_up_logging()
    settings = as_role(Settings.from_env(), "controller")
    config = require_fit(load_config(config_path))
    if port is not None:
        config = with_port(config, port)
    run_id = run_id or mint_run_id(config)
    runs = settings.home / "runs"
    # One that takes over goes by what is remembered, whatever has become of the checkpoint.
    taking_over = Archive(runs / run_id).holds_a_run
    serving = Controller(
        config,
        run=run_id,
        home=runs / run_id,
        store=RedisStore.for_service(settings.redis_url),
        key=control_key(),
        begin=AFRESH if taking_over else find_start(config, runs, fresh=fresh),
    )
    keys = {writer: writer_key(settings.home, writer) for writer in WRITERS}
    serving.coordinator.desk.intake.require_identity(
        lambda command, now: refusal(command, run_id, keys, now)
    )
    on_signals(lambda: serving.ask_stop("stopped by its operator"))
    end_with_parent()
    logging.getLogger(__name__).info("run %s: agents connect to %s:%d", run_id, *serving.address)
    finish = serving.run()
    logging.getLogger(__name__).info("run %s %s: %s", run_id, finish.status, finish.reason)
    # Also a failed run is an orderly end: whoever looks after this process must not start it again.
    sys.exit(0)


@click.command()
@config_option
@click.option("--host", default="", help="Which racks are ours; default: this host's name.")
@click.option("--controller", "address", default="", metavar="HOST:PORT",
              help="Default: control.host and control.port of the config.")  # fmt: skip
def agent(config_path: Path | None, host: str, address: str) -> None:
    """Run the agent of this host: it starts workers, watches them die, reads and caps power."""
    from runtime.control.agent import Agent
    from runtime.control.channel import control_key
    from runtime.control.telemetry import HostTelemetry
    from storage.live.redis_store import RedisStore

    set_up_logging()
    settings, config = as_role(Settings.from_env(), "agent"), require_fit(load_config(config_path))
    stop = threading.Event()
    host = _our_host(config, host)
    store = RedisStore.for_ui(settings.redis_url)
    telemetry = HostTelemetry(config, host=host, store=store, home=settings.home)
    serving = Agent(
        config,
        host=host,
        address=_controller_address(config, address),
        key=control_key(),
        telemetry=telemetry,
        stop=stop,
        home=settings.home,
    )

    def end() -> None:
        stop.set()
        serving.wake()

    on_signals(end)
    end_with_parent()
    publishing = threading.Thread(
        target=telemetry.run_forever, args=(stop, serving.speed_changed), name="telemetry"
    )
    publishing.start()
    serving.run()
    stop.set()
    publishing.join(timeout=5.0)


@click.command()
def recorder() -> None:
    """Run the recorder: it takes every run's journal from the live store into SQL."""
    from storage.history.database import open_history
    from storage.live.redis_store import RedisStore
    from storage.recorder import Recorder

    set_up_logging()
    settings = as_role(Settings.from_env(), "recorder")
    engine = open_history(settings.database_url)
    stop = threading.Event()
    on_signals(stop.set)
    end_with_parent()
    keys = {writer: writer_key(settings.home, writer) for writer in WRITERS}
    Recorder(
        RedisStore.for_service(settings.redis_url),
        engine,
        clock=time.time,
        stop=stop,
        is_genuine=lambda asked, run: not not_genuine(asked, run, keys),
    ).run_forever()
    engine.dispose()


@click.command()
@click.option("--port", type=int, default=8501, show_default=True)
def app(port: int) -> None:
    """Serve the dashboard, on 127.0.0.1 unless STREAMLIT_SERVER_ADDRESS says otherwise.

    COUNTERPOISE_AUTH says who may: `local` (whoever reaches 127.0.0.1 is admin), `oidc` or `proxy`.
    """
    if not 1 <= port <= 65535:
        raise UserError(f"--port is {port}; allowed: 1 to 65535")
    spec = importlib.util.find_spec("app")
    if spec is None or spec.origin is None:
        raise UserError("the dashboard is not installed; run `./run setup`")
    folder = Path(spec.origin).parent
    sign_in = check_sign_in()
    secrets = ["--secrets.files", str(sign_in.secrets_file)] if sign_in.secrets_file else []
    end_with_parent_through_exec()
    # Streamlit looks for its config beside the script it runs; it replaces this process.
    os.execv(
        sys.executable,
        [
            sys.executable, "-m", "streamlit", "run", str(folder / "main.py"),
            "--server.port", str(port), *secrets,
        ],
    )  # fmt: skip


def check_sign_in() -> SignIn:
    """How people sign in to the dashboard; it listens on 127.0.0.1 unless told otherwise.

    Raises:
        SettingsError: it is set up wrongly, or would let in everybody from elsewhere.
    """
    sign_in = SignIn.from_env()
    sign_in.check_address(os.environ.setdefault("STREAMLIT_SERVER_ADDRESS", "127.0.0.1"))
    return sign_in


def mint_run_id(config: Config) -> str:
    """A run id that sorts by time: the config's name and the local time."""
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.name)
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def with_port(config: Config, port: int) -> Config:
    import msgspec

    if not 0 <= port <= 65535:
        raise UserError(f"--port is {port}; allowed: 0 to 65535")
    return msgspec.structs.replace(
        config, control=msgspec.structs.replace(config.control, port=port)
    )


def _our_host(config: Config, host: str) -> str:
    hosts = {rack.host for rack in config.cluster.racks}
    ours = host or (socket.gethostname() if socket.gethostname() in hosts else "localhost")
    if ours not in hosts:
        raise UserError(
            f"no rack of the config is on host {ours!r}; allowed with --host: "
            f"{', '.join(sorted(hosts))}"
        )
    return ours


def _controller_address(config: Config, address: str) -> tuple[str, int]:
    host, _, port = (address or f"{config.control.host}:{config.control.port}").rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise UserError(
            f"the controller's address is {host}:{port}; give --controller HOST:PORT, or set "
            "control.host and control.port (not 0) in the config"
        )
    return host, int(port)
