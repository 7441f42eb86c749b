"""The page in a real Chromium, and the interface that it rests on."""

import functools
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import TracesSettings
from replayground.consumers.dashboard.web import LogSource, WebServer
from replayground.consumers.events_to_clickhouse import TraceWriter
from replayground.consumers.lag_watch import LagWatch
from replayground.schemas.errors import BadInput
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.topics import TOPICS
from replayground.streams.log.memory import MemoryLog
from tests.consumers.conftest import free_port
from tests.consumers.synthetic_run import FIELD_RUN

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
def page(address: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        opened = browser.new_page()
        opened.goto(address)
        yield opened
        browser.close()


def test_the_page_shows_the_run(page: Page) -> None:
    expect(page.locator(".big").get_by_text("finished")).to_be_visible(timeout=20_000)
    expect(page.locator(".big").get_by_text("12 / 12")).to_be_visible()
    expect(page.locator("canvas").first).to_be_visible(timeout=20_000)


def test_title_and_address_name_the_newest_run_when_none_is_asked_for(page: Page, address: str) -> None:
    expect(page).to_have_title("run-1 · Replayground", timeout=20_000)
    expect(page).to_have_url(f"{address}/?run=run-1", timeout=20_000)


def test_the_flow_is_that_of_the_map_and_a_past_run_has_no_lags(page: Page) -> None:
    expect(page.locator(".station")).to_have_count(len(TOPICS), timeout=20_000)
    expect(page.locator(".station", has_text="messages").get_by_text("→ assemble", exact=True)).to_be_visible()
    expect(page.get_by_text("no lags: the run is over")).to_be_visible()
    expect(page.locator(".station").get_by_text("lag 0")).to_have_count(0)


def test_another_run_is_chosen_from_the_list(page: Page, address: str) -> None:
    expect(page.locator("a.run")).to_have_count(2, timeout=20_000)
    expect(page.locator("a.run.chosen")).to_contain_text("run-1")
    page.locator("a.run", has_text="run-0").click()
    expect(page).to_have_url(f"{address}/?run=run-0", timeout=20_000)
    expect(page).to_have_title("run-0 · Replayground", timeout=20_000)
    expect(page.locator("a.run.chosen")).to_contain_text("stopped", timeout=20_000)
    expect(page.locator(".big").get_by_text("5 / 5")).to_be_visible(timeout=20_000)
    page.goto(f"{address}/?run=run-7")
    expect(page.get_by_text("There is no run run-7 here; the nearest are")).to_be_visible(timeout=20_000)
    expect(page.locator(".station").first).not_to_be_visible()
    page.goto(address)


def shows_hostile_text(page: Page, place: int) -> bool:
    """Opens a transcript and gives it time to replace the one before."""
    page.locator(".line").nth(place).click()
    try:
        page.get_by_text("<script>").first.wait_for(timeout=2_000)
    except PlaywrightTimeout:
        return False
    return True


def test_a_transcript_with_hostile_text_is_shown_as_text(page: Page) -> None:
    page.locator(".line").first.wait_for(timeout=20_000)
    assert any(shows_hostile_text(page, place) for place in range(15)), "one of the newest trajectories is hostile"
    assert page.title() == "run-1 · Replayground"


def test_the_list_can_be_filtered(page: Page) -> None:
    page.locator(".q-select").nth(1).click()
    page.get_by_role("option", name="failed", exact=True).click()
    expect(page.locator(".line .dot").first).to_have_css("background-color", "rgb(220, 38, 38)", timeout=20_000)


def test_sql_is_answered_on_the_page(page: Page) -> None:
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("cell", name="TrajectoryAssembled")).to_be_visible(timeout=20_000)
    page.locator("textarea").first.fill("SELECT uniqExact(run_id) AS runs FROM events")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("cell", name="2", exact=True)).to_be_visible(timeout=20_000)
    page.get_by_role("switch", name="this run only").click()
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("cell", name="1", exact=True)).to_be_visible(timeout=20_000)
    page.locator("textarea").first.fill("SELECT file('/etc/passwd')")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_text("the function file is not about the traces")).to_be_visible(timeout=20_000)


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
    newest, older = httpx.get(f"{address}/api/runs").json()
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
    assert "run-0" in httpx.get(f"{address}/api/report", params=older).text
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


def test_a_page_of_another_origin_can_send_nothing(page: Page, address: str, tmp_path: Path) -> None:
    """In Chromium: what a stranger's page sends is refused, and the page is shown in no frame of it."""
    (tmp_path / "index.html").write_text(f"<!doctype html><iframe src='{address}/'></iframe>")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as stranger:
        threading.Thread(target=stranger.serve_forever).start()
        opened = page.context.new_page()
        # Another port of the same machine is another origin, and the same site: the nearest that a stranger gets.
        opened.goto(f"http://127.0.0.1:{stranger.server_address[1]}/index.html")
        sent = opened.evaluate(_STRANGER, address)
        framed = opened.frames[1].url
        opened.close()
        stranger.shutdown()
    assert sent == {"sql": "opaque", "finish": "opaque", "json": "refused", "socket": "closed", "read": "refused"}
    assert framed.startswith("chrome-error:")
    for path in ("sql", "finish", "reconcile"):
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
        WebServer(store, settings, LogSource(memory_log, LagWatch(memory_log, ProgramMetrics()), writer))
