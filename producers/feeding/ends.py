"""ends: how many tasks of a session have ended, each counted once.

Sessions that end (demonstrations, evaluations) remember every task that ended until all have. Training need not end: copies of
an AttemptEnded stand on the partition of the first one, a crash of the streams away, so the newest ends of every partition are
remembered. A copy from further away would make the feeder keep one task more in advance, and nothing else.
"""

import hashlib
from collections.abc import Iterable

from msgspec import Struct

from schemas.events import AttemptEnded

RECENT_ENDS = 256
"tasks by partition that a copy of their end is recognised of; the streams commit several times in so many"


def counts(event: AttemptEnded) -> bool:
    """A member is filled by an attempt that ended otherwise than by the infrastructure's fault."""
    return event.ended_by != "infra_error" and event.meta.purpose != "replay"


def short_name(task_id: str) -> bytes:
    return hashlib.blake2b(task_id.encode(), digest_size=8).digest()


class FiniteEnds:
    """Of a session whose tasks have one member each. Pure."""

    def __init__(self, ended: Iterable[bytes] = ()) -> None:
        self._ended = set(ended)

    def __len__(self) -> int:
        return len(self._ended)

    def note(self, event: AttemptEnded) -> None:
        self._ended.add(short_name(event.meta.task_id or ""))

    def state(self) -> list[bytes]:
        return sorted(self._ended)


class PartitionEnds(Struct):
    """Of one partition, in its order."""

    ended: int = 0
    open: dict[bytes, list[int]] = {}
    "members that ended, of groups of which not all have"
    recent: list[bytes] = []


class EndlessEnds:
    """Of the session of training. Pure."""

    def __init__(self, partitions: dict[int, PartitionEnds] | None = None) -> None:
        self._partitions = {
            number: _Partition(found.ended, dict(found.open), dict.fromkeys(found.recent))
            for number, found in (partitions or {}).items()
        }

    def __len__(self) -> int:
        return sum(partition.ended for partition in self._partitions.values())

    def note(self, event: AttemptEnded, partition: int) -> None:
        self._partitions.setdefault(partition, _Partition(0, {}, {})).note(event)

    def state(self) -> dict[int, PartitionEnds]:
        return {
            number: PartitionEnds(partition.ended, partition.open, list(partition.recent))
            for number, partition in sorted(self._partitions.items())
        }


class _Partition:
    def __init__(self, ended: int, open_: dict[bytes, list[int]], recent: dict[bytes, None]) -> None:
        self.ended = ended
        self.open = open_
        self.recent = recent

    def note(self, event: AttemptEnded) -> None:
        name = short_name(event.meta.task_id or "")
        if name in self.recent:
            return
        members = {*self.open.get(name, ()), event.index}
        if len(members) < event.group_size:
            self.open[name] = sorted(members)
            _trim(self.open)
            return
        self.open.pop(name, None)
        assert name not in self.recent, "a task is counted once"
        self.ended += 1
        self.recent[name] = None
        _trim(self.recent)


def _trim[Value](newest: dict[bytes, Value]) -> None:
    """By the order of the partition. Open groups are far fewer, but for copies of ends that were forgotten."""
    if len(newest) > RECENT_ENDS:
        del newest[next(iter(newest))]
