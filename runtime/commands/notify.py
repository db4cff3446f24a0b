"""`notifier`, the process that tells people, and `notify test`, which tries every way to them."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import uuid

import click

from runtime.commands.common import ago, json_option, print_json, print_table
from runtime.commands.serving import on_signals, set_up_logging
from runtime.control.lineage import end_with_parent
from runtime.errors import UserError
from runtime.notify.channels import Channel, NotDelivered, Refused, open_channels
from runtime.notify.notice import Notice
from runtime.notify.notifier import Notifier
from runtime.notify.settings import BASE_URL, SLACK, SMTP, WEBHOOKS, NotifySettings
from storage.live.acl import as_role
from storage.live.redis_store import RedisStore
from storage.notifier_state import ChannelState, NotifierState
from storage.settings import Settings

SILENT_S = 60.0
HOW = f"set {WEBHOOKS}, {SLACK} or {SMTP}"


@click.command()
@click.option("--base-url", default="", metavar="URL", help=f"Of the dashboard, if not {BASE_URL}.")
def notifier(base_url: str) -> None:
    """Run the notifier: webhooks and e-mail on proposals, decisions, expiry and incidents.

    Whom to tell comes from the environment alone: COUNTERPOISE_NOTIFY_WEBHOOKS,
    COUNTERPOISE_NOTIFY_SLACK (addresses, apart by spaces), COUNTERPOISE_NOTIFY_SMTP with _FROM and
    _TO; COUNTERPOISE_BASE_URL is where the links lead.
    """
    set_up_logging()
    settings, notify = as_role(Settings.from_env(), "notifier"), NotifySettings.from_env()
    if notify.is_empty:
        raise UserError(f"nobody to tell; {HOW}")
    if base_url:
        notify = dataclasses.replace(notify, base_url=base_url)
    stop = threading.Event()
    on_signals(stop.set)
    end_with_parent()
    Notifier(
        RedisStore.for_service(settings.redis_url),
        open_channels(notify),
        settings.home / "notifier",
        base_url=notify.base_url,
        clock=time.time,
        stop=stop,
    ).run_forever()


@click.group()
def notify() -> None:
    """Tell people: try the webhooks and the e-mail that are set up."""


@notify.command()
@json_option
def test(as_json: bool) -> None:
    """Send a test notice to every channel now, and say what became of it."""
    settings = NotifySettings.from_env()
    channels = open_channels(settings)
    if not channels:
        raise UserError(f"nobody to tell; {HOW}")
    notice = Notice(
        id=f"test:{uuid.uuid4()}",
        kind="test",
        at=time.time(),
        run="",
        run_name="test",
        severity="info",
        title="A test of Counterpoise's notices",
        text="If you read this, this channel works.",
    )
    answers = {channel.name: _tried(channel, notice) for channel in channels}
    if as_json:
        print_json(
            [
                {"channel": name, "delivered": not error, "error": error}
                for name, error in answers.items()
            ]
        )
    else:
        for name, error in answers.items():
            click.echo(f"{name}: {error or 'delivered'}", err=bool(error))
    if any(answers.values()):
        sys.exit(1)


def _tried(channel: Channel, notice: Notice) -> str:
    """Why it was not delivered, "" when it was."""
    try:
        channel.send(notice)
    except (NotDelivered, Refused) as error:
        return str(error)
    return ""


def print_notifier(state: NotifierState | None, now: float) -> None:
    """A few lines for `status`; nothing when no notifier ever ran."""
    if state is None:
        return
    silent = now - state.at > SILENT_S
    said = f"no word since {ago(state.at, now)}: is it running?" if silent else "running"
    click.echo(f"\nNotifier on {state.host}: {said}")
    if state.missed:
        click.echo(f"  {state.missed} journal entries were gone before it could read them")
    print_table(
        ["channel", "state", ">waiting", ">delivered", ">refused", ">dropped"],
        [
            [
                one.name,
                channel_word(one, now),
                *map(str, (one.pending, one.delivered, one.refused, one.dropped)),
            ]
            for one in state.channels
        ],
    )


def channel_word(channel: ChannelState, now: float) -> str:
    if channel.failing_since is not None:
        return (
            f"failing for {ago(channel.failing_since, now).removesuffix(' ago')}: {channel.error}"
        )
    return "works" if channel.delivered_at else "not used yet"
