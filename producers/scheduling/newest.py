"""The greatest of many values in bounded memory, the same in whatever order they are added."""

import heapq
from collections.abc import Iterable, Iterator


class Newest[T: (int, tuple[int, str])]:
    """The `limit` greatest of all distinct values that were added. A value that was dropped and is added again is
    dropped again, so a copy changes nothing."""

    def __init__(self, limit: int, values: Iterable[T] = ()) -> None:
        self._limit = limit
        self._heap: list[T] = []
        self._held: set[T] = set()
        for value in values:
            self.add(value)

    def __contains__(self, value: T) -> bool:
        return value in self._held

    def __iter__(self) -> Iterator[T]:
        return iter(sorted(self._held))

    def add(self, value: T) -> T | None:
        """Adds a value; returns the value that was dropped for it, if any. That may be the value itself."""
        if value in self._held:
            return None
        self._held.add(value)
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, value)
            return None
        # The heap has its least value on top, which is the one to drop.
        out = heapq.heappushpop(self._heap, value)
        self._held.discard(out)
        return out

    @property
    def floor(self) -> T | None:
        """Every smaller value was dropped. None while there is still room."""
        return self._heap[0] if len(self._heap) == self._limit else None
