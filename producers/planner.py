"""The shell around a pure planner: restores its state, reads on from there, lets it catch up before its first decision, and
writes what it decides; so a restart repeats nothing.

    newest snapshot ─► restore ─► read from its positions ─► caught up ─► decide ─► append, flush ─► (snapshot, flush)

A snapshot is written only after the flush of everything that the state takes for written, and its positions are those whose
events the state contains. Decisions that a state contains and its positions do not are read again, and change nothing.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import structlog

from schemas.errors import LogUnavailable
from schemas.events import Address, Event, Position, SnapshotTaken
from schemas.ids import now_microseconds
from schemas.metrics import ProgramMetrics
from schemas.run import Run
from streams.log.protocol import Log, Reader
from streams.log.snapshots import newest_snapshot, snapshot

logger = structlog.get_logger()

SNAPSHOT_EVENTS = 5000
"events read between two snapshots: what a restart has to read again, a fraction of a second"
_EVENTS_MAX = 5000
_LOOK_SECONDS = 5.0


class Planner(Protocol):
    """Knows what happened and what follows. Pure: time is an argument."""

    @property
    def code_version(self) -> str:
        """Of the fold: a snapshot of another version is passed over."""

    def apply(self, event: Event, address: Address | None = None) -> None:
        """Takes note of a fact of the run. The same fact twice changes nothing."""

    def decide(self, now: int) -> list[Event]:
        """What to write next; it counts as done at once. `now` is in microseconds. First called when everything that was on
        the log has been applied."""

    def encode(self) -> bytes:
        """The state after a decision: the same bytes whatever order the facts were applied in."""

    def restore(self, encoded: bytes) -> None:
        """Goes on from an encoded state."""


def fold_version(fold: str, *figures: object) -> str:
    """The code_version of a fold and of the settings that it depends on: with other settings it is another fold."""
    return f"{fold}/{hashlib.sha256(msgspec.json.encode(figures)).hexdigest()[:16]}"


def follow(
    planner: Planner,
    run: Run,
    log: Log,
    topics: Sequence[str],
    poll_seconds: float,
    program_metrics: ProgramMetrics,
    stop: threading.Event,
    tell: Callable[[], None],
) -> None:
    """Runs the planner until told to stop; `tell` is called after each decision. Raises LogUnavailable, and LogBroken when the
    snapshot is ahead of the log."""
    program_metrics.detail = "reads the log"
    following = PlannerLoop(planner, run, log, topics)
    look_at = 0.0
    try:
        while not stop.is_set():
            if time.monotonic() >= look_at:
                _report_lag(following.reader, program_metrics)
                look_at = time.monotonic() + _LOOK_SECONDS
            program_metrics.count("events_read", following.read(poll_seconds))
            if following.is_caught_up():
                program_metrics.count("events_written", following.decide(now_microseconds()))
                tell()
        following.take_snapshot(now_microseconds())
    finally:
        following.close()


class PlannerLoop:
    """Drives one planner: read, decide, and from time to time write a snapshot."""

    def __init__(
        self, planner: Planner, run: Run, log: Log, topics: Sequence[str], snapshot_events: int = SNAPSHOT_EVENTS
    ) -> None:
        self._planner = planner
        self._run = run
        self._log = log
        self._snapshot_events = snapshot_events
        taken = _restore(planner, newest_snapshot(log, run, planner.code_version))
        start = list(run.start) if taken is None else taken.positions
        self._start = [position for position in start if position.topic in topics]
        self.reader = log.reader(topics, start=self._start, run_id=run.run_id)
        self._caught_up = False
        self._events_unsaved = 0

    def read(self, poll_seconds: float) -> int:
        """Applies what has come; returns how many messages that were."""
        deliveries = self.reader.poll(_EVENTS_MAX, poll_seconds)
        for delivery in deliveries:
            event = delivery.event  # None: another run's, or what cannot be read, which the stage that owns it rejects
            if event is not None and event.meta.run_id == self._run.run_id:
                self._planner.apply(event, delivery.address)
        self._events_unsaved += len(deliveries)
        return len(deliveries)

    def is_caught_up(self) -> bool:
        self._caught_up = self._caught_up or self.reader.caught_up()
        return self._caught_up

    def decide(self, now: int) -> int:
        """Decides and writes, and takes a snapshot when one is due; returns how many events were written."""
        events = self._planner.decide(now)
        for event in events:
            self._log.append(event)
        if events:
            self._log.flush()
        if self._events_unsaved >= self._snapshot_events:
            self.take_snapshot(now)
        return len(events)

    def take_snapshot(self, now: int) -> None:
        """Nothing may have been decided or read since the last decision was flushed. Before the first one there is none."""
        if self._caught_up and self._events_unsaved:
            state = self._planner.encode()
            positions = _merge_positions(self._start, self.reader.positions())
            self._log.append(snapshot(self._run, self._planner.code_version, positions, state, now))
            self._log.flush()
            self._events_unsaved = 0

    def close(self) -> None:
        self.reader.close()


def _restore(planner: Planner, taken: SnapshotTaken | None) -> SnapshotTaken | None:
    """The snapshot that the planner goes on from. One that cannot be read costs time, and nothing else."""
    if taken is not None:
        try:
            planner.restore(taken.state)
        except msgspec.MsgspecError as error:
            logger.warning("snapshot_unreadable", reason=str(error))
            return None
    return taken


def _merge_positions(start: Iterable[Position], reached: Iterable[Position]) -> list[Position]:
    """Where every partition is to be read on: the reader tells of those that it has read from."""
    by_place = {(position.topic, position.partition): position for position in (*start, *reached)}
    return list(by_place.values())


def _report_lag(reader: Reader, program_metrics: ProgramMetrics) -> None:
    """Reports lag 1 while not caught up, so that a client that silently lost its broker shows as a stall."""
    try:
        program_metrics.gauge("lag", 0 if reader.caught_up() else 1)
    except LogUnavailable as error:
        logger.warning("log_end_unknown", reason=str(error))
