"""`replayground dead-letters`: what was refused, why, and another try."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from schemas.codec import Codec
from schemas.errors import BadInput, Undecodable
from schemas.events import EventRejected
from streams.log.protocol import Log

_POLL_SECONDS = 0.5
_EVENTS_MAX = 1000


@dataclass(frozen=True)
class DeadLetter:
    """One refused message, numbered in the order of the topic."""

    number: int
    reject: EventRejected

    @property
    def moment(self) -> str:
        return datetime.fromtimestamp(self.reject.meta.timestamp / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def dead_letters(log: Log, stage: str | None = None, run_id: str | None = None) -> list[DeadLetter]:
    """Everything that was refused, of one stage or of one run, each message once however often it was refused. Its number
    does not depend on what is asked for."""
    reader = log.reader(["dead-letters"])
    found: dict[str, EventRejected] = {}
    try:
        while not reader.caught_up():
            for delivery in reader.poll(_EVENTS_MAX, _POLL_SECONDS):
                if isinstance(delivery.event, EventRejected):
                    found.setdefault(delivery.event.meta.id, delivery.event)
    finally:
        reader.close()
    numbered = [DeadLetter(number, reject) for number, reject in enumerate(found.values(), start=1)]
    return [
        letter
        for letter in numbered
        if stage in (None, letter.reject.stage) and run_id in (None, letter.reject.meta.run_id)
    ]


def select(letters: Sequence[DeadLetter], numbers: Sequence[int]) -> list[DeadLetter]:
    """The letters of these numbers. Raises BadInput."""
    by_number = {letter.number: letter for letter in letters}
    for number in numbers:
        if number not in by_number:
            raise BadInput(f"there is no dead letter {number}; `replayground dead-letters list` shows them")
    return [by_number[number] for number in numbers]


def describe(codec: Codec, letter: DeadLetter) -> str:
    """All that is known of a refused message."""
    reject = letter.reject
    try:
        original = repr(codec.decode(reject.original))
    except Undecodable as error:
        original = f"cannot be read ({error}): {reject.original[:400]!r}"
    return (
        f"dead letter {letter.number}, {letter.moment}\n"
        f"  refused by  {reject.stage}\n"
        f"  because     {reject.reason}\n"
        f"  came from   {reject.origin}\n"
        f"  key         {reject.original_key!r}\n"
        f"  message     {original}"
    )


def redrive(log: Log, letters: Sequence[DeadLetter]) -> None:
    """Writes the messages again where they came from, as they were. Whoever took one already knows it by its id."""
    for letter in letters:
        log.append_bytes(letter.reject.origin.topic, letter.reject.original_key, letter.reject.original)
    log.flush()
