"""The weight versions of a run on the log: where to find the newest one, and which older ones still exist.

The trainer's snapshots say both, so programs need not read all versions. A tombstone on its key removes a version.
Readers do not deliver tombstones, and the version itself can be polled until the broker compacts the topic. So do not
poll for a version other than the newest: use `versions_on_log`, `weights_on_log` and `weights_at`.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from replayground.schemas.errors import Undecodable
from replayground.schemas.events import Position, SnapshotTaken, VersionAddress, WeightsPublished
from replayground.schemas.run import Run
from replayground.schemas.topics import weights_key
from replayground.streams.log.protocol import Log, RawMessage, Tombstone
from replayground.streams.log.snapshots import newest_snapshot, snapshot
from replayground.streams.rules.holds import Hold

_PROGRAM = "trainer"
# Of WeightsState: a snapshot of another version is ignored.
_STATE_VERSION = "trainer-2"
_TOPIC = "weights"


class WeightsState(Struct, frozen=True, kw_only=True):
    """What the trainer remembers of the weight versions of its run."""

    version: int
    "the newest"
    versions: tuple[int, ...] | None = None
    "all that were not removed; None when versions are never removed, so that nobody keeps account"
    holds: tuple[Hold, ...] = ()


def weights_snapshot(
    log: Log, run: Run, published: WeightsPublished, state: WeightsState, control: Sequence[Position] = ()
) -> SnapshotTaken:
    """The trainer's snapshot. Write it in the same transaction as `published`. `control` are the positions up to which
    the holds were folded."""
    # The end of the topic now: the version of this transaction comes after it, so a reader that starts here finds it.
    positions = [*log.end_positions([_TOPIC]), *control]
    return snapshot(
        _trainer_of(run), _STATE_VERSION, positions, msgspec.msgpack.encode(state), published.meta.timestamp
    )


def weights_state(log: Log, run: Run) -> tuple[Sequence[Position], WeightsState | None]:
    """The newest state, and the positions from which to read what came after it. Raises LogUnavailable."""
    taken = newest_snapshot(log, _trainer_of(run), _STATE_VERSION)
    if taken is None:
        return run.start, None
    return taken.positions, msgspec.msgpack.decode(taken.state, type=WeightsState)


def newest_weights_from(log: Log, run: Run) -> tuple[Sequence[Position], int | None]:
    """The positions from which the newest version is found, and the lowest that it can be. Raises LogUnavailable."""
    positions, state = weights_state(log, run)
    return positions, None if state is None else state.version


def versions_on_log(log: Log, run: Run) -> set[int]:
    """All versions of the run that were not removed. Reads the topic from the run's start. Raises LogUnavailable."""
    # By key alone: the events, with their lists of files, need not be decoded.
    prefix = weights_key(run.run_id, "")
    found: set[int] = set()
    for message in log.messages([_TOPIC], run.start):
        key = message.key or b""
        number = key.removeprefix(prefix)
        # A run_id may contain a colon, so another run's key can begin with the prefix; its rest is then no number.
        if key.startswith(prefix) and number.isdigit():
            found.discard(int(number)) if message.value is None else found.add(int(number))
    return found


def weights_on_log(log: Log, run: Run, version: int) -> WeightsPublished | None:
    """This version of the run; None when it was removed or never existed. Raises LogUnavailable."""
    return weights_at(log, VersionAddress(run_id=run.run_id, version=version), run.start)


def weights_at(log: Log, address: VersionAddress, start: Sequence[Position] = ()) -> WeightsPublished | None:
    """A version of any run, which must not be before `start`; without it the whole topic is read. None when the version
    was removed or never existed. Raises LogUnavailable."""
    # To the end of the topic: a tombstone may come after the version.
    key = weights_key(address.run_id, address.version)
    newest: RawMessage | None = None
    for message in log.messages([_TOPIC], start):
        newest = message if message.key == key else newest
    if newest is None or newest.value is None:
        return None
    try:
        event = log.codec.decode(newest.value, _TOPIC)
    except Undecodable:
        return None
    return event if isinstance(event, WeightsPublished) and event.meta.run_id == address.run_id else None


def removal_of(run: Run, version: int) -> Tombstone:
    """The tombstone that removes a version. Its files stay until a sweep finds no reference to them (decision 0011)."""
    return Tombstone(_TOPIC, weights_key(run.run_id, version))


def _trainer_of(run: Run) -> Run:
    """The run as the trainer sees it: other programs look for the trainer's snapshot, not for their own."""
    return msgspec.structs.replace(run, program=_PROGRAM)
