"""The traces program as it is run: its own process, a real broker and registry, SIGKILL in the middle."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from replayground.consumers.config import TracesSettings
from replayground.schemas.events import SnapshotTaken
from replayground.schemas.run import FIELD, LogSettings, Run
from replayground.schemas.topics import TOPICS
from replayground.streams.log.connect import open_log
from tests.consumers.conftest import free_port
from tests.consumers.synthetic_run import SyntheticRun, run_of

_PROGRAM = """
import signal, sys, threading
import msgspec
from replayground.consumers.config import TracesSettings
from replayground.consumers.events_to_clickhouse import run
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
run(msgspec.json.decode(sys.argv[1], type=Run), msgspec.json.decode(sys.argv[2], type=TracesSettings), ProgramMetrics(), stop)
"""


def started_event(run: Run, settings: TracesSettings) -> subprocess.Popen[bytes]:
    arguments = [msgspec.json.encode(run).decode(), msgspec.json.encode(settings).decode()]
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, *arguments])


def asked(method: str, url: str, seconds: float = 60.0) -> Any:
    """The answer, as soon as the program is up."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return httpx.request(method, url, json={} if method == "POST" else None, timeout=seconds).json()
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the program does not answer"
            time.sleep(0.1)


def test_a_killed_program_goes_on_and_the_store_equals_the_log(kafka_run: Run, tmp_path: Path) -> None:
    made = run_of(steps=8, demonstrations=20, run_id="traces-program")
    field = msgspec.structs.replace(kafka_run, run_id=FIELD, program="traces", worker="traces-0")
    settings = TracesSettings(dsn=f"chdb://{tmp_path}/store", port=free_port(), batch_rows_max=500, flush_seconds=0.2)
    url = f"http://127.0.0.1:{settings.port}/api"
    log = open_log(kafka_run)
    made_events = SyntheticRun(made, evaluation_tasks=20).events(log.end_positions([topic.name for topic in TOPICS]))
    # Without snapshots: of those the broker keeps the newest alone, ten seconds after it was written.
    events = [event for event in made_events if not isinstance(event, SnapshotTaken)]
    for event in events[: len(events) // 2]:
        log.append(event)
    log.flush()
    program = started_event(field, settings)
    try:
        assert asked("POST", f"{url}/sql")["error"]  # it is up; killed now, it is in the middle of its first rows
        program.send_signal(signal.SIGKILL)
        program.wait()
        program = started_event(field, settings)
        for event in events[len(events) // 2 :]:
            log.append(event)
        log.flush()
        asked("GET", f"{url}/overview")
        done = asked("POST", f"{url}/finish", seconds=120.0)
        assert done["summary"]["run_id"] == made.run_id
        assert done["summary"]["trace_rows"] == done["summary"]["log_events"] >= len(events)
        assert sum(done["summary"]["events_by_type"].values()) == len(events)
        assert done["summary"]["steps"] == made.job.steps
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=30) == 0
        without_log(field, settings, len(events))
        emptied = msgspec.structs.replace(settings, dsn=f"chdb://{tmp_path}/another")
        refilled(field, emptied, len(events))
    finally:
        program.kill()
        program.wait()
        log.close()


def without_log(field: Run, settings: TracesSettings, events: int) -> None:
    """With nobody at the address of the log the store is served as it is."""
    nowhere = LogSettings(bootstrap_servers="127.0.0.1:1", registry_url="http://127.0.0.1:1")
    settings = msgspec.structs.replace(settings, follow=False)
    url = f"http://127.0.0.1:{settings.port}/api"
    program = started_event(msgspec.structs.replace(field, log=nowhere), settings)
    try:
        view = asked("GET", f"{url}/overview?run=traces-program")
        assert (view["state"], sum(view["events"].values())) == ("finished", events)
        (run,) = [run for run in asked("GET", f"{url}/runs") if run["run_id"] == "traces-program"]
        assert run["steps"] == 8
        assert "<svg" in httpx.get(f"{url}/report?run=traces-program", timeout=60).text
        assert "replayground up" in asked("POST", f"{url}/finish")["error"]
    finally:
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=30) == 0


def refilled(field: Run, settings: TracesSettings, events: int) -> None:
    """A store that is empty is filled from the beginning, although the group has read everything."""
    program = started_event(field, settings)
    try:
        url = f"http://127.0.0.1:{settings.port}/api"
        asked("GET", f"{url}/runs")
        done = asked("POST", f"{url}/finish?run=traces-program", seconds=120.0)
        assert sum(done["summary"]["events_by_type"].values()) == events
        assert done["summary"]["trace_rows"] == done["summary"]["log_events"]
    finally:
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=30) == 0
