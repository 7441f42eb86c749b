"""The Faust app and the cutter on a real broker: the same facts as the driver in memory, through kills and restarts."""

import multiprocessing
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.events import BatchCut, Event
from schemas.metrics import Pulse
from schemas.registry import MemoryRegistry
from schemas.run import JobSettings, Run
from streams import app, cut
from streams.config import CutSettings, StreamsSettings
from streams.driver import Driver
from streams.hops.flow import hops
from streams.log.connect import open_log
from streams.log.memory import MemoryLog
from streams.log.protocol import Log, Reader
from tests.flow.synthetic import groups

GROUPS = 40
_PROCESSES = multiprocessing.get_context("spawn")


@pytest.fixture
def run(kafka_run: Run) -> Run:
    job = JobSettings(groups_per_batch=4, staleness_max=100)
    return msgspec.structs.replace(kafka_run, run_id=f"app-{uuid.uuid4().hex[:8]}", job=job)


@pytest.fixture
def messages(run: Run) -> list[Event]:
    return [event for rollout in groups(GROUPS, run_id=run.run_id) for event in rollout]


def expected(messages: list[Event], run_id: str, topic: str) -> set[str]:
    """Ids of what an undisturbed pass over the messages derives."""
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for message in messages:
        log.append(message)
    Driver(log, hops((), "standardised"), run_id).run_until_caught_up()
    return {d.event.meta.id for d in log.reader([topic]).poll(100_000, 0.0) if d.event is not None}


def read(reader: Reader, run_id: str, enough: Callable[[list[Event]], bool], seconds_max: float = 240.0) -> list[Event]:
    """Reads until there is enough, or fails."""
    found: list[Event] = []
    until = time.monotonic() + seconds_max
    while not enough(found):
        assert time.monotonic() < until, f"only {len(found)} events came: {sorted(str(e.meta.group_id) for e in found)}"
        found += [d.event for d in reader.poll(1000, 0.5) if d.event is not None and d.event.meta.run_id == run_id]
    return found


def streams_process(run: Run, state_folder: str) -> None:
    app.run(run, StreamsSettings(state_folder=state_folder, session_timeout_seconds=6.0), Pulse(), threading.Event())


def cut_process(run: Run) -> None:
    cut.run(run, CutSettings(), Pulse(), threading.Event())


def append(log: Log, events: list[Event]) -> None:
    for event in events:
        log.append(event)
    log.flush()


def test_killed_workers_lose_and_repeat_nothing(run: Run, messages: list[Event], tmp_path: Path) -> None:
    """kill -9 of app and cutter in the middle, the app's state wiped at one of the kills, then everything is compared."""
    log = open_log(run)
    wanted = expected(messages, run.run_id, "groups")
    third = len(messages) // 3
    groups_reader, batches_reader = log.reader(["groups"]), log.reader(["batches"])
    seen: list[Event] = []
    for life, part in enumerate((messages[:third], messages[third : 2 * third], messages[2 * third :])):
        append(log, part)
        state = str(tmp_path / f"state-{life // 2}")  # the second life keeps the state, the third starts without any
        processes = [
            _PROCESSES.Process(target=streams_process, args=(run, state), daemon=True),
            _PROCESSES.Process(target=cut_process, args=(run,), daemon=True),
        ]
        for process in processes:
            process.start()
        more = len(wanted) if life == 2 else len({e.meta.id for e in seen}) + 3
        seen += read(groups_reader, run.run_id, lambda new, more=more: len({e.meta.id for e in seen + new}) >= more)  # type: ignore[misc]
        if life == 2:
            live = [e for e in seen if getattr(e, "dropped_because", None) is None]
            batches_wanted = len({e.meta.id for e in live}) // run.job.groups_per_batch
            batches = read(batches_reader, run.run_id, lambda new: len(new) >= batches_wanted)
        for process in processes:
            process.kill()
            process.join()
    groups_reader.close()
    batches_reader.close()
    log.close()
    assert {event.meta.id for event in seen} == wanted
    cut_groups = [group for batch in batches if isinstance(batch, BatchCut) for group in batch.groups]
    assert len(cut_groups) == len(set(cut_groups)) == batches_wanted * run.job.groups_per_batch
    assert [batch.index for batch in batches if isinstance(batch, BatchCut)] == list(range(batches_wanted))


def test_the_app_stops_when_told(run: Run, messages: list[Event], tmp_path: Path) -> None:
    log = open_log(run)
    append(log, messages)
    stop, pulse = threading.Event(), Pulse()
    settings = StreamsSettings(state_folder=str(tmp_path))
    thread = threading.Thread(target=app.run, args=(run, settings, pulse, stop))
    thread.start()
    reader = log.reader(["groups"])
    read(reader, run.run_id, lambda found: len(found) >= GROUPS)
    reader.close()
    until = time.monotonic() + 60.0
    while any(log.lag(f"streams-{run.run_id}", ["messages", "trajectories", "rewards"]).values()):
        assert time.monotonic() < until, "what was processed is never committed"
        time.sleep(0.2)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    log.close()
