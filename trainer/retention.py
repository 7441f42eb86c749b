"""Which weight versions go when a new one is published, so that an endless run does not fill the disk.

Kept are the newest `versions_kept` and every version that an evaluation holds. A version goes by a tombstone in the transaction
that publishes another; its blobs, which other versions and other runs may share, are left to `replayground blobs sweep`.
"""

from collections.abc import Callable, Collection, Sequence

from schemas.events import Position
from schemas.run import Run
from streams.log.protocol import Log
from streams.log.weights import WeightsState, versions_on_log, weights_state
from streams.rules.holds import Hold, held_after

_TOPIC = "control"
_EVENTS_MAX = 1000
_POLL_SECONDS = 0.2


def surplus(versions: Collection[int], newest: int, kept: int, held: Collection[int]) -> list[int]:
    """The versions to remove, oldest first. Never the newest: a restart begins from it."""
    assert kept >= 1
    return sorted(version for version in versions if version <= newest - kept and version not in held)


class Retention:
    """The account of one session of the trainer, which has taken its transactional id: nobody else adds versions."""

    def __init__(self, log: Log, run: Run, versions_kept: int, check_stop: Callable[[], None]) -> None:
        """Raises LogUnavailable."""
        self._kept = versions_kept
        self._check_stop = check_stop
        self._holds: tuple[Hold, ...] = ()
        self._versions: set[int] = set()
        self._run_id = run.run_id
        if not versions_kept:
            return
        positions, state = weights_state(log, run)
        if state is None or state.versions is None:  # the first start, or versions_kept was 0 before
            positions, self._versions = run.start, versions_on_log(log, run)
        else:
            self._versions, self._holds = set(state.versions), state.holds
        self._start = [position for position in positions if position.topic == _TOPIC]
        self._control = log.reader([_TOPIC], start=self._start, run_id=run.run_id)

    def removed_by(self, version: int) -> list[int]:
        """What goes when this version is published. Call `published` when it is. Raises LogUnavailable."""
        if not self._kept:
            return []
        self._read_holds()
        return surplus(self._versions, version, self._kept, {hold.version for hold in self._holds})

    def state(self, version: int, removed: Collection[int]) -> WeightsState:
        """The account after `version` was published and these were removed, for the snapshot in the same transaction."""
        if not self._kept:
            return WeightsState(version=version)
        versions = sorted({*self._versions, version} - set(removed))
        return WeightsState(version=version, versions=tuple(versions), holds=self._holds)

    def positions(self) -> Sequence[Position]:
        """Up to where holds were read."""
        return [] if not self._kept else (self._control.positions() or self._start)

    def published(self, state: WeightsState) -> None:
        """The transaction with this state was committed."""
        self._versions = set(state.versions or ())

    def close(self) -> None:
        if self._kept:
            self._control.close()

    def _read_holds(self) -> None:
        """All that were asked for by now: one that is overlooked could lose its version."""
        while not self._control.caught_up():
            self._check_stop()
            for delivery in self._control.poll(_EVENTS_MAX, _POLL_SECONDS):
                if delivery.event is not None and delivery.event.meta.run_id == self._run_id:
                    self._holds = held_after(self._holds, delivery.event)
