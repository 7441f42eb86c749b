"""numbers: which tasks of a session were submitted, as a count and the few that a crash left out of order.

Ids of tasks follow from run, session and number, so a count stands for all ids before it, and a restarted feeder goes on with
the next number. A feeder writes at most EVENTS_PER_DECISION_MAX tasks between two acknowledgements: what is on the log lies
within so many numbers of the first one that is missing.
"""

from collections import deque
from collections.abc import Callable

from msgspec import Struct

EVENTS_PER_DECISION_MAX = 500
_EXPECTED = 512
assert _EXPECTED >= EVENTS_PER_DECISION_MAX


class NumbersState(Struct, frozen=True, array_like=True):
    next: int
    ahead: list[int]


class SubmittedNumbers:
    """Pure. Ids may be noted in any order."""

    def __init__(self, id_of: Callable[[int], str], state: NumbersState | None = None) -> None:
        self._id_of = id_of
        self.next = state.next if state is not None else 0
        "all before it were submitted, and it was not"
        self._ahead: set[int] = set(state.ahead) if state is not None else set()
        "submitted although `next` was not"
        self._expected: dict[str, int] = {}
        "ids of the numbers from `next` on; none before the first id is noted"
        self._expected_ids: deque[str] = deque()
        self._unplaced: set[str] = set()
        "ids that were noted before those of many lower numbers; or repeats"
        self._is_settled = False

    def note(self, task_id: str) -> None:
        """A task of the session is on the log."""
        if not self._expected:
            for expected in range(self.next, self.next + _EXPECTED):
                self._expect(expected)
        number = self._expected.get(task_id)
        if number is not None:
            self.submit(number)
        elif not self._is_settled:
            self._unplaced.add(task_id)

    def submit(self, number: int) -> None:
        """This number is submitted."""
        self._ahead.add(number)
        while self.next in self._ahead:
            self._ahead.discard(self.next)
            self.next += 1
            if self._expected:
                del self._expected[self._expected_ids.popleft()]
                self._expect(self.next + _EXPECTED - 1)
        assert len(self._expected) == len(self._expected_ids), "two numbers have the same task id"

    def settle(self) -> None:
        """Everything that was on the log has been noted: what has no place is a repeat."""
        self._is_settled = True
        self._unplaced.clear()

    def state(self) -> NumbersState:
        return NumbersState(self.next, sorted(self._ahead))

    def _expect(self, number: int) -> None:
        task_id = self._id_of(number)
        self._expected[task_id] = number
        self._expected_ids.append(task_id)
        if task_id in self._unplaced:
            self._unplaced.discard(task_id)
            self._ahead.add(number)
