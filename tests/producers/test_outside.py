"""A worker whose rollouts search and browse: tools outside the sandbox, from the config to the events."""

import shutil
import threading
import time
from pathlib import Path

import pytest

from replayground.producers import rollouts
from replayground.producers.config import RolloutsSettings, SchedulerSettings
from replayground.producers.scheduler import Plan
from replayground.sandboxes.backends.scripted import ScriptedBackend
from replayground.schemas.events import RolloutEnded, RolloutRequested, ToolObserved
from replayground.schemas.ids import now_microseconds
from replayground.schemas.job import load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.streams.log.memory import MemoryLog
from tests.producers.field import a_log, a_run, events_on, published, submitted

JOB = '''
"""Find the price of a lamp on the shop's page, whose address is in the library."""
import itertools
import json

from replayground.sandboxes.worlds.world import World
from replayground.schemas.events import Task

WORLD = World(
    name="street",
    corpus={"Shops": "The lamp shop is at http://lamps.example/ and opens at nine.", "Parks": "There is one park."},
    pages={"http://lamps.example/": "<title>Lamps</title><h1>Lamps</h1><p>One lamp costs 17 coins.</p>"},
)
CALLS = [
    ("search", {"query": "lamp shop"}),
    ("browser_open", {"url": "http://lamps.example/"}),
    ("browser_screenshot", {}),
]


def tasks(split, seed):
    for _ in itertools.count():
        yield Task(
            prompt="What does a lamp cost?", reference="17", agent="agent", toolset=["search", "browser"],
            world=WORLD.to_json(), scorers=["exact_match"], group_size=1, split=split, tags={},
        )


def demonstrate(task, turns, seed):
    if len(turns) == len(CALLS):
        return "<answer>17</answer>"
    name, arguments = CALLS[len(turns)]
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
'''


@pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("bwrap") is None, reason="chromium is not installed"
)
def test_a_rollout_searches_browses_and_answers(tmp_path: Path) -> None:
    (tmp_path / "street.py").write_text(JOB)
    run = a_run(tmp_path, module=str(tmp_path / "street.py"))
    log, blobs = a_log(tmp_path)
    log.append(published(0, blobs))
    plan = Plan(run, SchedulerSettings())
    plan.apply(submitted(next(iter(load_job(run.job.module).tasks("train", 0))), 0, "demonstrate"))
    for event in plan.decide(now_microseconds()):
        if isinstance(event, RolloutRequested):
            log.append(event)
    stop = threading.Event()
    settings = RolloutsSettings(slots=1, sandboxes=1, commit_seconds=0.05, poll_seconds=0.01)
    backend = ScriptedBackend({"set_up_world": lambda arguments: ""})
    worker = threading.Thread(target=rollouts.work, args=(run, settings, ProgramMetrics(), stop, log, blobs, backend))
    worker.start()
    try:
        (ended,) = _awaited_ends(log, worker)
    finally:
        stop.set()
        worker.join(60)
    assert (ended.ended_by, ended.answer) == ("answered", "17"), ended.reason
    found, opened, pictured = [event for event in events_on(log, "messages") if isinstance(event, ToolObserved)]
    assert found.content == "1. Shops\n   The lamp shop is at http://lamps.example/ and opens at nine."
    assert "One lamp costs 17 coins." in opened.content
    (uri,) = pictured.blobs
    assert blobs.get(uri, uri.rpartition("/")[2])[:8] == b"\x89PNG\r\n\x1a\n"
    assert backend.opened[0].closed  # the pool's warm one: no tool of the rollout needed it


def _awaited_ends(log: MemoryLog, worker: threading.Thread) -> list[RolloutEnded]:
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up and worker.is_alive():
        ends = [event for event in events_on(log, "messages") if isinstance(event, RolloutEnded)]
        if ends:
            return ends
        time.sleep(0.05)
    raise AssertionError("the rollout did not end")
