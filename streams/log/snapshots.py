"""Snapshots: the state of a program on the log, so that a restart reads what came after it and not the whole run.

A snapshot holds a state and the positions it was folded up to. Whoever restores it reads on from there; a program whose
fold has changed (another code_version) passes it over and folds its run from the start. Write one only after
every event that the state counts as written is acknowledged: a state ahead of the log would never write it again.
"""

from collections.abc import Sequence

from schemas.events import Meta, Position, SnapshotTaken
from schemas.ids import new_id
from schemas.run import Run
from streams.log.protocol import Log

_EVENTS_MAX = 1000


def newest_snapshot(log: Log, run: Run, code_version: str) -> SnapshotTaken | None:
    """The newest snapshot of this program of this run, if it was made by the same fold. Raises LogUnavailable."""
    reader = log.reader(["snapshots"], start=run.start, run_id=run.run_id)
    newest: SnapshotTaken | None = None
    try:
        while not reader.caught_up():
            for delivery in reader.poll(_EVENTS_MAX, 0.2):
                event = delivery.event
                if isinstance(event, SnapshotTaken) and _is_of(event, run):
                    newest = event
    finally:
        reader.close()
    return newest if newest is not None and newest.code_version == code_version else None


def snapshot(run: Run, code_version: str, positions: Sequence[Position], state: bytes, now: int) -> SnapshotTaken:
    """The fact that this program of this run has this state. `now` is in microseconds."""
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
