"""Deciding is hard to misuse: whatever people do to the pages, the runtime's own answer counts, and
they are told of it. The controller is real; only its workers are simulated."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, FloatRect, Locator, Page, ViewportSize, expect

from runtime.config import PolicyConfig
from runtime.plan.policy_config import Approvals, Deciders
from storage import sign_in
from storage.identity import ROLES, WRITERS, refusal, writer_key
from storage.live.redis_store import RedisStore
from tests.support import services
from tests.support.control_cluster import sim_config
from tests.support.dashboard import Dashboard
from tests.support.live_cluster import LiveCluster
from tests.support.pages import (
    DEADLINE_MS,
    DESKTOP,
    PHONE,
    await_ticks,
    confirm,
    dialog,
    watch_console,
)

SECRET = "what-only-the-proxy-knows"
_numbers = itertools.count(1)
Starter = Callable[..., LiveCluster]


@pytest.fixture(scope="module")
def house(server: services.RedisServer) -> Iterator[Dashboard]:
    """A dashboard behind a proxy that says who is there and in which role."""
    with tempfile.TemporaryDirectory(prefix="counterpoise-app-") as home:
        running = Dashboard(
            Path(home),
            server.url,
            {
                "COUNTERPOISE_AUTH": "proxy",
                sign_in.PROXY_SECRET: SECRET,
                sign_in.ROLES_OF: "; ".join(f"{role}={role}" for role in ROLES),
            },
        )
        try:
            running.start()
            yield running
        finally:
            running.kill()


@pytest.fixture
def start(server: services.RedisServer, house: Dashboard) -> Iterator[Starter]:
    """Starts a run of three replicas that checks who signed what it is asked."""
    store, running = RedisStore.for_service(server.url), []
    keys = {writer: writer_key(house.home, writer) for writer in WRITERS}

    def begin(policy: PolicyConfig | None = None) -> LiveCluster:
        run = f"live-{next(_numbers)}"
        config = msgspec.structs.replace(sim_config(3, 3, 3, policy=policy), name=run)
        made = LiveCluster(config, store, run)
        made.act(
            lambda cluster: cluster.coordinator.desk.intake.require_identity(
                lambda command, now: refusal(command, run, keys, now)
            )
        )
        running.append(made)
        return made.start()

    yield begin
    for one in running:
        one.stop()
    store.close()


@contextmanager
def person(
    browser: Browser, house: Dashboard, run: LiveCluster, who: str, role: str = "approver"
) -> Iterator[Page]:
    """A browser of its own, in which `who` looks at the run's proposals."""
    headers = {
        sign_in.SECRET_HEADER: SECRET,
        "X-Forwarded-User": who,
        "X-Forwarded-Groups": role,
    }
    context = browser.new_context(
        viewport=DESKTOP, reduced_motion="reduce", extra_http_headers=headers
    )
    context.set_default_timeout(DEADLINE_MS)
    page = context.new_page()
    errors = watch_console(page)
    look(page, house, run)
    try:
        yield page
    finally:
        context.close()
    assert errors == []


def look(page: Page, house: Dashboard, run: LiveCluster, more: str = "") -> None:
    page.goto(f"{house.url}/reconfigure?run={run.run}{more}")
    expect(page.locator(".strip .name")).to_have_text(run.name)
    # Streamlit may lose a click that comes while a page is still being drawn for the first time.
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")


def lose_a_gpu(run: LiveCluster) -> None:
    run.act(lambda cluster: cluster.kill("rack-0/1"))
    run.proposal(lambda one: one.state == "open")


def open_dialog(page: Page, label: str) -> None:
    page.get_by_role("button", name=label).first.click()
    expect(dialog(page).get_by_role("button", name="Cancel")).to_be_focused()


def click(page: Page, label: str) -> None:
    dialog(page).get_by_role("button", name=label, exact=True).click()


def close(page: Page) -> None:
    """The dialog has a cross of that name, too."""
    dialog(page).get_by_text("Close", exact=True).click()
    expect(dialog(page)).to_have_count(0)


def pick(where: Page | Locator, page: Page, label: str, option: str) -> None:
    box = where.get_by_role("combobox", name=label)
    box.click()
    box.press("ArrowDown")
    page.get_by_role("option", name=re.compile(f"^{option}")).click()


# many hands --------------------------------------------------------------------------------------


def test_of_two_who_decide_at_once_one_wins_and_the_other_is_told(
    browser: Browser, house: Dashboard, start: Starter
) -> None:
    run = start()
    lose_a_gpu(run)
    with person(browser, house, run, "ana") as ana, person(browser, house, run, "bob") as bob:
        open_dialog(ana, "Approve…")
        open_dialog(bob, "Reject…")
        dialog(bob).get_by_role("textbox").fill("not before the repair")
        click(ana, "Approve")
        click(bob, "Reject")
        services.wait_until(lambda: bool(run.decisions), DEADLINE_MS / 1000, "a decision")
        # Whoever clicks first, either may come first.
        ((who, verdict),) = run.decisions
        winner, loser, button = {"ana": (ana, bob, "Reject"), "bob": (bob, ana, "Approve")}[who]
        expect(dialog(loser)).to_contain_text("Refused, somebody has decided already.")
        expect(dialog(loser)).to_contain_text(f"decided by {who}")
        expect(dialog(loser).get_by_role("button", name=button)).to_be_disabled()
        expect(dialog(winner)).to_have_count(0)
        close(loser)
        words = "applied, verified by the runtime" if verdict == "approved" else "rejected"
        expect(loser.locator(".chip", has_text=words)).to_be_visible()
        expect(loser.locator("dd", has_text=who).first).to_be_visible()
    assert run.decisions == [(who, verdict)]


def test_where_two_must_approve_the_card_says_who_has(
    browser: Browser, house: Dashboard, start: Starter
) -> None:
    run = start(PolicyConfig(approvals=Approvals(shrink=2)))
    lose_a_gpu(run)
    with person(browser, house, run, "ana") as ana, person(browser, house, run, "bob") as bob:
        expect(ana.get_by_text("needs 2 approvals by different people")).to_be_visible()
        open_dialog(ana, "Approve…")
        expect(dialog(ana)).to_contain_text("1 more person must approve the same after you.")
        confirm(ana, "Approve")
        for page in (ana, bob):
            expect(page.get_by_text("1 of 2", exact=True)).to_be_visible()
            expect(page.get_by_text(re.compile("^ana: Shrink"))).to_be_visible()
        expect(ana.get_by_role("button", name="Approve…")).to_be_disabled()
        expect(
            ana.get_by_text("Ana has approved it already; another person must.").first
        ).to_be_visible()
        open_dialog(bob, "Approve…")
        confirm(bob, "Approve")
        for page in (ana, bob):
            expect(
                page.locator(".chip", has_text="applied, verified by the runtime")
            ).to_be_visible()
    assert run.decisions == [("ana", "approved_in_part"), ("bob", "approved")]


def test_two_tabs_of_one_person_decide_once(
    browser: Browser, house: Dashboard, start: Starter
) -> None:
    run = start()
    lose_a_gpu(run)
    with person(browser, house, run, "ana") as first:
        second = first.context.new_page()
        look(second, house, run)
        open_dialog(first, "Approve…")
        open_dialog(second, "Approve…")
        click(first, "Approve")
        click(second, "Approve")
        tabs = (first, second)
        services.wait_until(
            lambda: sum(dialog(tab).count() for tab in tabs) == 1, DEADLINE_MS / 1000, "one left"
        )
        (later,) = [tab for tab in tabs if dialog(tab).count()]
        expect(dialog(later)).to_contain_text("decided by ana")
    assert run.decisions == [("ana", "approved")]


def test_double_click_and_the_back_button_decide_once(
    browser: Browser, house: Dashboard, start: Starter
) -> None:
    run = start()
    lose_a_gpu(run)
    with person(browser, house, run, "ana") as page:
        # Away and back in the middle of it: nothing was sent, and the dialog does not come back.
        open_dialog(page, "Approve…")
        page.goto(f"{house.url}/incidents?run={run.run}")
        expect(page.locator(".strip .name")).to_have_text(run.name)
        page.go_back()
        expect(page.get_by_role("button", name="Approve…")).to_be_enabled()
        expect(dialog(page)).to_have_count(0)
        assert run.decisions == []
        open_dialog(page, "Approve…")
        confirm(page, "Approve", clicks=2)
        expect(page.locator(".chip", has_text="applied, verified by the runtime")).to_be_visible()
        page.go_forward()
        page.go_back()
        page.reload()
        expect(page.locator(".strip .name")).to_have_text(run.name)
        await_ticks(page, 2)
        expect(dialog(page)).to_have_count(0)
    assert run.decisions == [("ana", "approved")]


# too late ----------------------------------------------------------------------------------------


def test_stale_says_what_changed_since(browser: Browser, house: Dashboard, start: Starter) -> None:
    run = start()
    lose_a_gpu(run)
    with person(browser, house, run, "ana") as page:
        open_dialog(page, "Approve…")
        run.act(lambda cluster: cluster.kill("rack-1/1"))
        run.proposal(lambda one: one.replica == 1 and one.state == "open")
        click(page, "Approve")
        expect(dialog(page)).to_contain_text("Refused, it is stale")
        expect(dialog(page)).to_contain_text("rack-1/1 failed")
        expect(dialog(page).get_by_role("button", name="Approve")).to_be_disabled()
    assert run.decisions == []


def test_expired_says_so_and_a_fresh_one_waits(
    browser: Browser, house: Dashboard, start: Starter
) -> None:
    run = start(PolicyConfig(expires_s=8.0))
    lose_a_gpu(run)
    with person(browser, house, run, "ana") as page:
        open_dialog(page, "Approve…")
        run.proposal(lambda one: one.id == "p1" and one.state == "expired", "an expiry")
        click(page, "Approve")
        expect(dialog(page)).to_contain_text("Refused, it has expired.")
        expect(dialog(page)).to_contain_text("nobody answered within 8 s")
        close(page)
        expect(page.get_by_role("button", name="Approve…")).to_have_count(1)
    assert run.decisions == []


def test_evidence_that_is_too_old_is_looked_at_again(
    browser: Browser, house: Dashboard, start: Starter
) -> None:
    run = start(PolicyConfig(evidence_max_age_s=25.0))
    lose_a_gpu(run)
    with person(browser, house, run, "ana") as page:
        expect(page.get_by_text(re.compile("^too old to approve on in"))).to_be_visible()
        expect(page.get_by_text(re.compile("^too old by"))).to_be_visible(timeout=60_000)
        open_dialog(page, "Approve…")
        click(page, "Approve")
        # The store took it; the runtime did not.
        expect(dialog(page)).to_contain_text("the evidence is too old: the newest was seen")
        expect(dialog(page)).to_contain_text("The runtime has looked again: p2 proposes")
        close(page)
        open_dialog(page, "Approve…")
        confirm(page, "Approve")
    assert run.decisions == [("ana", "approved")]


# rights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "why", "may_ask"),
    [
        ("viewer", "This takes the role approver or higher; yours is viewer.", False),
        ("operator", "This takes the role approver or higher; yours is operator.", True),
        ("approver", "The policy asks for the role admin here; yours is approver.", True),
    ],
)
def test_a_button_that_is_off_says_why(
    browser: Browser, house: Dashboard, start: Starter, role: str, why: str, may_ask: bool
) -> None:
    run = start(PolicyConfig(deciders=Deciders(shrink="admin")))
    lose_a_gpu(run)
    with person(browser, house, run, "vic", role) as page:
        for name in ("Approve…", "Reject…", "Change…"):
            expect(page.get_by_role("button", name=name)).to_be_disabled()
        expect(page.get_by_text(why, exact=True).first).to_be_visible()
        ask = page.get_by_role("button", name="Ask", exact=True)
        expect(ask).to_be_enabled() if may_ask else expect(ask).to_be_disabled()


def test_to_give_a_replica_up_takes_a_reason_and_its_name(
    browser: Browser, house: Dashboard, start: Starter
) -> None:
    run = start()
    lose_a_gpu(run)
    with person(browser, house, run, "ana") as page:
        open_dialog(page, "Approve…")
        dialog(page).get_by_text(re.compile("^Drop replica 0")).click()
        name = dialog(page).get_by_label("Type replica 0 to confirm")
        expect(name).to_be_visible()
        click(page, "Approve")
        expect(dialog(page)).to_contain_text("Type replica 0 first")
        name.fill("replica 0")
        click(page, "Approve")
        expect(dialog(page)).to_contain_text("A reason is required: say why not the recommended")
        dialog(page).get_by_label(re.compile("^Reason")).fill("its rack is to be moved today")
        confirm(page, "Approve")
        expect(page.locator(".chip", has_text="applied").first).to_be_visible()
    done = run.proposal(lambda one: one.state == "applied")
    assert done.options[done.chosen or 0].kind == "drop"
    assert done.approvals[0].reason == "its rack is to be moved today"


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_confirm_is_elsewhere_than_the_button_that_opens(
    browser: Browser, house: Dashboard, start: Starter, size: ViewportSize
) -> None:
    run = start()
    lose_a_gpu(run)
    with person(browser, house, run, "ana") as page:
        page.set_viewport_size(size)
        for label, word in (("Approve…", "Approve"), ("Reject…", "Reject")):
            button = page.get_by_role("button", name=label)
            button.scroll_into_view_if_needed()
            opens = button.bounding_box()
            open_dialog(page, label)
            confirms = dialog(page).get_by_role("button", name=word, exact=True).bounding_box()
            assert opens is not None
            assert confirms is not None
            assert not overlap(opens, confirms), (opens, confirms)
            click(page, "Cancel")
            expect(dialog(page)).to_have_count(0)


def overlap(one: FloatRect, other: FloatRect) -> bool:
    return (
        one["x"] < other["x"] + other["width"]
        and other["x"] < one["x"] + one["width"]
        and one["y"] < other["y"] + other["height"]
        and other["y"] < one["y"] + one["height"]
    )


# by hand and back --------------------------------------------------------------------------------


def test_by_hand_and_taken_back(browser: Browser, house: Dashboard, start: Starter) -> None:
    run = start()
    with person(browser, house, run, "ana") as page:
        pick(page, page, "Action", "drop")
        page.get_by_label("Reason (optional)").fill("to try it")
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.get_by_text("asked for by ana: to try it")).to_be_visible()
        expect(
            page.get_by_role("table", name="Options and their predicted effect")
        ).to_contain_text("Drop replica 0")
        open_dialog(page, "Approve…")
        dialog(page).get_by_label("Type replica 0 to confirm").fill("replica 0")
        confirm(page, "Approve")
        expect(page.locator(".chip", has_text="applied, verified by the runtime")).to_be_visible()
        open_dialog(page, "Undo…")
        dialog(page).get_by_label(re.compile("^Reason")).fill("it was only a try")
        confirm(page, "Ask")
        expect(page.get_by_text("to take back p1, asked for by ana: it was only a")).to_be_visible()
        open_dialog(page, "Approve…")
        confirm(page, "Approve")
        run.proposal(lambda one: one.undoes == "p1" and one.state == "applied")
    shapes: list[object] = []
    run.act(lambda cluster: shapes.append(cluster.shape()))
    assert shapes == [[(0, 1, 2), (0, 1, 2), (0, 1, 2)]]


def test_the_policy_is_changed_on_the_page_and_seen_by_all(
    browser: Browser, house: Dashboard, start: Starter
) -> None:
    run = start()
    lose_a_gpu(run)
    with (
        person(browser, house, run, "root", "admin") as admin,
        person(browser, house, run, "ana") as ana,
    ):
        expect(ana.locator(".pair.policy")).to_contain_text("act with approval")
        open_dialog(admin, "Change…")
        click(admin, "Change")
        expect(dialog(admin)).to_contain_text("Nothing is changed yet.")
        pick(dialog(admin), admin, "Mode", "recommend")
        dialog(admin).get_by_label("Quiet hours, one a line").fill("[not toml")
        dialog(admin).get_by_label(re.compile("^Reason")).fill("maintenance until noon")
        click(admin, "Change")
        expect(dialog(admin)).to_contain_text("is '[[not toml]', which is no TOML")
        close(admin)
        open_dialog(admin, "Change…")
        pick(dialog(admin), admin, "Mode", "recommend")
        dialog(admin).get_by_label(re.compile("^Reason")).fill("maintenance until noon")
        confirm(admin, "Change")
        for page in (admin, ana):
            expect(page.locator(".pair.policy")).to_contain_text("recommend")
            row = page.get_by_role("table", name="Changes of the policy").locator("tbody tr")
            expect(row).to_contain_text("root")
            expect(row).to_contain_text("mode act_with_approval to recommend")
            expect(row).to_contain_text("maintenance until noon")
        expect(ana.get_by_role("button", name="Approve…")).to_be_disabled()
        expect(
            ana.get_by_text("Nobody can approve it now: the policy's mode").first
        ).to_be_visible()
        expect(ana.get_by_role("button", name="Reject…")).to_be_enabled()
    assert run.decisions == []
