"""ends: how many tasks of a session have ended, each counted once.

Sessions with an end (demonstrations, evaluations) remember every ended task until all have ended. Training may have no
end, so only the newest ended tasks of each partition are remembered. That is enough for copies that a crash of the
streams makes: they are on the partition of the first one, and close to it. A copy from further back makes the feeder
keep one task more in advance, and nothing else.
"""

import hashlib
from collections.abc import Iterable

from msgspec import Struct

from replayground.schemas.events import AttemptEnded

RECENT_ENDS = 256
"ended tasks of each partition whose copies are recognised; the streams commit several times within so many"


def counts(event: AttemptEnded) -> bool:
    """Whether an end fills its member. After infra_error the member is requested again."""
    return event.ended_by != "infra_error" and event.meta.purpose != "replay"


def short_name(task_id: str) -> bytes:
    # 8 bytes instead of 36 keep the snapshot small.
    return hashlib.blake2b(task_id.encode(), digest_size=8).digest()


class FiniteEnds:
    """Ends of a session whose tasks have one member each. Pure."""

    def __init__(self, ended: Iterable[bytes] = ()) -> None:
        self._ended = set(ended)

    def __len__(self) -> int:
        return len(self._ended)

    def note(self, event: AttemptEnded) -> None:
        self._ended.add(short_name(event.meta.task_id or ""))

    def state(self) -> list[bytes]:
        return sorted(self._ended)


class PartitionEnds(Struct):
    """Ends of training on one partition, in the order of the partition."""

    ended: int = 0
    open: dict[bytes, list[int]] = {}
    "indexes of ended members, by group that has not ended"
    recent: list[bytes] = []


class EndlessEnds:
    """Ends of the training session. Pure."""

    def __init__(self, partitions: dict[int, PartitionEnds] | None = None) -> None:
        self._partitions = {
            number: _Partition(found.ended, dict(found.open), dict.fromkeys(found.recent))
            for number, found in (partitions or {}).items()
        }

    def __len__(self) -> int:
        """Number of ended training tasks of the run."""
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
        # A copy of an end of a task that was counted.
        if name in self.recent:
            return
        members = {*self.open.get(name, ()), event.index}
        if len(members) < event.group_size:
            # A list, because msgpack has no sets; sorted, so that equal facts give equal bytes.
            self.open[name] = sorted(members)
            _trim(self.open)
            return
        self.open.pop(name, None)
        assert name not in self.recent, "a task is counted once"
        self.ended += 1
        self.recent[name] = None
        _trim(self.recent)


def _trim[Value](newest: dict[bytes, Value]) -> None:
    """Drops the oldest entry beyond RECENT_ENDS, in the order of the partition."""
    # Open groups are far fewer. The limit is for groups that a copy of a forgotten end opens again: they never end.
    if len(newest) > RECENT_ENDS:
        del newest[next(iter(newest))]
