"""numbers: which tasks of a session were submitted, as a count and the few that a crash left out of order.

Task ids are derived from run, session and number, so a count stands for all ids before it, and a restarted feeder
continues with the next number. A feeder writes at most EVENTS_PER_DECISION_MAX tasks between two acknowledgements. So
every task on the log is within so many numbers of the first one that is missing.
"""

from collections import deque
from collections.abc import Callable

from msgspec import Struct

# The scheduler recognises copies of as many tasks as one decision can leave unacknowledged (ledger.RECENT_TASKS).
EVENTS_PER_DECISION_MAX = 500
# How many ids from `next` on are kept ready to be recognised. Must cover what one decision may have written.
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
        "the first number that was not submitted"
        self._ahead: set[int] = set(state.ahead) if state is not None else set()
        "numbers above `next` that were submitted"
        self._expected: dict[str, int] = {}
        "number by id, for _EXPECTED numbers from `next` on; empty until the first id is noted"
        self._expected_ids: deque[str] = deque()
        self._unplaced: set[str] = set()
        "ids that are not expected: of much higher numbers, read early, or copies"
        self._is_settled = False

    def note(self, task_id: str) -> None:
        """Takes note of a task of the session that is on the log."""
        # Ids cannot be turned back into numbers, so they are recognised among those expected next.
        if not self._expected:
            for expected in range(self.next, self.next + _EXPECTED):
                self._expect(expected)
        number = self._expected.get(task_id)
        if number is not None:
            self.submit(number)
        # Partitions are read side by side, so while catching up a far higher number may come first.
        elif not self._is_settled:
            self._unplaced.add(task_id)

    def submit(self, number: int) -> None:
        """Takes note that this number is submitted."""
        self._ahead.add(number)
        while self.next in self._ahead:
            self._ahead.discard(self.next)
            self.next += 1
            # The window moves on by one.
            if self._expected:
                del self._expected[self._expected_ids.popleft()]
                self._expect(self.next + _EXPECTED - 1)
        assert len(self._expected) == len(self._expected_ids), "two numbers have the same task id"

    def settle(self) -> None:
        """Call it when everything on the log has been noted: ids that are still not expected are copies."""
        self._is_settled = True
        self._unplaced.clear()

    def state(self) -> NumbersState:
        return NumbersState(self.next, sorted(self._ahead))

    def _expect(self, number: int) -> None:
        task_id = self._id_of(number)
        self._expected[task_id] = number
        self._expected_ids.append(task_id)
        # It was read before its number came into the window.
        if task_id in self._unplaced:
            self._unplaced.discard(task_id)
            self._ahead.add(number)
