"""What a worker may commit, however often partitions are moved, and what it takes up while a slow rollout holds the line."""

from hypothesis import given
from hypothesis import strategies as st

from replayground.producers.intake import PendingRequests
from replayground.schemas.events import Address, Position


def at(offset: int, partition: int = 0) -> Address:
    return Address("rollouts", partition, offset)


def to_commit(windows: PendingRequests) -> list[int]:
    return [position.offset for position in windows.to_commit()]


def taken_up(windows: PendingRequests, *offsets: int) -> None:
    for offset in offsets:
        assert windows.begin(at(offset))
        assert windows.start(at(offset))


def test_the_lowest_unfinished_offset_is_committed() -> None:
    windows = PendingRequests()
    taken_up(windows, 5, 6, 8, 9)
    assert not windows.begin(at(6)), "delivered again after a rebalance"
    windows.end(at(6))
    windows.end(at(9))
    assert to_commit(windows) == [5]
    windows.note_committed(windows.to_commit())
    assert to_commit(windows) == []
    windows.end(at(5))
    assert to_commit(windows) == [8]
    assert (windows.waiting, windows.running, windows.uncommitted) == (0, 1, 4)
    windows.note_committed(windows.to_commit())
    assert windows.uncommitted == 2
    windows.end(at(8))
    assert windows.to_commit() == [Position(topic="rollouts", partition=0, offset=10)]


def test_what_waits_in_a_lost_partition_is_not_played_until_it_is_delivered_again() -> None:
    windows = PendingRequests()
    taken_up(windows, 0)
    assert windows.begin(at(1))
    windows.keep_only([])
    assert not windows.start(at(1)), "its new owner plays it"
    assert (windows.waiting, windows.running) == (0, 1)
    assert not windows.begin(at(0)), "given back: still played here"
    assert windows.begin(at(1)), "given back: nobody played it"
    assert windows.start(at(1))
    assert not windows.start(at(1)), "the queue held it twice"


def test_nothing_is_committed_for_the_new_owner_of_a_partition() -> None:
    windows = PendingRequests()
    taken_up(windows, 0, 1)
    windows.keep_only([])
    windows.end(at(0))
    windows.end(at(1))
    assert windows.to_commit() == []
    assert windows.uncommitted == 0


def test_a_partition_that_comes_back_is_never_committed_behind_what_others_did() -> None:
    windows = PendingRequests()
    taken_up(windows, 0, 1)
    windows.keep_only([])
    assert windows.begin(at(7)), "another worker has committed 7"
    assert to_commit(windows) == [7]
    windows.end(at(0))
    windows.end(at(1))
    assert to_commit(windows) == [7]


def test_what_others_asked_for_takes_no_room_and_is_committed() -> None:
    windows = PendingRequests()
    for offset in range(1000):
        windows.pass_by(at(offset))
    assert (windows.waiting, windows.running, windows.uncommitted) == (0, 0, 0)
    assert to_commit(windows) == [1000]
    taken_up(windows, 1000)
    windows.pass_by(at(1001))
    assert to_commit(windows) == [1000], "not past what still runs"
    windows.end(at(1000))
    assert to_commit(windows) == [1002]


def test_ends_behind_a_slow_rollout_make_room() -> None:
    windows = PendingRequests()
    taken_up(windows, *range(50))
    for offset in range(1, 50):
        windows.end(at(offset))
    assert (windows.waiting + windows.running, windows.uncommitted) == (1, 50)


class _Broker:
    """One partition, two workers, and everything that a rebalance may do between them."""

    def __init__(self) -> None:
        self.workers = (PendingRequests(), PendingRequests())
        self.owner: int | None = None
        self.position = 0
        self.committed = 0
        self.ended: set[int] = set()
        self.running: list[set[int]] = [set(), set()]

    def move(self, owner: int) -> None:
        self.owner, self.position = owner, self.committed
        for number, worker in enumerate(self.workers):
            worker.keep_only([])
            assert not worker.waiting, number

    def deliver(self) -> None:
        if self.owner is not None and self.position < 30:
            self.workers[self.owner].begin(at(self.position))
            self.position += 1

    def start(self, worker: int) -> None:
        for offset in range(30):
            if self.workers[worker].start(at(offset)):
                self.running[worker].add(offset)
                return

    def end(self, worker: int, which: int) -> None:
        if self.running[worker]:
            offset = sorted(self.running[worker])[which % len(self.running[worker])]
            self.running[worker].remove(offset)
            self.workers[worker].end(at(offset))
            self.ended.add(offset)

    def commit(self, worker: int) -> None:
        positions = self.workers[worker].to_commit()
        assert not positions or worker == self.owner, "only the owner commits"
        for position in positions:
            assert self.ended >= set(range(position.offset)), "everything before it has ended"
            assert position.offset >= self.committed, "a commit never goes back"
            self.committed = position.offset
        self.workers[worker].note_committed(positions)


_steps = st.one_of(
    st.tuples(st.just("move"), st.integers(0, 1)),
    st.tuples(st.just("deliver")),
    st.tuples(st.just("start"), st.integers(0, 1)),
    st.tuples(st.just("end"), st.integers(0, 1), st.integers(0, 9)),
    st.tuples(st.just("commit"), st.integers(0, 1)),
)


@given(st.lists(_steps, max_size=150))
def test_whatever_is_moved_nothing_is_lost_and_everything_ends(steps: list[tuple[str, int]]) -> None:
    broker = _Broker()
    broker.move(0)
    for name, *arguments in steps:
        getattr(broker, name)(*arguments)
    broker.move(1)
    while broker.committed < 30:
        for _ in range(30):
            broker.deliver()
            broker.start(1)
        for worker in (0, 1):
            while broker.running[worker]:
                broker.end(worker, 0)
        broker.commit(1)
