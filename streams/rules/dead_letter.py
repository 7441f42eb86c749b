"""Rejects: a bad message neither blocks nor vanishes. It becomes an EventRejected with its address. A stage that rejects
too many stops, since then the stage is probably wrong and not the messages."""

from collections import deque

from schemas.errors import ReplaygroundError
from schemas.events import Address, EventRejected, Meta
from schemas.ids import derived_id
from streams.log.protocol import Delivery

_WINDOW_MESSAGES = 1000
_MESSAGES_MIN = 100


class TooManyRejects(ReplaygroundError):
    """The share of rejects passed its limit: the stage, not the messages, is probably wrong."""


def rejection(
    run_id: str, stage: str, delivery: Delivery, reason: str, timestamp: int, sender: str | None = None
) -> EventRejected:
    """The event that `stage` rejected a message, or that `sender` did in its place. Rejecting the same message again gives
    the same id."""
    address = delivery.address
    return EventRejected(
        meta=Meta(
            id=derived_id("EventRejected", stage, address.topic, address.partition, address.offset),
            run_id=run_id,
            category="reject",
            topic="dead-letters",
            sender=sender or stage,
            receiver="operator",
            timestamp=timestamp,
        ),
        original=delivery.value,
        original_key=delivery.key,
        origin=address,
        stage=stage,
        reason=reason,
    )


def give_up_rejection(
    run_id: str, stage: str, key: bytes, began_at: Address, reason: str, timestamp: int
) -> EventRejected:
    """The event that `stage` no longer waits for the rest of a key. Its messages were processed, so none is quoted here."""
    delivery = Delivery(began_at, key, b"", None, reason)
    return rejection(run_id, stage, delivery, reason, timestamp)


class RejectLimit:
    """Watches the share of rejects among the newest messages."""

    def __init__(self, stage: str, share_max: float) -> None:
        self._stage = stage
        self._share_max = share_max
        self._newest: deque[bool] = deque(maxlen=_WINDOW_MESSAGES)
        self._rejects = 0

    def count(self, is_reject: bool) -> None:
        """Raises TooManyRejects when the limit is passed."""
        if len(self._newest) == self._newest.maxlen:
            self._rejects -= self._newest[0]
        self._newest.append(is_reject)
        self._rejects += is_reject
        if len(self._newest) >= _MESSAGES_MIN and self._rejects > self._share_max * len(self._newest):
            raise TooManyRejects(
                f"{self._stage} rejected {self._rejects} of the last {len(self._newest)} messages; "
                "see the dead-letters topic for the reasons"
            )
