"""Decides which weight versions are removed when a new one is published, so that an endless run does not fill the disk.

The newest `versions_kept` stay, and every version that an evaluation holds. A version is removed by a tombstone in the
transaction that publishes another one. Its blobs may be shared with other versions and runs, so they are left to
`replayground blobs sweep`.
"""

from collections.abc import Callable, Collection, Sequence

from replayground.schemas.events import Position
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log
from replayground.streams.log.weights import WeightsState, versions_on_log, weights_state
from replayground.streams.rules.holds import Hold, held_after

_TOPIC = "control"
_EVENTS_MAX = 1000
_POLL_SECONDS = 0.2


def surplus(versions: Collection[int], newest: int, kept: int, held: Collection[int]) -> list[int]:
    """The versions to remove, oldest first."""
    # Never the newest one: a restart continues from it.
    assert kept >= 1
    return sorted(version for version in versions if version <= newest - kept and version not in held)


class Retention:
    """Tracks the versions and holds of a run. For a trainer that has taken its transactional id: nobody else publishes
    versions of the run. With versions_kept 0 it does nothing."""

    def __init__(
        self,
        log: Log,
        run: Run,
        versions_kept: int,
        check_stop: Callable[[], None],
        kept_always: Collection[int] = (),
    ) -> None:
        """Versions in `kept_always` stay as if they were held. Raises LogUnavailable."""
        self._kept = versions_kept
        self._kept_always = frozenset(kept_always)
        self._check_stop = check_stop
        self._holds: tuple[Hold, ...] = ()
        self._versions: set[int] = set()
        self._run_id = run.run_id
        if not versions_kept:
            return
        positions, state = weights_state(log, run)
        # The first start, or versions_kept was 0 before: the versions are counted on the log once.
        if state is None or state.versions is None:
            positions, self._versions = run.start, versions_on_log(log, run)
        else:
            self._versions, self._holds = set(state.versions), state.holds
        self._start = [position for position in positions if position.topic == _TOPIC]
        self._control = log.reader([_TOPIC], start=self._start, run_id=run.run_id)

    def removed_by(self, version: int) -> list[int]:
        """Versions to remove when this one is published. Blocks until all holds are read. Raises LogUnavailable."""
        if not self._kept:
            return []
        self._read_holds()
        return surplus(self._versions, version, self._kept, self._kept_always | {hold.version for hold in self._holds})

    def state(self, version: int, removed: Collection[int]) -> WeightsState:
        """The state after `version` is published and `removed` are removed, for the snapshot of that transaction."""
        if not self._kept:
            return WeightsState(version=version)
        versions = sorted({*self._versions, version} - set(removed))
        return WeightsState(version=version, versions=tuple(versions), holds=self._holds)

    def positions(self) -> Sequence[Position]:
        """The position up to which holds were read."""
        # Nothing polled yet means that reading still begins at the start.
        return [] if not self._kept else (self._control.positions() or self._start)

    def published(self, state: WeightsState) -> None:
        """Call it when the transaction with this state is committed."""
        self._versions = set(state.versions or ())

    def close(self) -> None:
        if self._kept:
            self._control.close()

    def _read_holds(self) -> None:
        """Reads all holds up to now."""
        # To the end of the topic: the version of a hold that is missed could be removed.
        while not self._control.caught_up():
            self._check_stop()
            for delivery in self._control.poll(_EVENTS_MAX, _POLL_SECONDS):
                if delivery.event is not None and delivery.event.meta.run_id == self._run_id:
                    self._holds = held_after(self._holds, delivery.event)
