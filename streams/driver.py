"""Runs hops over any log, in one process and without Faust: for bulk replay and tests.

Not covered: state is in memory only, and a new driver reads from the beginning. After a crash it writes the same events
again, with the same ids, by which readers recognise them.
"""

from collections.abc import Callable, Sequence

from replayground.schemas.ids import now_microseconds
from replayground.streams.hops.hop import Hop
from replayground.streams.log.protocol import Log
from replayground.streams.stage import Change, Stage

_EVENTS_AT_ONCE = 2000


class Driver:
    """Runs the given hops over one log. Each has its own reader, from the beginning."""

    def __init__(
        self,
        log: Log,
        hops: Sequence[Hop],
        run_id: str,
        rejects_share_max: float = 0.5,
        now: Callable[[], int] = now_microseconds,
    ) -> None:
        self._log = log
        self._states: list[dict[bytes, bytes]] = [{} for _ in hops]
        self._stages = [
            (Stage(hop, run_id, states.get, rejects_share_max, now), log.reader([hop.reads], run_id=run_id))
            for hop, states in zip(hops, self._states, strict=True)
        ]

    def run_until_caught_up(self) -> None:
        """Returns when every hop has read everything, new events included. Raises LogUnavailable, TooManyRejects."""
        advanced = True
        while advanced:
            # A list, not any(): every stage must advance, also when an earlier one did.
            advances = [self._advance(number) for number in range(len(self._stages))]
            # Events before states, as in the Faust app: a state must never be ahead of its events.
            self._log.flush()
            for (stage, _), states in zip(self._stages, self._states, strict=True):
                keep_in_memory(stage, states)
            advanced = any(advances)

    def close(self) -> None:
        for _, reader in self._stages:
            reader.close()

    def _advance(self, number: int) -> bool:
        stage, reader = self._stages[number]
        deliveries = reader.poll(_EVENTS_AT_ONCE, 0.0)
        for delivery in deliveries:
            for event in stage.take(delivery):
                self._log.append(event)
        # An empty poll alone is not the end: a message may still be on its way from the broker.
        return bool(deliveries) or not reader.caught_up()


def keep_in_memory(stage: Stage, states: dict[bytes, bytes]) -> None:
    """Commits the states of a stage to a dict. Old keys are forgotten (streams.horizon), so memory stays bounded."""

    def write(key: bytes, change: Change) -> None:
        if (encoded := change.encoded) is None:
            states.pop(key, None)
        else:
            states[key] = encoded

    # No offsets are committed: readers without a group have none.
    stage.begin_commit()
    stage.write_states(write)
    stage.end_commit()
