"""Runs hops over any log, in one process and without Faust: for replay in bulk and for tests.

Not covered: state lives in memory and is rebuilt by reading from the beginning; a crash loses nothing but time, since
derived facts have derived ids and whoever reads them twice can tell.
"""

from collections.abc import Callable, Sequence

from schemas.ids import now_microseconds
from streams.hops.hop import Hop
from streams.log.protocol import Log
from streams.stage import Change, Stage

_EVENTS_AT_ONCE = 2000


class Driver:
    """All given hops over one log, each with its own reader from the beginning."""

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
        """Returns when every hop has read all there is and nothing new came of it."""
        advanced = True
        while advanced:
            # a list, not any(): every stage must advance, also when an earlier one did
            advances = [self._advance(number) for number in range(len(self._stages))]
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
        return bool(deliveries) or not reader.caught_up()


def keep_in_memory(stage: Stage, states: dict[bytes, bytes]) -> None:
    """A commit whose store is a dict. What is kept can be forgotten later: memory is bounded by the horizon of the hops."""

    def write(key: bytes, change: Change) -> None:
        if (encoded := change.encoded) is None:
            states.pop(key, None)
        else:
            states[key] = encoded

    stage.begin_commit()
    stage.write_states(write)
    stage.end_commit()
