"""Where to look for the newest weights of a run: the trainer's snapshots say it, so that nobody reads all versions."""

from collections.abc import Sequence

import msgspec

from schemas.events import Position, SnapshotTaken, WeightsPublished
from schemas.run import Run
from streams.log.protocol import Log
from streams.log.snapshots import newest_snapshot, snapshot

_PROGRAM = "trainer"
_STATE_VERSION = "trainer-1"


def weights_snapshot(log: Log, run: Run, published: WeightsPublished) -> SnapshotTaken:
    """To be written in the same transaction as this version, which will stand behind what is the end of the topic now."""
    positions = log.end_positions(["weights"])
    state = msgspec.msgpack.encode(published.version)
    return snapshot(_trainer_of(run), _STATE_VERSION, positions, state, published.meta.timestamp)


def newest_weights_from(log: Log, run: Run) -> tuple[Sequence[Position], int | None]:
    """From where on the newest version is found, and which one is found at least. Raises LogUnavailable."""
    taken = newest_snapshot(log, _trainer_of(run), _STATE_VERSION)
    if taken is None:
        return run.start, None
    return taken.positions, msgspec.msgpack.decode(taken.state, type=int)


def _trainer_of(run: Run) -> Run:
    return msgspec.structs.replace(run, program=_PROGRAM)
