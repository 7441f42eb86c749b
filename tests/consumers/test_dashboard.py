"""The page in a real Chromium, and the interface that it rests on."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from consumers.clickhouse.store import Store
from consumers.config import TracesSettings
from consumers.dashboard.web import WebServer
from consumers.events_to_clickhouse import TraceWriter
from consumers.lag_watch import LagWatch
from schemas.errors import BadInput
from schemas.metrics import Pulse
from streams.log.memory import MemoryLog
from tests.consumers.conftest import free_port
from tests.consumers.synthetic_run import run_of

RUN = run_of(steps=12, demonstrations=10)
CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("dashboard"), free_port()
    command = [sys.executable, "-m", "tests.consumers.dashboard_program", str(folder), str(port)]
    program = subprocess.Popen(command, stdin=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        asked(f"{url}/api/overview", program)
        assert httpx.post(f"{url}/api/finish", timeout=120).status_code == 200  # everything is in the store
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
    expect(page.get_by_text("finished")).to_be_visible(timeout=20_000)
    expect(page.get_by_text("12 / 12")).to_be_visible()
    expect(page.locator("canvas").first).to_be_visible(timeout=20_000)


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
    assert page.title() == "Replayground"


def test_the_list_can_be_filtered(page: Page) -> None:
    page.locator(".q-select").nth(1).click()
    page.get_by_role("option", name="failed", exact=True).click()
    expect(page.locator(".line .dot").first).to_have_css("background-color", "rgb(220, 38, 38)", timeout=20_000)


def test_sql_is_answered_on_the_page(page: Page) -> None:
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("cell", name="TrajectoryAssembled")).to_be_visible(timeout=20_000)
    page.locator("textarea").first.fill("SELECT file('/etc/passwd')")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_text("the function file is not allowed here")).to_be_visible(timeout=20_000)


def test_the_interface_answers(address: str) -> None:
    view = httpx.get(f"{address}/api/overview").json()
    assert view["finished"] is True
    assert view["steps"] == 12
    answer = httpx.post(f"{address}/api/sql", json={"sql": "SELECT count() AS n FROM steps"}).json()
    assert (answer["columns"], answer["rows"]) == (["n"], [[14]])
    lines = httpx.get(f"{address}/api/transcripts", params={"outcome": "failed", "rows": 3}).json()
    assert len(lines) == 3
    assert all(line["score"] == 0 for line in lines)
    told = httpx.get(f"{address}/api/transcripts/{lines[0]['trajectory_id']}").json()
    assert [utterance["role"] for utterance in told["utterances"]] == ["user", "assistant", "tool", "assistant"]
    done = httpx.post(f"{address}/api/finish", timeout=60).json()
    assert done["summary"]["trace_rows"] == done["summary"]["log_events"]
    assert done["report"].startswith("<!doctype html>")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"sql": 1}', b'{"sql": "DROP TABLE events"}', b'{"sql": "SELECT nope FROM events"}']
)
def test_bad_questions_get_one_sentence(address: str, body: bytes) -> None:
    answer = httpx.post(f"{address}/api/sql", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_another_name_for_this_machine_is_not_answered(address: str) -> None:
    assert httpx.get(f"{address}/api/overview", headers={"Host": "evil.example"}).status_code == 400
    assert httpx.get(f"{address}/api/transcripts/none").status_code == 404


def test_a_busy_port_is_said_in_one_line(address: str, memory_log: MemoryLog, store: Store) -> None:
    settings = TracesSettings(port=int(address.rsplit(":", 1)[1]))
    writer = TraceWriter(memory_log, store, RUN, settings, Pulse())
    with pytest.raises(BadInput, match=r"port \d+ is in use"):
        WebServer(store, memory_log, RUN, settings, LagWatch(memory_log, RUN, Pulse()), writer)
