"""The weight versions of a run on the log: where to look for the newest, and which of the others are still there.

The trainer's snapshots say both, so that nobody reads all versions. A version is removed by a tombstone on its key, which
readers do not deliver: until the broker compacts the topic the version itself can still be polled. Whoever wants another
than the newest asks here.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from schemas.errors import Undecodable
from schemas.events import Position, SnapshotTaken, WeightsPublished
from schemas.run import Run
from schemas.topics import weights_key
from streams.log.protocol import Log, RawMessage, Tombstone
from streams.log.snapshots import newest_snapshot, snapshot
from streams.rules.holds import Hold

_PROGRAM = "trainer"
_STATE_VERSION = "trainer-2"
_TOPIC = "weights"


class WeightsState(Struct, frozen=True, kw_only=True):
    """What the trainer keeps of the versions of its run."""

    version: int
    "the newest"
    versions: tuple[int, ...] | None = None
    "all that were not removed; None = nobody keeps account, since none is ever removed"
    holds: tuple[Hold, ...] = ()


def weights_snapshot(
    log: Log, run: Run, published: WeightsPublished, state: WeightsState, control: Sequence[Position] = ()
) -> SnapshotTaken:
    """To be written in the same transaction as this version, which will stand behind what is the end of the topic now.
    `control` is up to where the holds were folded."""
    positions = [*log.end_positions([_TOPIC]), *control]
    return snapshot(
        _trainer_of(run), _STATE_VERSION, positions, msgspec.msgpack.encode(state), published.meta.timestamp
    )


def weights_state(log: Log, run: Run) -> tuple[Sequence[Position], WeightsState | None]:
    """The newest state, and from where on to read what came after it. Raises LogUnavailable."""
    taken = newest_snapshot(log, _trainer_of(run), _STATE_VERSION)
    if taken is None:
        return run.start, None
    return taken.positions, msgspec.msgpack.decode(taken.state, type=WeightsState)


def newest_weights_from(log: Log, run: Run) -> tuple[Sequence[Position], int | None]:
    """From where on the newest version is found, and which one is found at least. Raises LogUnavailable."""
    positions, state = weights_state(log, run)
    return positions, None if state is None else state.version


def versions_on_log(log: Log, run: Run) -> set[int]:
    """All versions of the run that were not removed. Reads the topic from the start of the run on. Raises LogUnavailable."""
    prefix = weights_key(run.run_id, "")
    found: set[int] = set()
    for message in log.messages([_TOPIC], run.start):
        key = message.key or b""
        number = key.removeprefix(prefix)
        if key.startswith(prefix) and number.isdigit():
            found.discard(int(number)) if message.value is None else found.add(int(number))
    return found


def weights_on_log(log: Log, run: Run, version: int) -> WeightsPublished | None:
    """This version of the run; None when it was removed or never was. Raises LogUnavailable."""
    key = weights_key(run.run_id, version)
    newest: RawMessage | None = None
    for message in log.messages([_TOPIC], run.start):
        newest = message if message.key == key else newest
    if newest is None or newest.value is None:
        return None
    try:
        event = log.codec.decode(newest.value, _TOPIC)
    except Undecodable:
        return None
    return event if isinstance(event, WeightsPublished) and event.meta.run_id == run.run_id else None


def removal_of(run: Run, version: int) -> Tombstone:
    """Takes the version off the log. Its files stay until a sweep finds that nothing names them (decision 0011)."""
    return Tombstone(_TOPIC, weights_key(run.run_id, version))


def _trainer_of(run: Run) -> Run:
    return msgspec.structs.replace(run, program=_PROGRAM)
