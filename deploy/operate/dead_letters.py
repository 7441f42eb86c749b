"""`replayground dead-letters`: lists rejected messages with their reasons and writes them again."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput, Undecodable
from replayground.schemas.events import EventRejected
from replayground.streams.log.protocol import Log

_POLL_SECONDS = 0.5
_EVENTS_MAX = 1000


@dataclass(frozen=True)
class DeadLetter:
    """One rejected message, numbered in the order of topic dead-letters."""

    number: int
    reject: EventRejected

    @property
    def moment(self) -> str:
        return datetime.fromtimestamp(self.reject.meta.timestamp / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def dead_letters(log: Log, stage: str | None = None, run_id: str | None = None) -> list[DeadLetter]:
    """All rejected messages, or those of one stage or run. Each message is listed once, however often it was rejected.
    Reads the whole topic. Raises LogUnavailable."""
    reader = log.reader(["dead-letters"])
    found: dict[str, EventRejected] = {}
    try:
        # To the end as it is now; a letter that is written meanwhile shows the next time.
        while not reader.caught_up():
            for delivery in reader.poll(_EVENTS_MAX, _POLL_SECONDS):
                if isinstance(delivery.event, EventRejected):
                    # Rejecting the same message again gives the same id, since the id is derived from its origin.
                    found.setdefault(delivery.event.meta.id, delivery.event)
    finally:
        reader.close()
    # Numbered before the filter: a number means the same message whatever was asked for.
    numbered = [DeadLetter(number, reject) for number, reject in enumerate(found.values(), start=1)]
    return [
        letter
        for letter in numbered
        if stage in (None, letter.reject.stage) and run_id in (None, letter.reject.meta.run_id)
    ]


def select(letters: Sequence[DeadLetter], numbers: Sequence[int]) -> list[DeadLetter]:
    """The letters with these numbers. Raises BadInput for a number that does not exist."""
    by_number = {letter.number: letter for letter in letters}
    for number in numbers:
        if number not in by_number:
            raise BadInput(f"there is no dead letter {number}; `replayground dead-letters list` shows them")
    return [by_number[number] for number in numbers]


def describe(codec: Codec, letter: DeadLetter) -> str:
    """A rejected message as text, decoded if possible. Raises LogUnavailable."""
    reject = letter.reject
    try:
        original = repr(codec.decode(reject.original))
    except Undecodable as error:
        # Often the reason for the rejection: the beginning of the bytes is shown instead.
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
    """Writes the messages to their original topics again, byte for byte. Raises LogUnavailable."""
    # Safe to repeat: a consumer that has processed a message recognises its id.
    for letter in letters:
        log.append_bytes(letter.reject.origin.topic, letter.reject.original_key, letter.reject.original)
    log.flush()
