"""The shell around a pure planner: reads the log from its beginning, lets the planner catch up before its first
decision, and writes what it decides; so a restart repeats nothing."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from schemas.errors import LogUnavailable
from schemas.events import Event
from schemas.ids import now_microseconds
from schemas.metrics import Pulse
from streams.log.protocol import Log, Reader

logger = structlog.get_logger()

_EVENTS_MAX = 5000
_LOOK_SECONDS = 5.0


class Planner(Protocol):
    """Knows what happened and what follows. Pure: time is an argument."""

    def apply(self, event: Event) -> None:
        """Takes note of a fact of the run. The same fact twice changes nothing."""

    def decide(self, now: int) -> list[Event]:
        """What to write next; it counts as done at once. `now` is in microseconds."""


def follow(
    planner: Planner,
    run_id: str,
    log: Log,
    topics: Sequence[str],
    poll_seconds: float,
    pulse: Pulse,
    stop: threading.Event,
    tell: Callable[[], None],
) -> None:
    """Runs the planner until told to stop; `tell` is called after each decision. Raises LogUnavailable."""
    reader = log.reader(topics)
    pulse.detail = "reads the log"
    caught_up = False
    look_at = 0.0
    try:
        while not stop.is_set():
            if time.monotonic() >= look_at:
                _tell_of_waiting(reader, pulse)
                look_at = time.monotonic() + _LOOK_SECONDS
            deliveries = reader.poll(_EVENTS_MAX, poll_seconds)
            for delivery in deliveries:
                event = delivery.event  # None: what cannot be read is rejected by the stage that owns it
                if event is not None and event.meta.run_id == run_id:
                    planner.apply(event)
            pulse.count("events_read", len(deliveries))
            caught_up = caught_up or reader.caught_up()
            if caught_up:
                _write(planner.decide(now_microseconds()), log, pulse)
                tell()
    finally:
        reader.close()


def _tell_of_waiting(reader: Reader, pulse: Pulse) -> None:
    """Messages that wait and never come are a stall: a client that has lost its broker would read nothing, and say nothing."""
    try:
        pulse.gauge("lag", 0 if reader.caught_up() else 1)
    except LogUnavailable as error:
        logger.warning("the end of the log is not known", reason=str(error))


def _write(events: list[Event], log: Log, pulse: Pulse) -> None:
    if events:
        for event in events:
            log.append(event)
        log.flush()
        pulse.count("events_written", len(events))
