"""Snapshots: the state of a program on the log, so that a restart reads only what came after it.

A snapshot holds a state and the positions up to which it was folded; a restored program reads on from there. A program
whose fold has changed (another code_version) ignores it and folds its run from the start. Write a snapshot only after
every event that the state counts as written is acknowledged: a program restored from a state that is ahead of the log
would never write the missing events.
"""

from collections.abc import Sequence

from replayground.schemas.errors import BadInput
from replayground.schemas.events import Meta, Position, SnapshotTaken
from replayground.schemas.ids import new_id
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log

_EVENTS_MAX = 20
"at once: the states in them are large, and all but the newest are for nothing"


def newest_snapshot(log: Log, run: Run, code_version: str) -> SnapshotTaken | None:
    """The newest snapshot of run.program in this run, if the same fold made it; else None. Raises LogUnavailable."""
    newest = _newest(log, run)
    return newest if newest is not None and newest.code_version == code_version else None


def snapshot_to_continue(log: Log, run: Run, code_version: str) -> SnapshotTaken | None:
    """The newest snapshot of run.program in this run, for a program whose snapshots alone say what it has written; None
    without any. Raises BadInput when another fold made it, LogUnavailable."""
    newest = _newest(log, run)
    if newest is not None and newest.code_version != code_version:
        raise BadInput(
            f"{run.run_id} was begun by another release of replayground ({newest.code_version} of {run.program}, here "
            f"{code_version}): from its start it would write everything twice. Go on with that release, or start a new run"
        )
    return newest


def _newest(log: Log, run: Run) -> SnapshotTaken | None:
    # Reads to the end: compaction removes older snapshots only after a while.
    reader = log.reader(["snapshots"], start=run.start, run_id=run.run_id, partitions=[0])
    newest: SnapshotTaken | None = None
    try:
        is_behind = not reader.caught_up()
        while is_behind:
            deliveries = reader.poll(_EVENTS_MAX, 0.2)
            for delivery in deliveries:
                event = delivery.event
                # Snapshots of all programs and runs share one partition.
                if isinstance(event, SnapshotTaken) and _is_of(event, run):
                    newest = event
            # The broker is asked only when there seems to be nothing more.
            is_behind = len(deliveries) == _EVENTS_MAX or not reader.caught_up()
    finally:
        reader.close()
    return newest


def snapshot(run: Run, code_version: str, positions: Sequence[Position], state: bytes, now: int) -> SnapshotTaken:
    """A snapshot of run.program. `now` is in microseconds since the epoch."""
    return SnapshotTaken(
        meta=Meta(
            id=new_id(now),
            run_id=run.run_id,
            category="snapshot",
            topic="snapshots",
            sender=run.worker,
            timestamp=now,
        ),
        program=run.program,
        code_version=code_version,
        positions=sorted(positions, key=lambda position: (position.topic, position.partition)),
        state=state,
    )


def _is_of(event: SnapshotTaken, run: Run) -> bool:
    return event.meta.run_id == run.run_id and event.program == run.program
