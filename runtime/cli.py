"""The `counterpoise` command: everything the browser can do, the shell can do.

Commands are imported when they are called, so that `counterpoise status` does not wait for torch.
"""

from __future__ import annotations

import importlib
import sys

import click

from runtime.errors import UserError
from storage.history.database import HistoryDown
from storage.live.port import LiveStoreDown
from storage.settings import SettingsError

# Command -> (module, attribute); the order is the order of `--help`.
COMMANDS = {
    "up": ("runtime.commands.up", "up"),
    "train": ("runtime.commands.up", "train"),
    "status": ("runtime.commands.look", "status"),
    "proposals": ("runtime.commands.look", "proposals"),
    "runs": ("runtime.commands.look", "runs"),
    "approve": ("runtime.commands.act", "approve"),
    "reject": ("runtime.commands.act", "reject"),
    "trigger": ("runtime.commands.act", "trigger"),
    "undo": ("runtime.commands.act", "undo"),
    "policy": ("runtime.commands.policy", "policy"),
    "fault": ("runtime.commands.act", "fault"),
    "power": ("runtime.commands.power", "power"),
    "pause": ("runtime.commands.pause", "pause"),
    "resume": ("runtime.commands.pause", "resume"),
    "stop": ("runtime.commands.act", "stop"),
    "health": ("runtime.commands.health", "health"),
    "notify": ("runtime.commands.notify", "notify"),
    "checkpoint": ("runtime.commands.checkpoint", "checkpoint"),
    "bench": ("runtime.commands.bench", "bench"),
    "controller": ("runtime.commands.roles", "controller"),
    "agent": ("runtime.commands.roles", "agent"),
    "recorder": ("runtime.commands.roles", "recorder"),
    "app": ("runtime.commands.roles", "app"),
    "metrics": ("runtime.commands.metrics", "metrics"),
    "notifier": ("runtime.commands.notify", "notifier"),
    "audit": ("runtime.commands.audit", "audit"),
    "redis-acl": ("runtime.commands.redis_acl", "redis_acl"),
}


class _LazyGroup(click.Group):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="counterpoise")
def cli() -> None:
    """Counterpoise keeps a synchronous training run productive when GPUs fail.

    \b
    Start a demo on this machine and open the dashboard:
        counterpoise up
    Lose a GPU, look at what is proposed, and answer:
        counterpoise fault kill rack-0/3
        counterpoise proposals
        counterpoise approve PROPOSAL
    Bring it back:
        counterpoise fault repair rack-0/3

    State lives in COUNTERPOISE_HOME (default: .counterpoise in the current folder). An external
    Redis is named by COUNTERPOISE_REDIS_URL, a PostgreSQL by COUNTERPOISE_DATABASE_URL.
    """


def main() -> None:
    """Entry point: a person's mistake is one clear line and exit code 2, never a traceback."""
    try:
        cli()
    except (UserError, SettingsError, LiveStoreDown, HistoryDown) as error:
        click.echo(f"counterpoise: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
