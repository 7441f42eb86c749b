"""A hop at work: messages in, facts out, and the states that no commit has written yet.

The Faust app, the driver and the simulator run hops through this one class. They differ in where messages come from and
where states are stored. A commit does, in this order: `begin_to_keep`, flush the facts, `keep`, commit the offsets. So
state is never ahead of its facts and offsets are never ahead of the state, and whoever is killed repeats and loses nothing.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from schemas.events import Address, Event
from schemas.ids import now_microseconds
from streams.hops.hop import Hop, Outcome
from streams.log.protocol import Delivery
from streams.rules.dead_letter import RejectLimit, rejected

logger = structlog.get_logger()

type Stored = Callable[[bytes], bytes | None]
"The state of a key as it was last written."


@dataclass(frozen=True, slots=True)
class Change:
    """A state that is not written yet."""

    state: msgspec.Struct | None
    "None = forget the key"
    address: Address
    "of the message that led to it"
    cause: Any
    "what the runner handed in with that message"

    @property
    def encoded(self) -> bytes | None:
        return None if self.state is None else msgspec.msgpack.encode(self.state)


class Stage:
    """One hop of one run."""

    def __init__(
        self,
        hop: Hop,
        run_id: str,
        stored: Stored,
        rejects_share_max: float = 0.5,
        now: Callable[[], int] = now_microseconds,
    ) -> None:
        self.hop = hop
        self._run_id = run_id
        self._stored = stored
        self._limit = RejectLimit(hop.name, rejects_share_max)
        self._now = now
        self._changed: dict[bytes, Change] = {}
        "since the last commit began"
        self._being_kept: dict[bytes, Change] = {}
        "by the commit under way"

    def take(self, delivery: Delivery, cause: Any = None) -> list[Event]:
        """What follows from a message: new facts, or its reject. The state it leads to is remembered.

        Raises TooManyRejects."""
        outcome = self._outcome(delivery, cause)
        self._limit.count(outcome.refused is not None)
        if outcome.refused is None:
            return list(outcome.events)
        logger.warning("rejected", hop=self.hop.name, address=str(delivery.address), reason=outcome.refused)
        return [rejected(self._run_id, self.hop.name, delivery, outcome.refused, self._now())]

    def _outcome(self, delivery: Delivery, cause: Any) -> Outcome:
        event = delivery.event
        if event is None:
            return Outcome(refused=delivery.undecodable)
        key = self.hop.key(event)
        if key is None or event.meta.run_id != self._run_id:
            return Outcome()
        if self.hop.state_class is None:
            return self.hop.step(None, event, delivery.address)
        before = self._state(key.encode(), self.hop.state_class)
        outcome = self.hop.step(before, event, delivery.address)
        if outcome.state is not before:
            self._changed[key.encode()] = Change(outcome.state, delivery.address, cause)
        return outcome

    def _state(self, key: bytes, state_class: type[msgspec.Struct]) -> msgspec.Struct | None:
        change = self._changed.get(key) or self._being_kept.get(key)
        if change is not None:
            return change.state
        stored = self._stored(key)
        return None if stored is None else msgspec.msgpack.decode(stored, type=state_class)

    def begin_to_keep(self) -> None:
        """What has changed up to here is written by the commit that begins now; what changes from here on, by the next."""
        self._being_kept |= self._changed
        self._changed = {}

    def keep(self, write: Callable[[bytes, Change], None]) -> None:
        """Hands every state that was to be kept to `write`."""
        for key, change in self._being_kept.items():
            write(key, change)
        self._being_kept = {}

    def forget(self, places: Container[tuple[str, int]]) -> None:
        """Another worker has these partitions now, or they are read again from the last commit."""
        for changes in (self._changed, self._being_kept):
            for key in [key for key, of in changes.items() if (of.address.topic, of.address.partition) in places]:
                del changes[key]
