"""Runs a pure planner over the log: restores its state, catches up, and writes what it decides.

    newest snapshot ─► restore ─► read from its positions ─► caught up ─► decide ─► append, flush ─► (snapshot, flush)

A restart repeats nothing. The planner decides only when it has caught up, so it knows its own earlier decisions. A
snapshot is written only after everything that the state counts as written is flushed, and its positions are right
behind the last events that were applied. Decisions that are in the state but behind its positions are read again and
change nothing (decision 0018).
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import structlog

from replayground.schemas.errors import LogUnavailable
from replayground.schemas.events import Address, Event, Position, SnapshotTaken
from replayground.schemas.ids import now_microseconds
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log, Reader
from replayground.streams.log.snapshots import newest_snapshot, snapshot

logger = structlog.get_logger()

SNAPSHOT_EVENTS = 5000
"events read between two snapshots; a restart reads at most about as many again, in a fraction of a second"
_EVENTS_MAX = 5000
# caught_up() asks the broker for the end of every partition, so the lag is not reported with every poll.
_LOOK_SECONDS = 5.0


class Planner(Protocol):
    """A fold over events (`apply`) that decides what to write next (`decide`). Pure: time is an argument."""

    @property
    def code_version(self) -> str:
        """Version of the fold. Snapshots of another version are not used."""

    def apply(self, event: Event, address: Address | None = None) -> None:
        """Folds an event of the run. The same event twice changes nothing."""

    def decide(self, now: int) -> list[Event]:
        """What to write next. The planner counts it as written at once. `now` is in microseconds. Not called before
        everything that was on the log at the start has been applied."""

    def encode(self) -> bytes:
        """The state after a decision. The same bytes for the same events, in whatever order they were applied."""

    def restore(self, encoded: bytes) -> None:
        """Continues from an encoded state. Raises msgspec.MsgspecError when it cannot be decoded."""


def fold_version(fold: str, *figures: object) -> str:
    """The code_version of a fold and of the settings that its state depends on: other settings give another fold."""
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
    """Runs the planner until `stop` is set; `tell` is called after each decision. Blocks. Raises LogUnavailable, and
    LogBroken when the snapshot is ahead of the log."""
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
        # A clean stop leaves a snapshot, so that the next start reads next to nothing.
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
        # Without a group: the state, and not a committed offset, says where reading begins.
        start = list(run.start) if taken is None else taken.positions
        self._start = [position for position in start if position.topic in topics]
        self.reader = log.reader(topics, start=self._start, run_id=run.run_id)
        self._caught_up = False
        self._events_unsaved = 0

    def read(self, poll_seconds: float) -> int:
        """Polls once and applies the events; returns how many messages were polled. Blocks up to `poll_seconds`."""
        deliveries = self.reader.poll(_EVENTS_MAX, poll_seconds)
        for delivery in deliveries:
            # None: of another run, or undecodable. The stage that is declared for the topic rejects the latter.
            event = delivery.event
            if event is not None and event.meta.run_id == self._run.run_id:
                self._planner.apply(event, delivery.address)
        # Also messages of other runs: a restart would have to read past them again.
        self._events_unsaved += len(deliveries)
        return len(deliveries)

    def is_caught_up(self) -> bool:
        # Once is enough: new events keep arriving, and a planner need not be at the very end to decide again.
        self._caught_up = self._caught_up or self.reader.caught_up()
        return self._caught_up

    def decide(self, now: int) -> int:
        """Decides, writes and flushes, and takes a snapshot when one is due; returns how many events were written."""
        events = self._planner.decide(now)
        for event in events:
            self._log.append(event)
        if events:
            self._log.flush()
        # After the flush: a state that counts a lost decision as written would never write it again.
        if self._events_unsaved >= self._snapshot_events:
            self.take_snapshot(now)
        return len(events)

    def take_snapshot(self, now: int) -> None:
        """Writes a snapshot and waits for its acknowledgement. Call it when nothing was read or decided since the last
        flush. Does nothing before the first decision, or when nothing was read since the last snapshot."""
        # Before it has caught up, a planner may hold facts whose task it has not read yet: no state to continue from.
        if self._caught_up and self._events_unsaved:
            state = self._planner.encode()
            positions = _merge_positions(self._start, self.reader.positions())
            self._log.append(snapshot(self._run, self._planner.code_version, positions, state, now))
            self._log.flush()
            self._events_unsaved = 0

    def close(self) -> None:
        self.reader.close()


def _restore(planner: Planner, taken: SnapshotTaken | None) -> SnapshotTaken | None:
    """The snapshot that the planner continues from; None if there is none, or it cannot be decoded. Then the run is
    folded from its start, which costs time and nothing else."""
    if taken is not None:
        try:
            planner.restore(taken.state)
        except msgspec.MsgspecError as error:
            logger.warning("snapshot_unreadable", reason=str(error))
            return None
    return taken


def _merge_positions(start: Iterable[Position], reached: Iterable[Position]) -> list[Position]:
    """The next offset of every partition."""
    # The reader only knows partitions that it has read from. The others must keep their start, or a restart would read
    # them from the beginning of the log.
    by_place = {(position.topic, position.partition): position for position in (*start, *reached)}
    return list(by_place.values())


def _report_lag(reader: Reader, program_metrics: ProgramMetrics) -> None:
    """Reports lag 1 while not caught up, so that a client that silently lost its broker shows as a stall."""
    # The harness decides what a stall is. An unreachable broker is no reason for this loop to end.
    try:
        program_metrics.gauge("lag", 0 if reader.caught_up() else 1)
    except LogUnavailable as error:
        logger.warning("log_end_unknown", reason=str(error))
