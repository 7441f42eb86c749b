"""Which trajectories are not judged yet: the lowest of each partition bounds what may be committed."""

from replayground.schemas.events import Address, Position


class PendingTrajectories:
    """The trajectories that were taken from the log, by partition. For one thread, which reads all partitions alone."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        "the offset after the newest delivery, by partition"
        self._open: dict[int, dict[int, int]] = {}
        "by partition and offset: how many judgements of the trajectory are missing"
        self._committed: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def begin(self, address: Address, judgements: int) -> None:
        """A trajectory was delivered, and waits for so many judgements; 0 = it concerns no judge."""
        self._next[address.partition] = address.offset + 1
        if judgements:
            self._open.setdefault(address.partition, {})[address.offset] = judgements

    def end_one(self, address: Address) -> None:
        """One judgement of the trajectory is on the log."""
        waiting = self._open[address.partition]
        waiting[address.offset] -= 1
        if not waiting[address.offset]:
            del waiting[address.offset]

    def to_commit(self, topic: str) -> list[Position]:
        """The lowest offset that is not finished, of each partition where it moved since note_committed."""
        lowest = {partition: min(self._open.get(partition, ()), default=end) for partition, end in self._next.items()}
        return [
            Position(topic=topic, partition=partition, offset=offset)
            for partition, offset in lowest.items()
            if self._committed.get(partition) != offset
        ]

    def note_committed(self, positions: list[Position]) -> None:
        self._committed |= {position.partition: position.offset for position in positions}
