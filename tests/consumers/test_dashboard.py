"""The page in a real Chromium, and the interface that it rests on."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import TracesSettings
from replayground.consumers.dashboard.frame import NAVIGATION
from replayground.consumers.dashboard.web import LogSource, WebServer
from replayground.consumers.events_to_clickhouse import TraceWriter
from replayground.consumers.lag_watch import LagWatch
from replayground.consumers.operations_log import OperationsWriter
from replayground.schemas.errors import BadInput
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.topics import TOPICS
from replayground.streams.log.memory import MemoryLog
from tests.consumers.conftest import free_port
from tests.consumers.long_attempt import TRAJECTORY, TURNS
from tests.consumers.synthetic_run import FIELD_RUN, HOSTILE

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("dashboard"), free_port()
    command = [sys.executable, "-m", "tests.consumers.dashboard_program", str(folder), str(port)]
    program = subprocess.Popen(command, stdin=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        asked(f"{url}/api/runs", program)
        assert httpx.post(f"{url}/api/finish", json={}, timeout=120).status_code == 200  # everything is in the store
        yield url
    finally:
        program.communicate(timeout=30)
    assert program.returncode == 0


def asked(url: str, program: subprocess.Popen[bytes]) -> None:
    """Returns when the program answers."""
    while program.poll() is None:
        try:
            httpx.get(url, timeout=30).raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"the program ended with {program.returncode}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def page(browser: Browser, address: str) -> Iterator[Page]:
    """One tab for all tests. What goes wrong in it, such as a script that the policy forbids, fails the last test."""
    opened = browser.new_page(base_url=address)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    yield opened
    assert wrong == []


def figure(page: Page, name: str) -> Locator:
    """The value of a tile."""
    return page.locator(".tiles > div", has_text=name).locator("b")


VIEWS = [
    *("/", "/flow?run=run-1", "/curves?run=run-1", "/trajectories?run=run-1", f"/trajectory?run=run-1&id={TRAJECTORY}"),
    *(
        "/batches?run=run-1",
        "/batches?run=run-1&step=3",
        "/lineage?run=run-1",
        "/failures?run=run-1",
        "/machines?run=run-1",
    ),
    *(
        "/verdicts?run=run-1&annotator=eve",
        "/verdicts?run=run-0",
        "/alerts",
        "/alerts?name=new",
        "/replay",
        "/replay?run=replay-1",
    ),
    *(
        "/replay?source=run-1&scorer=exact_match&failed=yes",
        "/sql",
        "/trajectories?run=run-1&step=6",
        "/flow?run=replay-1",
    ),
    *("/sql?run=run-1", "/rejects", "/audit", f"/compare?run=run-1&left={TRAJECTORY}&right={TRAJECTORY}"),
]


@pytest.mark.parametrize("path", VIEWS)
def test_every_view_fits_a_phone_and_says_where_one_is(page: Page, path: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    answer = page.goto(path)
    assert answer is not None
    assert answer.status == 200
    expect(page.locator("nav a[aria-current]")).to_have_count(1)
    assert page.title().endswith(" · Replayground")
    assert page.title().startswith(page.locator("h1").inner_text())
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_NAMELESS) == [], "what can be used has a name for those who do not see it"


_NAMELESS = """() => [...document.querySelectorAll("a, button, summary, select, textarea, input:not([type=hidden], [hidden])")]
    .filter(part => ![part.getAttribute("aria-label"), part.textContent, part.placeholder, ...[...part.labels ?? []].map(
        label => label.textContent.replace(part.textContent, ""))].some(name => name?.trim()))
    .map(part => part.outerHTML)"""


def test_whatever_can_be_read_stands_out_by_light_and_dark(page: Page) -> None:
    """By WCAG's formula at least 4.5 to 1, in every view; bars and rules are no text."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for path in VIEWS:
            page.goto(path)
            assert page.evaluate(_FAINT) == [], (path, scheme)
    page.emulate_media(color_scheme="light")


_FAINT = """() => {
    const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = colour => {
        paint.clearRect(0, 0, 1, 1);
        paint.fillStyle = colour;
        paint.fillRect(0, 0, 1, 1);
        return [...paint.getImageData(0, 0, 1, 1).data];
    };
    const behind = part => {
        const layers = [];
        for (let one = part; one; one = one.parentElement) layers.unshift(rgba(getComputedStyle(one).backgroundColor));
        return layers.reduce((below, layer) => below.map((value, place) =>
            value + (layer[place] - value) * layer[3] / 255), [255, 255, 255]);
    };
    const light = colour => colour.slice(0, 3).map(value => value / 255).map(value =>
        value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
    return [...document.querySelectorAll("body *")]
        .filter(part => [...part.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()))
        .filter(part => part.checkVisibility() && !part.closest("svg, :disabled, option, .skip"))
        .map(part => {
            const [one, other] = [light(rgba(getComputedStyle(part).color)), light(behind(part))].sort((a, b) => b - a);
            return [part.outerHTML.slice(0, 100), (one + 0.05) / (other + 0.05)];
        })
        .filter(([, contrast]) => contrast < 4.5);
}"""


def test_keys_and_the_way_out_are_told(page: Page) -> None:
    page.goto("/audit")
    page.keyboard.press("?")
    expect(page.locator("footer dl")).to_be_visible()
    expect(page.locator("footer")).to_contain_text("Times are UTC")
    answer = page.goto("/no-such-view")
    assert answer is not None
    assert answer.status == 404
    expect(page.locator("#problem")).to_have_text("There is no view at /no-such-view")


def test_a_plot_shows_the_newest_figures_until_one_points_at_it(page: Page) -> None:
    page.goto("/curves?run=run-1")
    plot = page.locator(".plot", has_text="Gradient norm")
    expect(plot.locator("output")).to_have_text("newest 0.5")
    plot.locator("a").nth(4).hover()
    expect(plot.locator("output")).to_have_text("weight version 6: norm 0.6")
    page.locator("h1").hover()
    expect(plot.locator("output")).to_have_text("newest 0.5")


def test_partitions_are_told_as_numbers_too(page: Page) -> None:
    page.goto("/flow?run=run-1")
    page.get_by_text("By partition").click()
    rows = page.locator("#partitions tr", has_text="trajectories")
    counts = [int(text) for text in rows.locator("td:nth-child(4)").all_inner_texts()]
    assert len(counts) == 4
    station = page.locator(".station", has_text="trajectories").locator("b")
    expect(station).to_have_text(f"{sum(counts)}")


def test_outcomes_are_counted_and_are_filters(page: Page) -> None:
    page.goto("/trajectories?run=run-1")
    counts = [int(text) for text in page.locator("#outcomes td:nth-child(2)").all_inner_texts()]
    expect(page.locator("#note")).to_have_text(f"{sum(counts)} judged attempts")
    page.locator("#outcomes tr", has_text="failed").locator("a").click()
    expect(page.locator("#note")).to_have_text(f"{counts[1]} judged attempts")
    expect(page.locator("#list .dot.passed")).to_have_count(0)
    page.goto("/trajectories?run=run-1")
    page.locator("#rewards a", has_text="1:").first.click()
    expect(page.locator("#note")).to_have_text(re.compile(rf"^{counts[0]} of {sum(counts)} judged attempts by reward"))


def test_runs_are_side_by_side_and_chosen_by_their_boxes(page: Page) -> None:
    page.goto("/")
    expect(page.locator("#runs tr")).to_have_count(3)
    expect(page.locator("#pass-plot .legend span")).to_have_text(["run-1", "run-0"])
    page.get_by_label("show run-1 in the plots").uncheck()
    expect(page).to_have_url(re.compile(r"\?compare=run-0$"))
    expect(page.locator("#metric-plot polyline")).to_have_count(1)
    page.goto("/?find=stopped")
    expect(page.locator("#runs tr")).to_contain_text(["run-0"])


def test_the_run_is_chosen_in_the_frame_and_the_view_stays(page: Page) -> None:
    page.goto("/curves?run=run-1")
    page.locator("#run").select_option("run-0")
    expect(page).to_have_url(re.compile(r"/curves\?run=run-0$"))
    expect(page).to_have_title("Curves · run-0 · Replayground")
    expect(figure(page, "steps")).to_have_text("5 / 5")


def test_the_address_of_older_releases_leads_to_the_flow(page: Page) -> None:
    page.goto("/?run=run-0")
    expect(page).to_have_title("Flow · run-0 · Replayground")


def test_the_flow_is_that_of_the_map_and_a_past_run_has_no_lags(page: Page) -> None:
    page.goto("/flow?run=run-1")
    expect(page.locator(".station")).to_have_count(len(TOPICS))
    expect(page.locator(".station", has_text="messages").get_by_text("→ assemble", exact=True)).to_be_visible()
    expect(page.get_by_text("no lags: the run is over")).to_be_visible()
    expect(figure(page, "phase")).to_have_text("finished")
    expect(page.locator("#servers")).to_contain_text("newest")


def test_an_unknown_run_is_told_with_the_nearest_ones_on_the_page(page: Page) -> None:
    answer = page.goto("/flow?run=run-7")
    assert answer is not None
    assert answer.status == 404
    expect(page.get_by_text("There is no run run-7 here; the nearest are")).to_be_visible()


def test_a_click_on_a_step_opens_its_rollouts(page: Page) -> None:
    page.goto("/curves?run=run-1")
    expect(figure(page, "held-out pass@1")).to_contain_text("–")
    plot = page.locator(".plot", has_text="Reward of each batch")
    plot.locator("a").nth(4).hover()
    expect(plot.locator("output")).to_contain_text("weight version 6: reward")
    plot.locator("a").nth(4).click()
    expect(page).to_have_url(re.compile(r"/trajectories\?run=run-1&step=6$"))
    # Four members; an attempt that an infra error ended is listed beside the one that replaced it.
    expect(page.locator("#note")).to_contain_text("the rollouts from which version 6 was made")
    assert page.locator("#list tbody tr").count() >= 4


def test_bars_of_rewards_and_words_are_filters(page: Page) -> None:
    page.goto("/trajectories?run=run-1&purpose=eval")
    before = page.locator("#note").inner_text()
    page.locator("#rewards a", has_text="0:").first.click()
    expect(page.locator("#rewards .bar.chosen")).to_have_count(1)
    expect(page.locator("#list .dot.failed").first).to_be_visible()
    expect(page.locator("#list .dot.passed")).to_have_count(0)
    page.locator("#rewards a").first.click()
    expect(page.locator("#note")).to_have_text(before)
    page.get_by_label("search").fill("owned")
    page.keyboard.press("Enter")
    expect(page.locator("#note")).not_to_have_text(before)
    expect(page.locator("#list tbody tr").first).to_contain_text("<script>")
    page.get_by_label("search").fill("nobody-said-this")
    page.keyboard.press("Enter")
    expect(page.get_by_text("No trajectory that has been judged passes these filters")).to_be_visible()


def test_pages_are_turned_by_keys(page: Page) -> None:
    page.goto("/trajectories?run=run-1")
    page.keyboard.press("n")
    expect(page).to_have_url(re.compile("page=1"))
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("Trajectory ")
    expect(page.locator("#rewards")).to_contain_text("exact_match")


def test_a_long_attempt_is_read_page_by_page_and_its_words_are_text(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(f"/trajectory?run=run-1&id={TRAJECTORY}")
    articles = page.locator("#timeline article")
    expect(articles).to_have_count(60)
    expect(articles.nth(2)).to_contain_text("<script>document.title='owned'")
    # What would reorder or hide the text around it is shown instead of done.
    expect(articles.nth(1)).to_contain_text("safe⟨U+202E⟩txt.exe␛[31m⟨U+200B⟩")
    expect(articles.nth(1)).to_contain_text("4,000 of 74,0")
    expect(page).to_have_title("Trajectory 10000000 · run-1 · Replayground")
    page.get_by_role("link", name="last").click()
    expect(page.locator("#timeline")).to_contain_text("the attempt ends: answered")
    expect(page.locator("#timeline")).to_contain_text(f"turn number {TURNS + 1} ")
    page.locator("#timeline article a").first.click()
    expect(page.locator("h1")).to_contain_text("TurnGenerated messages/")
    expect(page.locator("pre")).to_contain_text('"finish_reason": "stop"')


def test_screenshots_are_shown_and_other_blobs_are_not(page: Page) -> None:
    page.goto(f"/trajectory?run=run-1&id={TRAJECTORY}")
    shots = page.locator("img.shot")
    expect(shots).to_have_count(2)
    shots.first.scroll_into_view_if_needed()
    expect(shots.first).to_have_js_property("naturalWidth", 1)
    statuses = [page.request.get(str(shots.nth(place).get_attribute("src"))).status for place in range(2)]
    assert statuses == [200, 415]
    assert page.request.get("/blob", params={"uri": "file:///etc/passwd"}).status == 404


def test_from_a_trajectory_to_its_group_tokens_and_the_weights_it_taught(page: Page) -> None:
    page.goto("/trajectories?run=run-1&step=6")
    page.locator("#list a[data-row]").first.click()
    page.get_by_role("link", name="its tokens").click()
    expect(page.locator(".tokens span").first).to_have_attribute("title", re.compile("token 0, id 0"))
    page.locator("select[name=colour]").select_option("version")
    expect(page.locator(".tokens .v").first).to_be_visible()
    page.go_back()
    page.go_back()
    page.get_by_role("link", name="its group").click()
    expect(page.locator(".member")).to_have_count(2)
    told = page.locator(".member").evaluate_all("members => members.map(member => member.innerText)")
    assert sorted(("reward 1" in text, "advantage 0.5" in text, "advantage -0.5" in text) for text in told) == [
        (False, False, True),
        (True, True, False),
    ]
    page.goto("/lineage?run=run-1&version=6")
    page.locator("a.node", has_text="its rollouts").first.click()
    expect(page).to_have_title("Lineage of v7 · run-1 · Replayground")
    expect(page.locator(".node", has_text="batch 5")).to_contain_text("4 members in 2 groups")


def test_two_trajectories_are_aligned(page: Page) -> None:
    page.goto("/trajectories?run=run-1&step=6")
    page.locator("#list a[data-row]").first.click()
    page.get_by_role("link", name="beside another").click()
    page.locator("main a[data-row]").first.click()
    expect(page.locator(".compared .say.tool")).to_have_count(2)


def test_failures_lead_to_the_attempts_behind_them(page: Page) -> None:
    page.goto("/failures?run=run-1")
    page.locator("#endings a", has_text="infra_error").click()
    expect(page).to_have_url(re.compile("ended=infra_error"))
    expect(page.locator("#list .dot.excluded").first).to_be_visible()


def test_rejects_are_told_with_the_command_that_writes_them_again(page: Page) -> None:
    page.goto("/rejects")
    expect(page.locator("#list article")).to_have_count(2)
    page.get_by_text("the message, 7 bytes").first.click()
    expect(page.get_by_text("b'\\x00broken'").first).to_be_visible()
    expect(page.get_by_text("replayground dead-letters redrive 2 1")).to_be_visible()
    page.get_by_role("button", name="The 2 of this page").click()
    expect(page.locator("#requests article").first).to_contain_text("2 messages")
    expect(page.locator("#requests article").first).to_contain_text("waiting")


def test_the_audit_names_people(page: Page) -> None:
    page.goto("/audit?kind=RunStarted")
    expect(page.locator("#list td b")).to_have_text(["ann@here"] * 3)


def test_sql_is_answered_completed_saved_and_drawn(page: Page) -> None:
    page.goto("/sql?run=run-1")
    box = page.locator("#sql")
    box.fill("SELECT uniqExact(run_id) AS runs FROM eve")
    box.press("End")
    box.press_sequentially("n")
    expect(page.locator("#completions li").first).to_have_text("events")
    box.press("Tab")
    expect(box).to_have_value("SELECT uniqExact(run_id) AS runs FROM events")
    box.press("Control+Enter")
    expect(page.get_by_role("cell", name="1", exact=True)).to_be_visible(timeout=20_000)
    page.get_by_label("run run-1 alone").uncheck()
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("cell", name="4", exact=True)).to_be_visible(timeout=20_000)
    page.get_by_label("name").fill("my-runs")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#saved")).to_contain_text("my-runs", timeout=20_000)
    page.goto("/sql")
    page.get_by_role("button", name="my-runs").click()
    expect(page.locator("#sql")).to_have_value("SELECT uniqExact(run_id) AS runs FROM events")
    page.get_by_role("button", name="How attempts ended").click()
    page.locator("select[name=chart]").select_option("bar")
    expect(page.locator(".bar").first).to_be_visible(timeout=20_000)
    page.goto("/sql?sql=SELECT+file('/etc/passwd')")
    expect(page.locator("p.problem")).to_contain_text("file", timeout=20_000)


def test_a_statement_in_a_link_of_another_site_is_not_run(page: Page) -> None:
    headers = {"Sec-Fetch-Site": "cross-site"}
    answer = page.request.get("/sql", params={"sql": "SELECT 1"}, headers=headers)
    assert "the statement was not run" in answer.text()


def waiting(page: Page) -> tuple[int, int]:
    """Where one is in the queue, and how long it is."""
    found = re.search(r"(\d+) of (\d+)", page.locator(".head .soft").first.inner_text())
    assert found is not None
    return int(found[1]), int(found[2])


def test_attempts_are_judged_by_keyboard_alone(page: Page) -> None:
    page.goto("/verdicts?run=run-1")
    expect(page.get_by_text("Say who judges")).to_be_visible()
    page.get_by_label("who judges").fill("eve")
    page.keyboard.press("Enter")
    expect(page.locator("h2").first).to_have_text(re.compile("^Would this help\\? <script>"))
    expect(page.locator("#score")).to_be_focused()
    first, many = page.url, waiting(page)[1]
    page.keyboard.type("9")
    page.keyboard.press("Enter")
    expect(page.locator("output").first).to_have_text("9 is not on the scale of people: 0 to 4")
    page.locator("#score").fill("")
    page.keyboard.type("3")
    for _ in range(6):  # past the buttons of the scale
        page.keyboard.press("Tab")
    expect(page.get_by_label("comment")).to_be_focused()
    page.keyboard.type(f"good {HOSTILE}")
    page.keyboard.press("Enter")
    expect(page).not_to_have_url(first)
    expect(page.locator("#score")).to_be_focused()
    assert waiting(page)[1] == many - 1, "it does not come again"
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    expect(page.get_by_text(f"2 of {many - 1}")).to_be_visible()
    page.get_by_role("button", name="4", exact=True).click()
    page.get_by_role("button", name="Give").click()
    expect(page.locator("#agreement")).to_contain_text("eve")
    expect(page.locator("#agreement tr", has_text="eve")).to_contain_text("2", timeout=20_000)
    page.goto("/audit?kind=VerdictGiven")
    expect(page.locator("#list tbody tr", has_text="eve").first).to_contain_text("gave 4.0 for people")


def test_a_queue_is_a_saved_query_and_agreement_is_over_what_is_shared(page: Page, address: str) -> None:
    """Three attempts that ann has judged, in an order of their own; fay agrees with her on all but one."""
    wanted = (
        "SELECT trajectory_id FROM verdicts WHERE annotator = 'ann' AND run_id = 'run-1' ORDER BY trajectory_id LIMIT 3"
    )
    page.goto(f"/sql?use=queue&sql={wanted}")
    page.get_by_label("name").fill("of-ann")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#saved")).to_contain_text("of-ann", timeout=20_000)
    page.goto("/verdicts?run=run-1&annotator=fay&queue=of-ann")
    assert waiting(page) == (1, 3)
    rows = httpx.post(f"{address}/api/sql", json={"sql": wanted}, timeout=60).json()["rows"]
    for score, (trajectory,) in zip((1, 1, 3), rows, strict=True):
        assert trajectory == page.locator("input[name=trajectory]").input_value()
        expect(page.locator("#score")).to_be_focused()
        page.keyboard.type(str(score))
        page.keyboard.press("Enter")
        page.wait_for_function(
            "shown => document.querySelector('input[name=trajectory]')?.value !== shown", arg=trajectory
        )
    expect(page.get_by_text("Nothing waits for you in this queue")).to_be_visible()
    # Units (1, 1), (1, 1), (1, 3): observed 2 of 6 pairs differ, expected 10 of 30; alpha = 1 - 1 = 0.
    expect(page.locator("#agreement")).to_contain_text("nominal 0, ", timeout=20_000)
    expect(page.locator("#agreement")).to_contain_text("over 3 attempts")


def test_an_alert_is_set_raised_shown_everywhere_and_removed(page: Page) -> None:
    page.goto("/alerts")
    page.locator("#main a", has_text="infra-errors").click()
    expect(page.locator("textarea")).to_have_value(re.compile("infra_error"))
    page.goto("/sql?sql=SELECT+count()+FROM+runs")
    page.get_by_role("link", name="watch its number").click()
    page.get_by_label("name").fill("many-runs")
    page.locator("[name=threshold]").fill("2")
    page.locator("[name=every_seconds]").fill("1")
    page.get_by_role("button", name="Set").click()
    expect(page.locator("form output")).to_have_text("an alert asks every 5 s at most")
    page.locator("[name=every_seconds]").fill("5")
    page.locator("textarea").fill("SELECT nothing")
    page.get_by_role("button", name="Set").click()
    expect(page.locator("form output")).to_contain_text("nothing", timeout=20_000)
    page.locator("textarea").fill("SELECT count() FROM runs")
    page.get_by_role("button", name="Set").click()
    expect(page.locator("#list tr", has_text="many-runs")).to_contain_text("raised", timeout=30_000)
    expect(page.locator("#history")).to_contain_text("above 2")
    page.goto("/flow?run=run-1")
    page.locator("#raised a", has_text="many-runs").click()
    page.locator("#list a", has_text="many-runs").click()
    expect(page).to_have_title("Alert many-runs · Replayground")
    page.get_by_role("button", name="Remove").click()
    expect(page.locator("#list tr", has_text="many-runs")).to_have_count(0)
    expect(page.locator("#history tr", has_text="cleared").first).to_contain_text("removed", timeout=30_000)
    expect(page.locator("#raised a")).to_have_count(0, timeout=30_000)


def test_a_replay_is_chosen_asked_for_and_its_differences_are_shown(page: Page) -> None:
    page.goto("/replay")
    expect(page.get_by_text("Choose a run above.")).to_be_visible()
    page.get_by_label("run-1 ·").check()
    page.get_by_label("exact_match").check()
    page.get_by_role("button", name="Show").click()
    expect(page.locator("pre")).to_contain_text("replayground rescore --run run-1 --scorer exact_match --dry-run")
    expect(page.get_by_label("people")).to_have_count(0)
    page.get_by_role("button", name="Dry run").click()
    asked = page.locator("#requests article").first
    expect(asked).to_contain_text("dry run of run-1 by exact_match")
    expect(asked).to_contain_text("waiting")
    expect(page.locator("#requests")).to_contain_text("it broke <script>")
    page.locator("#replays a").click()
    expect(page).to_have_title("Replay replay-1 · replay-1 · Replayground")
    expect(page.locator("#progress")).to_contain_text("162 / 162")
    expect(page.locator("#differences")).to_contain_text("29 now pass, 0 now fail")
    page.locator("#changes a").first.click()
    expect(page.locator("#rewards")).to_contain_text("kinder")
    expect(page.locator("#rewards")).to_contain_text("exact_match")


@pytest.mark.parametrize(
    ("path", "sent", "told"),
    [
        ("queries", {"name": "../../etc", "sql": "SELECT 1"}, "no name for a query"),
        ("queries", {"name": "q", "sql": "DROP TABLE events"}, "SELECT"),
        ("queries", {"name": "q", "sql": "SELECT 1 AS one", "use": "queue"}, "need a column trajectory_id"),
        ("queries", {"name": "q", "use": "removed"}, "there is no saved query q"),
        ("queries", {"name": "q", "sql": "SELECT 1", "webhook": "http://evil.example"}, "cannot be read"),
        ("queries", {"name": "q", "sql": "x" * 300_000}, "bytes were sent"),
        (
            "verdicts",
            {"run": "run-9", "trajectory": "t", "attempt": "a", "scorer": "people", "score": 1},
            "no run run-9",
        ),
        (
            "verdicts",
            {"run": "run-0", "trajectory": "t", "attempt": "a", "scorer": "people", "score": 1},
            "asks people",
        ),
        (
            "verdicts",
            {"run": "run-1", "trajectory": "t", "attempt": "a", "scorer": "people", "score": 1},
            "no attempt a",
        ),
        ("replays", {"sources": []}, "choose the runs"),
        ("replays", {"sources": ["replay-1"]}, "no trajectories of its own"),
        ("replays", {"sources": ["run-1"], "scorers": ["/tmp/evil.py:x"]}, "given by command"),
        ("redrives", {"rejects": ["none"]}, "no rejected message"),
    ],
)
def test_what_is_sent_wrongly_is_refused_in_one_sentence(address: str, path: str, sent: object, told: str) -> None:
    answer = httpx.post(f"{address}/api/{path}", json=sent, timeout=60)
    assert answer.status_code in (400, 404, 413)
    assert told in answer.json()["error"]


def test_light_and_dark_are_kept(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.goto("/")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    page.goto("/audit")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.locator("#theme").click()


def test_what_is_not_there_is_said_in_one_sentence(address: str) -> None:
    for path, status in (
        ("/trajectory?run=run-1", 400),
        ("/trajectory?run=run-1&id=none", 404),
        ("/trajectories?run=run-1&version=-1", 400),
        ("/trajectories?run=run-1&outcome=great", 400),
        ("/group?run=run-1&id=none", 404),
        ("/batches?run=run-1&step=99", 404),
        ("/lineage?run=run-1&version=99", 404),
        ("/event?run=run-1&type=StepTaken&topic=steps&partition=0&offset=999", 404),
        ("/assets/none.js", 404),
    ):
        answer = httpx.get(f"{address}{path}", timeout=30)
        assert answer.status_code == status, path
        assert "Traceback" not in answer.text


def test_the_interface_answers(address: str) -> None:
    view = httpx.get(f"{address}/api/overview").json()
    assert view["finished"] is True
    assert view["steps"] == 12
    question = {"sql": "SELECT count() AS n FROM steps"}
    answer = httpx.post(f"{address}/api/sql", json=question, timeout=60).json()
    assert (answer["columns"], answer["rows"]) == (["n"], [[14 + 7]]), "SQL is asked of all runs"
    for run_id, steps in (("run-0", 7), ("run-1", 14)):
        answer = httpx.post(f"{address}/api/sql", json=question, params={"run": run_id}, timeout=60).json()
        assert answer["rows"] == [[steps]]
    lines = httpx.get(f"{address}/api/transcripts", params={"outcome": "failed", "rows": 3}).json()
    assert len(lines) == 3
    assert all(line["reward"] == 0 and line["passed"] is False for line in lines)
    told = httpx.get(f"{address}/api/transcripts/{lines[0]['trajectory_id']}").json()
    assert [utterance["role"] for utterance in told["utterances"]] == ["user", "assistant", "tool", "assistant"]
    done = httpx.post(f"{address}/api/finish", json={}, timeout=60).json()
    assert done["summary"]["trace_rows"] == done["summary"]["log_events"]
    assert done["report"].startswith("<!doctype html>")


def test_the_runs_are_listed_newest_first(address: str) -> None:
    newest, older, replay = httpx.get(f"{address}/api/runs").json()
    assert (replay["run_id"], replay["kind"], replay["state"]) == ("replay-1", "replay", "finished")
    assert (newest["run_id"], newest["state"], newest["steps"], newest["steps_target"]) == ("run-1", "finished", 12, 12)
    assert (older["run_id"], older["state"], older["steps"], older["version"]) == ("run-0", "stopped", 5, 6)
    assert (older["job"], older["kind"], older["seed"]) == ("replayground.producers.stockroom", "practise", 3)
    assert older["started_by"] == "bob@there"
    assert 0 <= older["pass_at_1"] <= 1
    assert older["started_at"] < older["ended_at"]


def test_everything_can_be_asked_of_an_older_run(address: str) -> None:
    older = {"run": "run-0"}
    view = httpx.get(f"{address}/api/overview", params=older).json()
    assert (view["run_id"], view["state"], view["steps"], view["steps_target"]) == ("run-0", "stopped", 5, 5)
    done = httpx.post(f"{address}/api/finish", params=older, json={}, timeout=60).json()
    assert done["summary"]["run_id"] == "run-0"
    assert done["summary"]["trace_rows"] == done["summary"]["log_events"]
    assert "run-0" in httpx.get(f"{address}/api/report", params=older, timeout=60).text
    (line,) = httpx.get(f"{address}/api/transcripts", params=older | {"rows": "1"}).json()
    path = f"{address}/api/transcripts/{line['trajectory_id']}"
    assert httpx.get(path, params=older).status_code == 200
    assert httpx.get(path).status_code == 404, "the newest run has no such trajectory"
    of_run = httpx.post(f"{address}/api/reconcile", params=older, json={"repair": False}, timeout=60).json()
    of_field = httpx.post(f"{address}/api/reconcile", json={"repair": False}, timeout=60).json()
    assert all(place["agrees"] for place in of_run + of_field)
    events = sum(place["log_events"] for place in of_run)
    assert events == sum(view["events"].values()) < sum(place["log_events"] for place in of_field)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "overview"), ("GET", "report"), ("GET", "transcripts"), ("POST", "finish"), ("POST", "sql")],
)
def test_an_unknown_run_is_told_with_the_nearest_ones(address: str, method: str, path: str) -> None:
    answer = httpx.request(
        method, f"{address}/api/{path}", params={"run": "run-9"}, json={"sql": "SELECT 1"}, timeout=60
    )
    assert answer.status_code == 404
    assert answer.json()["error"].startswith("there is no run run-9 here; the nearest are run-")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"sql": 1}', b'{"sql": "DROP TABLE events"}', b'{"sql": "SELECT nope FROM events"}']
)
def test_bad_questions_get_one_sentence(address: str, body: bytes) -> None:
    answer = httpx.post(f"{address}/api/sql", content=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/lineage", 400),
        ("GET", "/api/transcripts?rows=many", 400),
        ("GET", "/api/nothing", 404),
        ("POST", "/api/nothing", 405),
        ("GET", "/nothing", 404),
        ("GET", "/blob", 404),
    ],
)
def test_whatever_is_wrong_is_told_in_one_sentence(address: str, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, f"{address}{path}", json={} if method == "POST" else None, timeout=60)
    assert answer.status_code == status
    told = answer.text if path == "/blob" else answer.json().pop("error")
    assert "\n" not in told.strip()


@pytest.mark.parametrize("path", ["sql", "reconcile", "queries", "verdicts", "replays", "redrives"])
def test_more_than_a_request_may_have_is_refused_unread(address: str, path: str) -> None:
    answer = httpx.post(f"{address}/api/{path}", json={"sql": "x" * 2_000_000}, timeout=60)
    assert (answer.status_code, answer.json()["error"]) == (413, "more than 262,144 bytes were sent")


def test_a_page_of_another_origin_can_send_nothing(page: Page, address: str, tmp_path: Path) -> None:
    """In Chromium: what a stranger's page sends is refused, and the page is shown in no frame of it."""
    (tmp_path / "index.html").write_text(f"<!doctype html><iframe src='{address}/'></iframe>")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as stranger:
        threading.Thread(target=stranger.serve_forever).start()
        browser = page.context.browser
        assert browser is not None
        opened = browser.new_page()
        # Another port of the same machine is another origin, and the same site: the nearest that a stranger gets.
        opened.goto(f"http://127.0.0.1:{stranger.server_address[1]}/index.html")
        sent = opened.evaluate(_STRANGER, address)
        framed = opened.frames[1].url
        opened.close()
        stranger.shutdown()
    # Which of the two depends on whether the browser has seen the headers of the answer.
    assert sent.pop("socket") == "closed"
    assert set(sent.values()) <= {"opaque", "refused"}
    assert framed.startswith("chrome-error:")
    for path in ("sql", "finish", "reconcile", "queries", "verdicts", "replays", "redrives"):
        answer = httpx.post(
            f"{address}/api/{path}", content=b'{"sql": "SELECT 1"}', headers={"Content-Type": "text/plain"}
        )
        assert answer.status_code == 415
        elsewhere = {"Origin": "http://evil.example"}
        assert httpx.post(f"{address}/api/{path}", json={}, headers=elsewhere).status_code == 403
        near = {"Sec-Fetch-Site": "same-site"}
        assert httpx.post(f"{address}/api/{path}", json={}, headers=near).status_code == 403


_STRANGER = """async (address) => {
    const sent = async (path, options) => {
        try { return (await fetch(address + path, options)).type; } catch (error) { return "refused"; }
    };
    const simple = {method: "POST", mode: "no-cors", body: '{"sql": "SELECT 1"}'};
    const json = {method: "POST", headers: {"Content-Type": "application/json"}, body: '{"sql": "SELECT 1"}'};
    const socket = new WebSocket(address.replace("http", "ws") + "/any/socket");
    const ended = new Promise((found) => { socket.onopen = () => found("open"); socket.onclose = () => found("closed"); });
    return {
        sql: await sent("/api/sql", simple), finish: await sent("/api/finish", simple), json: await sent("/api/sql", json),
        socket: await ended, read: await sent("/api/runs", {}),
    };
}"""


def test_responses_say_how_they_may_be_used(address: str) -> None:
    for path in ("/", "/api/runs"):
        headers = httpx.get(f"{address}{path}", timeout=60).headers
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"


def test_another_name_for_this_machine_is_not_answered(address: str) -> None:
    assert httpx.get(f"{address}/api/overview", headers={"Host": "evil.example"}).status_code == 400
    assert httpx.get(f"{address}/api/transcripts/none").status_code == 404


def test_a_busy_port_is_said_in_one_line(address: str, memory_log: MemoryLog, store: Store) -> None:
    settings = TracesSettings(port=int(address.rsplit(":", 1)[1]))
    writer = TraceWriter(memory_log, store, FIELD_RUN, settings, ProgramMetrics())
    with pytest.raises(BadInput, match=r"port \d+ is in use"):
        WebServer(
            store,
            settings,
            LogSource(memory_log, LagWatch(memory_log, ProgramMetrics()), writer, OperationsWriter(memory_log)),
        )


def test_an_empty_field_is_explained_in_every_view(store: Store) -> None:
    """And one that is down: without a log only the store is served."""
    settings = TracesSettings(port=free_port())
    web = WebServer(store, settings, None)
    web.start()
    try:
        for _, views in NAVIGATION:
            for name, path, _ in views:
                answer = httpx.get(f"http://127.0.0.1:{settings.port}{path}", timeout=60)
                assert answer.status_code == 200, path
                assert f"<h1>{name}</h1>" in answer.text, path
                told = re.findall(r'<p class="empty">(.*?)</p>', answer.text)
                assert any(len(sentence) > 20 for sentence in told), (path, told)
    finally:
        web.stop()
