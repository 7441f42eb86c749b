"""Rejects: a bad message becomes an EventRejected with its address, so it neither blocks a stage nor is lost. A stage
that rejects too many messages stops: then the stage is probably wrong, not the messages."""

from collections import deque

from replayground.schemas.errors import ReplaygroundError
from replayground.schemas.events import Address, EventRejected, Meta
from replayground.schemas.ids import derived_id
from replayground.streams.log.protocol import Delivery

_WINDOW_MESSAGES = 1000
# With fewer messages, a few bad ones at the start would already exceed the share.
_MESSAGES_MIN = 100


class TooManyRejects(ReplaygroundError):
    """The share of rejects exceeds its limit: the stage is probably wrong, not the messages."""


def rejection(
    run_id: str, stage: str, delivery: Delivery, reason: str, timestamp: int, sender: str | None = None
) -> EventRejected:
    """The EventRejected of a message that `stage` rejected, or that `sender` rejected in its place."""
    address = delivery.address
    return EventRejected(
        meta=Meta(
            # Without the sender: rejecting a message again, by whichever program, gives the same id.
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
    """The EventRejected of a key whose remaining messages `stage` no longer waits for."""
    # Without a message: those of the key were processed. Its address is that of the first one.
    delivery = Delivery(began_at, key, b"", None, reason)
    return rejection(run_id, stage, delivery, reason, timestamp)


class RejectLimit:
    """Stops a stage when the share of rejects among its newest messages is too high."""

    def __init__(self, stage: str, share_max: float) -> None:
        self._stage = stage
        self._share_max = share_max
        self._newest: deque[bool] = deque(maxlen=_WINDOW_MESSAGES)
        self._rejects = 0

    def count(self, is_reject: bool) -> None:
        """Counts one message. Raises TooManyRejects when the limit is exceeded."""
        # Before append, which drops the oldest entry of a full window.
        if len(self._newest) == self._newest.maxlen:
            self._rejects -= self._newest[0]
        self._newest.append(is_reject)
        self._rejects += is_reject
        if len(self._newest) >= _MESSAGES_MIN and self._rejects > self._share_max * len(self._newest):
            raise TooManyRejects(
                f"{self._stage} rejected {self._rejects} of the last {len(self._newest)} messages; "
                "see the dead-letters topic for the reasons"
            )
