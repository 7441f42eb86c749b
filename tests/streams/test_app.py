"""The Faust app and the cutter on a real broker: the same facts as the driver in memory, through kills and restarts."""

import asyncio
import multiprocessing
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from faust.types import TP

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import LogBroken
from replayground.schemas.events import Address, BatchCut, Event, EventRejected
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings, Run
from replayground.streams import app, cut
from replayground.streams.config import CutSettings, StreamsSettings
from replayground.streams.hops.trajectories_to_rewards import ScoreTrajectories
from replayground.streams.log.connect import open_log
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Reader
from tests.flow.synthetic import groups
from tests.torture.oracle import append, events_of, undisturbed

GROUPS = 40
_PATIENCE_SECONDS = 120.0
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
    return {event.meta.id for event in events_of(undisturbed(messages, run_id), run_id, topic)}


def read(reader: Reader, run_id: str) -> Iterator[Event]:
    """The run's events as they come; fails when none has come for long."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        for delivery in reader.poll(1000, 0.5):
            if delivery.event is not None and delivery.event.meta.run_id == run_id:
                until = time.monotonic() + _PATIENCE_SECONDS
                yield delivery.event
        assert time.monotonic() < until, "nothing comes any more"


def read_groups(reader: Reader, run_id: str, seen: dict[str, Event], count: int) -> None:
    """Adds groups by id until there are so many different ones."""
    events = read(reader, run_id)
    while len(seen) < count:
        event = next(events)
        seen[event.meta.id] = event


def read_batches(reader: Reader, run_id: str, count: int) -> list[BatchCut]:
    events = read(reader, run_id)
    return [batch for batch in (next(events) for _ in range(count)) if isinstance(batch, BatchCut)]


@contextmanager
def workers(run: Run, state_folder: str) -> Iterator[None]:
    """The app and the cutter in processes of their own, killed when the block ends."""
    processes = [
        _PROCESSES.Process(target=streams_process, args=(run, state_folder), daemon=True),
        _PROCESSES.Process(target=cut_process, args=(run,), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def streams_process(run: Run, state_folder: str) -> None:
    app.run(
        run,
        StreamsSettings(state_folder=state_folder, session_timeout_seconds=6.0),
        ProgramMetrics(),
        threading.Event(),
    )


def cut_process(run: Run) -> None:
    cut.run(run, CutSettings(), ProgramMetrics(), threading.Event())


def test_killed_workers_lose_and_repeat_nothing(run: Run, messages: list[Event], tmp_path: Path) -> None:
    """kill -9 of app and cutter in the middle, the app's state wiped at one of the kills, then everything is compared."""
    log = open_log(run)
    wanted = expected(messages, run.run_id, "groups")
    third = len(messages) // 3
    groups_reader, batches_reader = log.reader(["groups"]), log.reader(["batches"])
    seen: dict[str, Event] = {}
    for life, part in enumerate((messages[:third], messages[third : 2 * third], messages[2 * third :])):
        append(log, part)
        state = str(tmp_path / f"state-{life // 2}")  # the second life keeps the state, the third starts without any
        with workers(run, state):
            read_groups(groups_reader, run.run_id, seen, len(wanted) if life == 2 else len(seen) + 3)
            if life == 2:
                live = [event for event in seen.values() if getattr(event, "dropped_because", None) is None]
                batches = read_batches(batches_reader, run.run_id, len(live) // run.job.groups_per_batch)
    groups_reader.close()
    batches_reader.close()
    log.close()
    assert set(seen) == wanted
    cut_groups = [group for batch in batches for group in batch.groups]
    assert len(cut_groups) == len(set(cut_groups)) == len(batches) * run.job.groups_per_batch
    assert [batch.index for batch in batches] == list(range(len(live) // run.job.groups_per_batch))


def test_the_app_stops_when_told(run: Run, messages: list[Event], tmp_path: Path) -> None:
    log = open_log(run)
    append(log, messages)
    stop, program_metrics = threading.Event(), ProgramMetrics()
    settings = StreamsSettings(state_folder=str(tmp_path))
    thread = threading.Thread(target=app.run, args=(run, settings, program_metrics, stop))
    thread.start()
    reader = log.reader(["groups"])
    read_groups(reader, run.run_id, {}, GROUPS)
    reader.close()
    until = time.monotonic() + 60.0
    topics = ["messages", "trajectories", "rewards"]
    while any(group_lags.lag for group_lags in log.group_lags(f"streams-{run.run_id}", topics).values()):
        assert time.monotonic() < until, "what was processed is never committed"
        time.sleep(0.2)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    log.close()


def test_a_message_that_was_never_delivered_ends_the_worker(run: Run, messages: list[Event], tmp_path: Path) -> None:
    """Faust would take it for a hole in the log, and commit it."""
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    append(log, messages)
    by_offset = {
        message.address.offset: message for message in log.messages(["messages"]) if message.address.partition == 0
    }

    async def take(first: int, *offsets: int) -> None:
        settings = StreamsSettings(state_folder=str(tmp_path), hops=("score",))
        streams = app.make_app(run, settings, log, asyncio.get_running_loop().create_future())
        agent = app.HopProcessor(streams, ScoreTrajectories({}), log.codec, run.run_id, settings, ProgramMetrics())
        agent.expect({TP("messages", 0): first})
        for offset in offsets:
            value = by_offset[min(offset, max(by_offset))].value
            message = SimpleNamespace(topic="messages", partition=0, offset=offset, key=b"", value=value)
            agent._take(SimpleNamespace(message=message), await agent._decode(message))

    asyncio.run(take(0, 0, 1, 2))
    asyncio.run(take(0, 0, 1, 0, 1, 2))  # sought back
    beyond = max(by_offset) + 1
    asyncio.run(take(beyond, beyond, beyond + 2))  # nothing stands between them
    with pytest.raises(LogBroken, match="was delivered after offset 0"):
        asyncio.run(take(0, 0, 2))
    with pytest.raises(LogBroken, match="was delivered after offset 0"):
        asyncio.run(take(1, 3))


def test_a_message_without_a_value_is_rejected(run: Run, tmp_path: Path) -> None:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))

    async def take() -> None:
        settings = StreamsSettings(state_folder=str(tmp_path), hops=("score",))
        streams = app.make_app(run, settings, log, asyncio.get_running_loop().create_future())
        processor = app.HopProcessor(streams, ScoreTrajectories({}), log.codec, run.run_id, settings, ProgramMetrics())
        processor.expect({TP("trajectories", 0): 0})
        message = SimpleNamespace(topic="trajectories", partition=0, offset=0, key=b"k", value=None)
        processor._take(SimpleNamespace(message=message), await processor._decode(message))
        streams.facts.flush()

    asyncio.run(take())
    (reject,) = events_of(log, run.run_id, "dead-letters")
    assert isinstance(reject, EventRejected)
    assert (reject.origin, reject.original) == (Address("trajectories", 0, 0), b"")
