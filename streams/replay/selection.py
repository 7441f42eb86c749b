"""Selections of trajectories: packed addresses on the log, and the sets that a replay looks them up in."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from replayground.schemas.errors import BadInput
from replayground.schemas.events import Address, Meta, TrajectoriesSelected
from replayground.streams.log.protocol import Log

TOPIC = "trajectories"
_EVENTS_MAX = 1000


@dataclass(frozen=True)
class PartitionSelection:
    """The chosen offsets of one partition of topic trajectories, ascending, with the chosen members of each group."""

    offsets: NDArray[numpy.int64]
    group_sizes: NDArray[numpy.int32]

    @classmethod
    def empty(cls) -> "PartitionSelection":
        return cls(numpy.empty(0, numpy.int64), numpy.empty(0, numpy.int32))

    def group_size(self, offset: int) -> int | None:
        """How many members of its group were chosen; None when the trajectory at this offset was not."""
        place = int(numpy.searchsorted(self.offsets, offset))
        if place == len(self.offsets) or int(self.offsets[place]) != offset:
            return None
        return int(self.group_sizes[place])


def selected_event(
    meta: Meta, name: str, runs: Sequence[str], where: str, chosen: Iterable[tuple[int, int, int]]
) -> TrajectoriesSelected:
    """A selection of (partition, offset, group size). Equal choices have equal digests, in whatever order they come."""
    rows = numpy.array(sorted(set(chosen)), dtype=numpy.int64).reshape(-1, 3)
    partitions = rows[:, 0].astype("<i4").tobytes()
    offsets = rows[:, 1].astype("<i8").tobytes()
    group_sizes = rows[:, 2].astype("<i4").tobytes()
    return TrajectoriesSelected(
        meta=meta,
        name=name,
        runs=list(runs),
        where=where,
        partitions=partitions,
        offsets=offsets,
        group_sizes=group_sizes,
        sha256=hashlib.sha256(partitions + offsets + group_sizes).hexdigest(),
    )


def by_partition(event: TrajectoriesSelected) -> dict[int, PartitionSelection]:
    """The selection as sets to look addresses up in. Raises BadInput when its bytes are not what its digest says."""
    packed = event.partitions + event.offsets + event.group_sizes
    if hashlib.sha256(packed).hexdigest() != event.sha256:
        raise BadInput(f"selection {event.name} is damaged: its addresses do not have the digest {event.sha256}")
    partitions = numpy.frombuffer(event.partitions, "<i4")
    offsets = numpy.frombuffer(event.offsets, "<i8").astype(numpy.int64)
    sizes = numpy.frombuffer(event.group_sizes, "<i4").astype(numpy.int32)
    return {
        int(partition): PartitionSelection(offsets[partitions == partition], sizes[partitions == partition])
        for partition in numpy.unique(partitions)
    }


def addresses_of(event: TrajectoriesSelected) -> Iterator[Address]:
    """All chosen addresses, by partition and offset."""
    for partition, selection in sorted(by_partition(event).items()):
        for offset in selection.offsets:
            yield Address(TOPIC, partition, int(offset))


def selections_on_log(log: Log) -> list[TrajectoriesSelected]:
    """All selections that are on the log, oldest first. Raises LogUnavailable."""
    found: list[TrajectoriesSelected] = []
    reader = log.reader(["selections"])
    try:
        while not reader.caught_up():
            events = [delivery.event for delivery in reader.poll(_EVENTS_MAX, 0.2)]
            found += [event for event in events if isinstance(event, TrajectoriesSelected)]
    finally:
        reader.close()
    return found


def find_selection(log: Log, name_or_id: str) -> TrajectoriesSelected:
    """The selection with this id, or the newest with this name. Raises BadInput when there is none."""
    found = [event for event in selections_on_log(log) if name_or_id in (event.meta.id, event.name)]
    if not found:
        raise BadInput(
            f'there is no selection {name_or_id}: `replayground sql "SELECT name, trajectories FROM selections"` '
            "lists them"
        )
    return found[-1]
