"""Runs hops over any log, in one process and without Faust: for replay in bulk, simulation and tests.

Not covered: state lives in memory and is rebuilt by reading from the beginning; a crash loses nothing but time, since
derived facts have derived ids and whoever reads them twice can tell.
"""

from collections.abc import Sequence
from typing import Any

from schemas.events import Event
from streams.dead_letter import RejectLimit, rejected
from streams.hops.hop import Hop, Outcome
from streams.log.protocol import Delivery, Log, Reader

_EVENTS_AT_ONCE = 2000


class Driver:
    """All given hops over one log, each with its own reader from the beginning."""

    def __init__(self, log: Log, hops: Sequence[Hop], run_id: str, rejects_share_max: float = 0.5) -> None:
        self._log = log
        self._run_id = run_id
        self._stages = [_Stage(hop, log.reader([hop.reads]), rejects_share_max) for hop in hops]

    def run_until_caught_up(self) -> None:
        """Returns when every hop has read all there is and nothing new came of it."""
        advanced = True
        while advanced:
            advances = [
                self._advance(stage) for stage in self._stages
            ]  # every stage has its turn, whatever the first did
            self._log.flush()
            advanced = any(advances)

    def close(self) -> None:
        for stage in self._stages:
            stage.reader.close()

    def _advance(self, stage: "_Stage") -> bool:
        deliveries = stage.reader.poll(_EVENTS_AT_ONCE, 0.0)
        for delivery in deliveries:
            for event in stage.taken(delivery, self._run_id):
                self._log.append(event)
        return bool(deliveries) or not stage.reader.caught_up()


class _Stage:
    """A hop, its reader and its state."""

    def __init__(self, hop: Hop, reader: Reader, rejects_share_max: float) -> None:
        self.hop = hop
        self.reader = reader
        self._states: dict[str, Any] = {}
        self._limit = RejectLimit(hop.name, rejects_share_max)

    def taken(self, delivery: Delivery, run_id: str) -> Sequence[Event]:
        """What follows from a message: new facts, or its reject."""
        outcome = self._outcome(delivery)
        self._limit.count(outcome.refused is not None)
        if outcome.refused is None:
            return outcome.events
        timestamp = delivery.event.meta.timestamp if delivery.event else 0
        address, key, value = delivery.address, delivery.key, delivery.value
        return [rejected(run_id, self.hop.name, address, key, value, outcome.refused, timestamp)]

    def _outcome(self, delivery: Delivery) -> Outcome:
        if delivery.event is None:
            return Outcome(refused=delivery.undecodable)
        key = self.hop.key(delivery.event)
        if key is None:
            return Outcome()
        outcome = self.hop.step(self._states.get(key), delivery.event, delivery.address)
        if outcome.state is None:
            self._states.pop(key, None)
        else:
            self._states[key] = outcome.state
        return outcome
