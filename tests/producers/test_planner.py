"""The shell around the planners: what it restores and reads, and what it tells of messages that never come."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from replayground.producers import scheduler, stockroom, tasks
from replayground.producers.config import FeederSettings, SchedulerSettings
from replayground.producers.planner import PlannerLoop
from replayground.producers.tasks import Feed
from replayground.schemas.codec import Codec
from replayground.schemas.events import Position
from replayground.schemas.metrics import ProgramMetrics
from replayground.streams.log.memory import MemoryLog, MemoryReader
from replayground.streams.log.protocol import Delivery
from replayground.streams.log.snapshots import snapshot
from tests.producers.field import a_log, a_run, published


class DeafReader(MemoryReader):
    """As a client that has lost its broker: nothing ever comes."""

    def poll(self, events_max: int, timeout_seconds: float) -> list[Delivery]:
        time.sleep(timeout_seconds)
        return []


class DeafLog(MemoryLog):
    def reader(
        self,
        topics: Sequence[str],
        group: str | None = None,
        *,
        alone: bool = False,
        start: Sequence[Position] = (),
        run_id: str | frozenset[str] | None = None,
        partitions: Sequence[int] | None = None,
    ) -> MemoryReader:
        return DeafReader(self, topics, group)


def lag_told(folder: Path, log_class: type[MemoryLog]) -> float:
    """What the scheduler tells of waiting messages on a log with one."""
    first, blobs = a_log(folder)
    codec: Codec = first.codec
    log = log_class(codec)
    log.append(published(0, blobs))
    program_metrics, stop = ProgramMetrics(), threading.Event()
    arguments = (a_run(folder), SchedulerSettings(poll_seconds=0.01), program_metrics, stop, log)
    thread = threading.Thread(target=scheduler.schedule, args=arguments)
    thread.start()
    until = time.monotonic() + 60.0
    while "lag" not in program_metrics.figures() or (log_class is MemoryLog and program_metrics.figures()["lag"]):
        assert time.monotonic() < until, "nothing is told of what waits"
        time.sleep(0.01)
    stop.set()
    thread.join()
    return program_metrics.figures()["lag"]


def test_messages_that_never_come_are_told_as_lag(tmp_path: Path) -> None:
    assert lag_told(tmp_path, DeafLog) == 1.0


def test_a_log_that_is_read_to_its_end_has_none(tmp_path: Path) -> None:
    assert lag_told(tmp_path, MemoryLog) == 0.0


def feeding(folder: Path, log: MemoryLog, **changes: object) -> tuple[Feed, PlannerLoop]:
    run = msgspec.structs.replace(a_run(folder, demonstrations=20, steps=1), **({"program": "feeder"} | changes))
    feed = Feed(run, FeederSettings(), stockroom.tasks)
    return feed, PlannerLoop(feed, run, log, tasks.TOPICS_READ, snapshot_events=10)


def caught_up(following: PlannerLoop) -> int:
    """How many messages were read."""
    read = 0
    while not following.is_caught_up():
        read += following.read(0.0)
    return read


def test_a_restart_reads_what_came_after_the_snapshot(tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    first, following = feeding(tmp_path, log)
    assert caught_up(following) == 0
    assert following.decide(0) == 20
    following.read(0.0)
    following.decide(0)
    assert log.count(["snapshots"]) == {"snapshots": 1}
    log.append(published(0))
    again, restarted = feeding(tmp_path, log)
    assert caught_up(restarted) == 1
    assert restarted.decide(0) == 0
    following.read(0.0)
    following.decide(0)
    assert again.encode() == first.encode()


def test_a_snapshot_of_another_program_or_run_is_not_taken(tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    _, following = feeding(tmp_path, log)
    caught_up(following)
    following.decide(0)
    following.read(0.0)
    following.take_snapshot(0)
    assert caught_up(feeding(tmp_path, log, program="scheduler")[1]) == 20
    assert caught_up(feeding(tmp_path, log)[1]) == 0
    assert caught_up(feeding(tmp_path, log, run_id="another")[1]) == 20


def test_a_snapshot_that_cannot_be_read_costs_a_whole_fold(tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    feed, following = feeding(tmp_path, log)
    caught_up(following)
    following.decide(0)
    run = msgspec.structs.replace(a_run(tmp_path), program="feeder")
    log.append(snapshot(run, feed.code_version, log.end_positions(["tasks"]), b"\xc1 rubbish", 0))
    again, restarted = feeding(tmp_path, log)
    assert caught_up(restarted) == 20
    assert restarted.decide(0) == 0
    following.read(0.0)
    assert again.encode() == feed.encode()


def test_nothing_from_before_the_run_is_read(tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    _, before = feeding(tmp_path, log)
    caught_up(before)
    before.decide(0)
    start = tuple(log.end_positions(["tasks", "attempts", "weights", "snapshots"]))
    _, following = feeding(tmp_path, log, start=start)
    assert caught_up(following) == 0
    log.append(published(0))
    following.read(0.0)
    following.take_snapshot(0)
    assert caught_up(feeding(tmp_path, log, start=start)[1]) == 0


def test_a_clean_stop_leaves_a_snapshot(tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    log.append(published(0))
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    scheduler.schedule(a_run(tmp_path), SchedulerSettings(poll_seconds=0.01), ProgramMetrics(), stop, log)
    assert log.count(["snapshots"]) == {"snapshots": 1}
