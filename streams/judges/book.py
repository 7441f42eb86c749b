"""What topic `judgements` says about a run: which judgements exist, which verdicts wait for others, what was spent."""

from collections.abc import Iterator

from replayground.schemas.events import Address, Event, JudgementMade, VerdictGiven
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log

_EVENTS_MAX = 1000

type AttemptKey = tuple[str, str]
"id of the attempt, name of the scorer"


class JudgementBook:
    """A fold of topic `judgements`. An event that is noted twice changes nothing."""

    def __init__(self) -> None:
        self._first_at: dict[str, tuple[int, int]] = {}
        "id of a judgement -> partition and offset of the first event with it"
        self._given: dict[AttemptKey, dict[int, VerdictGiven]] = {}
        "verdicts that wait for others, by offset; all of an attempt are on one partition"
        self.tokens = 0
        self.cost = 0.0

    def note(self, event: Event, address: Address) -> None:
        if isinstance(event, JudgementMade) and event.meta.id not in self._first_at:
            self._first_at[event.meta.id] = (address.partition, address.offset)
            self.tokens += event.tokens_in + event.tokens_out
            self.cost += event.cost
            # Their judgement exists: further verdicts change no reward.
            self._given.pop(_key(event), None)
        elif isinstance(event, VerdictGiven):
            self._given.setdefault(_key(event), {})[address.offset] = event

    def has(self, judgement_id: str) -> bool:
        return judgement_id in self._first_at

    def is_first(self, event: JudgementMade, address: Address) -> bool:
        """False for a repeat: an attempt that was judged twice, by a program that was killed, has one reward."""
        return self._first_at[event.meta.id] == (address.partition, address.offset)

    def verdicts(self, event: VerdictGiven) -> list[VerdictGiven]:
        """All verdicts on the attempt of this one by the same scorer, in the order of the log."""
        given = self._given[_key(event)]
        return [given[offset] for offset in sorted(given)]


def read_book(log: Log, run: Run) -> JudgementBook:
    """The book of a run, from all that is on the log now. Raises LogUnavailable."""
    book = JudgementBook()
    for event, address in judgements_of(log, run):
        book.note(event, address)
    return book


def judgements_of(log: Log, run: Run) -> Iterator[tuple[JudgementMade | VerdictGiven, Address]]:
    """The judgements and verdicts of a run that are on the log now. Raises LogUnavailable."""
    reader = log.reader(["judgements"], start=run.start, run_id=run.run_id)
    try:
        while not reader.caught_up():
            for delivery in reader.poll(_EVENTS_MAX, 0.2):
                event = delivery.event
                # run_id of the reader skips most messages of other runs, not all of them (Log.reader).
                if isinstance(event, JudgementMade | VerdictGiven) and event.meta.run_id == run.run_id:
                    yield event, delivery.address
    finally:
        reader.close()


def _key(event: JudgementMade | VerdictGiven) -> AttemptKey:
    return event.meta.attempt_id or "", event.judge if isinstance(event, JudgementMade) else event.scorer
