"""Notices: which entries are news, how they are queued, and what each way out sends."""

from __future__ import annotations

import hashlib
import hmac
import json

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from app.notifier_parts import channel_rows
from runtime.commands.notify import notify, print_notifier
from runtime.errors import UserError
from runtime.notify.channels import Mail, NotDelivered, Refused, SlackWebhook, Webhook
from runtime.notify.news import RunNews, take
from runtime.notify.notice import Notice
from runtime.notify.outbox import LONGEST_PAUSE_S, MAX_AGE_S, MAX_PENDING, Outbox
from runtime.notify.settings import (
    BASE_URL,
    MAIL_FROM,
    MAIL_TO,
    SLACK,
    SMTP,
    WEBHOOKS,
    MailSettings,
    NotifySettings,
)
from storage.notifier_state import ChannelState, NotifierState
from storage.records import JournalEntry, decode_packed, encode_packed
from storage.settings import SettingsError
from tests.contract import records
from tests.support.endpoints import closed_port, http_endpoint, smtp_endpoint

BASE = "https://ops.example/cp"


def story() -> list[JournalEntry]:
    """A GPU fails, a proposal is made, renewed and approved, the replica is whole again."""
    reduced = records.replica_state(live=(0,))
    return [
        records.started(1),
        records.formed(2),
        records.step(3),
        records.event(4, gpu="rack-0/1"),
        records.event(5, kind="replica_left_out", severity="warning", gpu="rack-0/1"),
        records.proposed(6),
        records.proposed(7, revision=2),
        records.decision(8),
        records.proposed(9, revision=3, state="approved", chosen=0),
        records.formed(10, generation=2, replicas=(reduced,)),
        records.event(11, kind="gpu_repaired", severity="info", gpu="rack-0/1"),
        records.formed(12, generation=3),
        records.proposed(13, id="p-2", state="expired"),
        records.ended(14, status="failed", reason="no replica left"),
    ]


def kinds(notices: list[Notice]) -> list[str]:
    return [one.kind for one in notices]


def notice(number: int = 1, **changes: object) -> Notice:
    base = Notice(
        id=f"run-1:p-{number}:open", kind="proposal_opened", at=1000.0, run="run-1",
        run_name="demo", severity="warning", title="Waits for a decision: <shrink> & boost",
        text="Cause: rack-0/3 failed\nReplica 0", proposal=f"p-{number}",
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


# which entries are news ----------------------------------------------------------------------
def test_a_story_is_told_in_order_and_each_thing_once() -> None:
    told = take(RunNews(run="run-1"), story(), since=0.0)
    assert kinds(told) == [
        "incident_opened", "proposal_opened", "decision_made", "incident_closed",
        "proposal_expired", "run_failed",
    ]  # fmt: skip
    assert told[0].title == "rack-0/3 failed"
    assert told[2].title == "Approved by ana: Shrink to 7 slots"
    assert "Verified: generation 3" in told[3].text
    assert {one.run_name for one in told} == {"demo"}
    assert len({one.id for one in told}) == len(told)


@given(st.lists(st.integers(1, 14), max_size=6))
def test_however_it_is_read_the_same_is_told(cuts: list[int]) -> None:
    """In parts, parts again, and with all that is remembered written down in between."""
    news, told = RunNews(run="run-1"), []
    for cut in [*sorted(cuts), 14]:
        told += take(news, story()[:cut], since=0.0)
        news = decode_packed(encode_packed(news), RunNews)
    assert [one.id for one in told] == [
        one.id for one in take(RunNews(run="run-1"), story(), since=0.0)
    ]


def test_a_failed_switch_is_an_incident_too() -> None:
    """Whatever opens an incident on the pages is told."""
    switch = records.event(3, kind="switch_failed", gpu=None, rack="rack-0", replica=0)
    told = take(RunNews(run="run-1"), [records.started(1), records.formed(2), switch], since=0.0)
    assert kinds(told) == ["incident_opened"]


def test_trouble_of_the_whole_run_is_told_but_not_every_time() -> None:
    def failed(seq: int) -> JournalEntry:
        return records.event(seq, kind="checkpoint_failed", gpu=None, message="disk full")

    news = RunNews(run="run-1")
    (told,) = take(news, [records.started(1), *map(failed, range(2, 102))], since=0.0)
    assert (told.kind, told.title, told.severity) == ("run_in_trouble", "disk full", "critical")
    assert told.url(BASE) == f"{BASE}/?run=run-1"
    assert kinds(take(news, [failed(1000)], since=0.0)) == ["run_in_trouble"]
    mere = records.event(1001, kind="cap_changed", severity="warning", gpu=None)
    assert take(news, [mere], since=0.0) == []


def test_an_open_incident_keeps_its_name_through_a_long_run() -> None:
    news = RunNews(run="run-1")
    opened = take(news, story()[:5], since=0.0)
    steps = [records.event(seq, severity="info", gpu=None) for seq in range(20, 9000)]
    assert take(news, steps, since=0.0) == []
    assert len(news.kept) < 10
    end = records.formed(9001, generation=9)
    (closed,) = take(news, [end], since=0.0)
    assert (closed.kind, closed.incident) == ("incident_closed", opened[0].incident)
    assert news.kept == [end]


def test_what_happened_earlier_is_not_told_and_not_told_later() -> None:
    news = RunNews(run="run-1")
    assert take(news, story()[:8], since=2000.0) == []
    assert kinds(take(news, [records.proposed(20, revision=5)], since=0.0)) == []


def test_links_lead_to_the_card() -> None:
    assert notice().url(BASE + "/") == f"{BASE}/reconfigure?run=run-1&proposal=p-1"
    opened = take(RunNews(run="run-1"), story(), since=0.0)[0]
    assert opened.url(BASE) == f"{BASE}/incidents?run=run-1&incident=i4"
    assert notice(kind="run_failed", proposal="").url(BASE) == f"{BASE}/?run=run-1"


# queueing ------------------------------------------------------------------------------------
def test_a_failing_channel_is_tried_ever_more_seldom_and_in_order() -> None:
    outbox = Outbox(name="a")
    for number in (1, 2):
        outbox.add(notice(number))
    pauses, now = [], 1000.0
    for _ in range(12):
        assert outbox.due(now) == notice(1)
        outbox.failed("away", now)
        assert outbox.due(now) is None
        assert outbox.next_try_at is not None
        pauses.append(outbox.next_try_at - now)
        now = outbox.next_try_at
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert outbox.state().failing_since == 1000.0
    outbox.took(notice(1), now)
    assert outbox.due(now) == notice(2)
    outbox.would_not(notice(2), "too large")
    assert (outbox.delivered, outbox.refused, outbox.error) == (1, 1, "too large")
    outbox.add(notice(3))
    outbox.failed("busy", now, retry_after_s=90.0)
    assert outbox.next_try_at == now + 90.0


def test_too_many_and_too_old_ones_are_dropped_and_counted() -> None:
    outbox = Outbox(name="a")
    for number in range(MAX_PENDING + 5):
        outbox.add(notice(number))
    assert (len(outbox.pending), outbox.dropped) == (MAX_PENDING, 5)
    assert outbox.pending[0].proposal == "p-5"
    assert outbox.due(1000.0 + MAX_AGE_S + 1.0) is None
    assert (outbox.pending, outbox.dropped) == ([], MAX_PENDING + 5)


# the ways out --------------------------------------------------------------------------------
def test_a_generic_webhook_gets_signed_json_with_its_key_and_link() -> None:
    with http_endpoint() as endpoint:
        Webhook(endpoint.url(), BASE, "a key").send(notice())
    (post,) = endpoint.posts
    sent = json.loads(post.body)
    assert sent["id"] == post.headers["Idempotency-Key"] == "run-1:p-1:open"
    assert sent["url"] == f"{BASE}/reconfigure?run=run-1&proposal=p-1"
    assert (sent["schema"], sent["kind"], sent["severity"]) == (1, "proposal_opened", "warning")
    expected = hmac.new(b"a key", post.body, hashlib.sha256).hexdigest()
    assert post.headers["Counterpoise-Signature"] == f"sha256={expected}"


def test_slack_gets_blocks_and_nothing_that_it_would_take_for_markup() -> None:
    with http_endpoint() as endpoint:
        SlackWebhook(endpoint.url(), BASE).send(notice())
    sent = json.loads(endpoint.posts[0].body)
    said = sent["blocks"][0]["text"]["text"]
    assert "*WARNING Waits for a decision: &lt;shrink&gt; &amp; boost*" in said
    assert f"<{BASE}/reconfigure?run=run-1&amp;proposal=p-1|Open in Counterpoise>" in said
    assert sent["blocks"][0]["block_id"] == "run-1:p-1:open"
    assert sent["text"].startswith("WARNING Waits")


@pytest.mark.parametrize(
    ("status", "error"),
    [(500, NotDelivered), (429, NotDelivered), (404, NotDelivered), (302, NotDelivered),
     (400, Refused), (413, Refused)],
)  # fmt: skip
def test_what_the_endpoint_answers_counts(status: int, error: type[Exception]) -> None:
    with http_endpoint() as endpoint:
        endpoint.status = status
        endpoint.headers = {"Retry-After": "7", "Location": endpoint.url("/elsewhere")}
        with pytest.raises(error, match=str(status)) as caught:
            Webhook(endpoint.url(), BASE).send(notice())
        assert [post.path for post in endpoint.posts] == ["/hook"]
    if status == 429:
        assert caught.value.retry_after_s == 7.0  # type: ignore[attr-defined]


def test_an_endpoint_that_is_away_says_so() -> None:
    with pytest.raises(NotDelivered, match="refused"):
        Webhook(f"http://127.0.0.1:{closed_port()}/", BASE).send(notice())
    with pytest.raises(NotDelivered, match="refused"):
        Mail(mail_settings(closed_port()), BASE).send(notice())


def mail_settings(port: int, **changes: str) -> MailSettings:
    fields = {"host": "127.0.0.1", "tls": "none", "sender": "cp@ops.example"} | changes
    return MailSettings(port=port, recipients=("a@x.example", "b@x.example"), **fields)


def test_mail_arrives_once_for_all_with_the_link() -> None:
    with smtp_endpoint() as endpoint:
        settings = mail_settings(endpoint.port, user="me", password="secret")
        for _ in range(2):
            Mail(settings, BASE).send(notice(title="Failed:\r\nBcc: x@y"))
    first, second = endpoint.messages
    assert first["Message-ID"] == second["Message-ID"]
    assert first["Subject"] == "[demo] Failed: Bcc: x@y"
    assert first["Bcc"] is None
    assert f"{BASE}/reconfigure?run=run-1&proposal=p-1" in first.get_content()  # type: ignore[attr-defined]
    assert len(endpoint.recipients) == 4
    assert len(endpoint.logins) == 2


@pytest.mark.parametrize(
    ("refusal", "error"), [("451 later", NotDelivered), ("554 no", Refused)]
)  # fmt: skip
def test_what_the_mail_server_answers_counts(refusal: str, error: type[Exception]) -> None:
    with smtp_endpoint() as endpoint:
        endpoint.refusal = refusal
        with pytest.raises(error, match=refusal):
            Mail(mail_settings(endpoint.port), BASE).send(notice())


def test_mail_to_another_machine_is_never_sent_in_the_clear() -> None:
    """A server without STARTTLS gets nothing but a greeting."""
    with smtp_endpoint() as endpoint:
        with pytest.raises(NotDelivered, match="STARTTLS"):
            Mail(mail_settings(endpoint.port, tls="starttls"), BASE).send(notice())
        assert endpoint.recipients == endpoint.messages == []


# settings ------------------------------------------------------------------------------------
def test_settings_come_from_the_environment_and_show_no_secret() -> None:
    settings = NotifySettings.from_env(
        {
            WEBHOOKS: "https://a.example/secret1 https://b.example/secret2",
            SLACK: "https://hooks.example/secret3",
            SMTP: "smtp://me:p%40ss@mail.example",
            MAIL_FROM: "cp@x.example",
            MAIL_TO: "a@x.example, b@x.example",
            BASE_URL: "https://ops.example/cp/",
        }
    )
    assert settings.base_url == "https://ops.example/cp"
    assert settings.mail is not None
    assert (settings.mail.tls, settings.mail.port) == ("starttls", 587)
    assert settings.mail.password == "p@ss"
    assert not any(word in repr(settings) for word in ("secret", "p@ss"))
    assert "secret" not in Webhook(settings.webhooks[0], BASE).name
    assert NotifySettings.from_env({}).is_empty


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({WEBHOOKS: "ftp://a.example/secret"}, WEBHOOKS),
        ({SLACK: "secret"}, SLACK),
        ({BASE_URL: "https://a.example https://b.example"}, BASE_URL),
        ({SMTP: "mail.example"}, SMTP),
        ({SMTP: "smtp://mail.example:secret"}, SMTP),
        ({SMTP: "smtp://mail.example"}, MAIL_FROM),
        ({SMTP: "smtp://mail.example", MAIL_FROM: "a@x.example"}, MAIL_TO),
        ({MAIL_TO: "a@x.example"}, SMTP),
    ],
)
def test_a_wrong_setting_is_named_without_its_secret(env: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named) as caught:
        NotifySettings.from_env(env)
    assert "secret" not in str(caught.value)


# the command line and the page -----------------------------------------------------------------
def test_the_test_command_tells_what_became_of_each_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with http_endpoint() as endpoint:
        dead = f"http://127.0.0.1:{closed_port()}/secret"
        monkeypatch.setenv(WEBHOOKS, f"{endpoint.url()} {dead}")
        done = CliRunner().invoke(notify, ["test", "--json"])
        assert done.exit_code == 1
        good, bad = json.loads(done.output)
        assert (good["delivered"], bad["delivered"]) == (True, False)
        assert "refused" in bad["error"]
        assert "secret" not in done.output
        monkeypatch.setenv(WEBHOOKS, endpoint.url())
        done = CliRunner().invoke(notify, ["test"])
    assert done.exit_code == 0
    assert done.output.strip().endswith("delivered")
    assert json.loads(endpoint.posts[0].body)["kind"] == "test"


def test_without_channels_the_commands_say_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=SLACK):
        CliRunner().invoke(notify, ["test"], catch_exceptions=False)


def test_status_and_page_show_what_fails() -> None:
    working = ChannelState(name="slack a", delivered=3, delivered_at=90.0)
    failing = ChannelState(name="webhook b", pending=2, failing_since=40.0, error="503")
    state = NotifierState(at=100.0, host="h", base_url=BASE, channels=(working, failing), missed=7)
    rows = channel_rows(state, now=100.0)
    assert [row.id for row in rows] == ["slack a", "webhook b", "missed"]
    assert rows[0].cells[1]["text"] == "works"
    assert rows[1].cells[1]["text"] == "failing for 1 min 00 s"
    assert rows[1].cells[-1] == "503"
    assert channel_rows(state, now=500.0)[0].id == "silent"


def test_status_prints_the_channels(capsys: pytest.CaptureFixture[str]) -> None:
    failing = ChannelState(name="webhook b", pending=2, failing_since=40.0, error="503")
    state = NotifierState(at=100.0, host="h", base_url=BASE, channels=(failing,))
    print_notifier(None, 100.0)
    assert capsys.readouterr().out == ""
    print_notifier(state, 100.0)
    assert "failing for 60 s: 503" in capsys.readouterr().out
    print_notifier(state, 900.0)
    assert "is it running?" in capsys.readouterr().out
