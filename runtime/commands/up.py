"""`up` and `train`: a whole run on this machine, told step by step."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import click

from runtime.commands.metrics import DEFAULT_PORT as METRICS_PORT
from runtime.commands.roles import check_sign_in, config_option, mint_run_id
from runtime.config import Config, load_config
from runtime.control.supervisor import (
    StopAsked,
    Supervisor,
    dashboard_answers,
    first_free_port,
    free_port,
    seconds_since,
)
from runtime.errors import UserError
from runtime.notify.settings import BASE_URL, NotifySettings
from runtime.plan.memory import require_fit
from storage.live.acl import as_role
from storage.live.embedded import EmbeddedServer, EmbeddedServerError
from storage.live.port import LiveStoreDown
from storage.live.redis_store import RedisStore
from storage.records import EventHappened, ProposalChanged, RunState
from storage.settings import Settings

LOOK_S = 0.2
TOLD_EVERY_S = 30.0
STOP_S = 15.0

fresh_option = click.option(
    "--fresh", is_flag=True, help="Begin anew instead of going on where the last run stopped."
)


@click.command()
@config_option
@click.option(
    "--port", type=int, default=None, help="Port of the dashboard; default: from 8501 on."
)
@fresh_option
def up(config_path: Path | None, port: int | None, fresh: bool) -> None:
    """Start everything on this machine: Redis, a training run, recorder and dashboard.

    Without --config it trains a small model on two racks of 8 emulated GPUs. Ctrl-C stops all of
    it; the next `up` goes on from there.
    """
    check_sign_in()
    session = _Session(require_fit(load_config(config_path)), config_path, fresh=fresh)
    sys.exit(session.run(first_free_port(port)))


@click.command()
@config_option
@fresh_option
def train(config_path: Path | None, fresh: bool) -> None:
    """Start a training run with its recorder, but no dashboard.

    Uses the Redis that answers for this home (or COUNTERPOISE_REDIS_URL), else starts one.
    """
    sys.exit(_Session(require_fit(load_config(config_path)), config_path, fresh=fresh).run(None))


class _Session:
    """One `up` from start to end."""

    def __init__(self, config: Config, config_path: Path | None, *, fresh: bool) -> None:
        self._fresh = ["--fresh"] if fresh else []
        self._config = config
        self._config_path = config_path
        self._settings = as_role(Settings.from_env(), "viewer")
        self._notify = NotifySettings.from_env()
        self._run = mint_run_id(config)
        self._started = time.monotonic()
        self._seq = 0
        self._told_at = 0.0
        self._told = ""
        self._stop = StopAsked()

    def run(self, port: int | None) -> int:
        hosts = {rack.host for rack in self._config.cluster.racks}
        if len(hosts) > 1:
            raise UserError(
                "`up` and `train` start one host, but the config names "
                f"{', '.join(sorted(hosts))}; run `counterpoise controller` and, on every host, "
                "`counterpoise agent`"
            )
        if self._config.checkpoint.start:
            # Imports torch; a wrong folder must be told before anything is started.
            from runtime.engine.resume import given_start

            given_start(self._config, verify=False)
        with contextlib.ExitStack() as stack:
            self._open_redis(stack, only_if_needed=port is None)
            supervisor = Supervisor(self._settings, self._say)
            stack.callback(supervisor.end_all)
            store = RedisStore.for_ui(self._settings.redis_url)
            self._start(supervisor, port, next(iter(hosts)))
            code = self._watch(supervisor, store, port)
            return self._end(supervisor, store, code)

    def _open_redis(self, stack: contextlib.ExitStack, *, only_if_needed: bool) -> None:
        if self._settings.external_redis:
            try:
                RedisStore.for_ui(self._settings.redis_url).ping()
            except LiveStoreDown as error:
                raise UserError(str(error)) from error
            self._say(f"redis      {self._settings.redis_redacted}")
            return
        if only_if_needed:
            with contextlib.suppress(LiveStoreDown):
                RedisStore.for_ui(self._settings.redis_url).ping()
                self._say(f"redis      {self._settings.redis_redacted}")
                return
        server = EmbeddedServer.from_settings(self._settings)
        try:
            stack.enter_context(server)
        except EmbeddedServerError as error:
            raise UserError(str(error)) from error
        self._redis = server
        self._say(f"redis      embedded, files in {self._settings.home}")

    def _start(self, supervisor: Supervisor, port: int | None, host: str) -> None:
        config = ["--config", str(self._config_path)] if self._config_path else []
        control_port = str(self._config.control.port or free_port())
        supervisor.start(
            "controller",
            ["controller", *config, *self._fresh, "--run", self._run, "--port", control_port],
            restarts=True,
        )
        supervisor.start(
            "agent",
            [
                "agent", *config, "--host", host,
                "--controller", f"{self._config.control.host}:{control_port}",
            ],
            restarts=False,
        )  # fmt: skip
        supervisor.start("recorder", ["recorder"], restarts=True)
        if not self._notify.is_empty:
            here = [] if port is None else ["--base-url", f"http://127.0.0.1:{port}"]
            base = [] if os.environ.get(BASE_URL) else here
            supervisor.start("notifier", ["notifier", *base], restarts=True)
        if port is not None:
            supervisor.start("app", ["app", "--port", str(port)], restarts=True)
            metrics = first_free_port(None, METRICS_PORT)
            supervisor.start("metrics", ["metrics", "--port", str(metrics)], restarts=True)
            self._say(f"metrics    http://127.0.0.1:{metrics}/metrics")
        racks = self._config.cluster.racks
        device = "emulated GPUs" if self._config.cluster.device == "emulated" else "GPUs"
        self._say(
            f"run        {self._run}: {len(racks)} racks of "
            f"{', '.join(sorted({str(rack.gpus) for rack in racks}))} {device}"
        )

    # while it runs ---------------------------------------------------------------------------

    def _watch(self, supervisor: Supervisor, store: RedisStore, port: int | None) -> int:
        """Tell what happens until the run ends or somebody stops it; the exit code."""
        serving = port is None
        while not self._stop.event.wait(LOOK_S):
            gone = supervisor.check(time.monotonic())
            self._revive_redis()
            with contextlib.suppress(LiveStoreDown):
                state = store.get_run(self._run)
                self._tell(store, state)
                if state is not None and state.status in ("stopped", "failed"):
                    self._say(f"run {state.status}: {state.status_reason}")
                    return 0 if state.status == "stopped" else 1
            if gone:
                role = gone[0]
                self._say(
                    f"{role.name} ended with {role.code}: {role.last_words()}\n  log: {role.log}"
                )
                return 1
            if not serving and port is not None and dashboard_answers(port):
                serving = True
                self._say(
                    f"dashboard  http://127.0.0.1:{port}  (after {seconds_since(self._started)})"
                )
        return 0

    def _revive_redis(self) -> None:
        server = getattr(self, "_redis", None)
        if server is not None and server.pid is None:
            self._say("redis ended; starting it again (training goes on meanwhile)")
            with contextlib.suppress(EmbeddedServerError):
                server.restart()

    def _tell(self, store: RedisStore, state: RunState | None) -> None:
        """One line whenever something worth a line has happened."""
        if state is None:
            return
        if state.status == "starting":
            if state.status_reason != self._told:
                self._told = state.status_reason
                self._say(f"starting   {state.status_reason or 'forming the first generation'}")
            return
        self._tell_entries(store)
        if self._told != "training":
            self._told, self._told_at = "training", time.monotonic()
            self._say(
                f"training   first step committed after {seconds_since(self._started)}, "
                f"loss {state.loss or 0.0:.3f}. Ctrl-C stops everything.\n"
                f"           Lose a GPU:  counterpoise fault kill "
                f"{self._config.cluster.racks[0].name}/3"
            )
        if time.monotonic() - self._told_at > TOLD_EVERY_S:
            self._told_at = time.monotonic()
            self._say(
                f"step {state.step:6d} loss {state.loss or 0.0:.4f}  {state.step_s:.2f} s/step  "
                f"{state.tokens_per_s:,.0f} tokens/s  time goodput {state.time_goodput:.1%}"
            )

    def _tell_entries(self, store: RedisStore) -> None:
        for entry in store.read_journal(self._run, self._seq, 200):
            self._seq = entry.seq
            if isinstance(entry, EventHappened):
                self._say(f"event      {entry.message}")
            elif isinstance(entry, ProposalChanged) and not self._is_outcome(entry):
                proposal = entry.proposal
                index = proposal.chosen if proposal.chosen is not None else proposal.recommended
                hint = f" (approve it: counterpoise approve {proposal.id})"
                self._say(
                    f"proposal   {proposal.id} {proposal.state}: {proposal.options[index].title}"
                    + (hint if proposal.state == "open" else "")
                )

    @staticmethod
    def _is_outcome(entry: ProposalChanged) -> bool:
        """Measurements that follow an applied proposal are not news."""
        outcome = entry.proposal.outcome
        return outcome is not None and outcome.num_steps > 0

    # the end ---------------------------------------------------------------------------------

    def _end(self, supervisor: Supervisor, store: RedisStore, code: int) -> int:
        """End the run at a step boundary, let the recorder catch up, end the rest."""
        self._say("stopping   at the next step boundary (Ctrl-C again: at once)")
        supervisor.ask_end("controller")
        # It writes a last checkpoint, which may take its time.
        deadline = time.monotonic() + STOP_S + self._config.checkpoint.write_deadline_s
        while time.monotonic() < deadline and not self._stop.hurry:
            if supervisor.wait_ended("controller", 0.1) is not None:
                break
        deadline = time.monotonic() + STOP_S
        supervisor.end("controller", 0.5)
        supervisor.end("agent", 5.0)
        with contextlib.suppress(LiveStoreDown):
            while time.monotonic() < deadline and not self._stop.hurry:
                if store.acknowledged(self._run) >= store.last_seq(self._run):
                    break
                time.sleep(0.05)
        supervisor.end_all()
        self._say(f"stopped    look back: counterpoise runs {self._run}")
        return code

    def _say(self, line: str) -> None:
        click.echo(line)
