"""The shell around the planners: what it tells of messages that wait and never come."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from producers import scheduler
from producers.config import SchedulerSettings
from schemas.codec import Codec
from schemas.metrics import Pulse
from streams.log.memory import MemoryLog, MemoryReader
from streams.log.protocol import Delivery
from tests.producers.field import a_log, a_run, published


class DeafReader(MemoryReader):
    """As a client that has lost its broker: nothing ever comes."""

    def poll(self, events_max: int, timeout_seconds: float) -> list[Delivery]:
        time.sleep(timeout_seconds)
        return []


class DeafLog(MemoryLog):
    def reader(self, topics: Sequence[str], group: str | None = None, *, alone: bool = False) -> MemoryReader:
        return DeafReader(self, topics, group)


def lag_told(folder: Path, log_class: type[MemoryLog]) -> float:
    """What the scheduler tells of waiting messages on a log with one."""
    first, blobs = a_log(folder)
    codec: Codec = first.codec
    log = log_class(codec)
    log.append(published(0, blobs))
    pulse, stop = Pulse(), threading.Event()
    arguments = (a_run(folder), SchedulerSettings(poll_seconds=0.01), pulse, stop, log)
    thread = threading.Thread(target=scheduler.schedule, args=arguments)
    thread.start()
    until = time.monotonic() + 60.0
    while "lag" not in pulse.figures() or (log_class is MemoryLog and pulse.figures()["lag"]):
        assert time.monotonic() < until, "nothing is told of what waits"
        time.sleep(0.01)
    stop.set()
    thread.join()
    return pulse.figures()["lag"]


def test_messages_that_never_come_are_told_as_lag(tmp_path: Path) -> None:
    assert lag_told(tmp_path, DeafLog) == 1.0


def test_a_log_that_is_read_to_its_end_has_none(tmp_path: Path) -> None:
    assert lag_told(tmp_path, MemoryLog) == 0.0
