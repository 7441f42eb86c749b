"""How long a lineage takes in a run of a million trajectories: part `lineage` of bench.replay.

The trace store holds one run with every kind of event that practice writes, some ten million rows, made by copying a
part of it again and again under other names, versions and offsets. A lineage of a version is asked as the traces program
answers it: from the query to the finished answer, by the clock, each version once, so that no answer is kept from before.
Beside it the processor seconds of the slowest, for a machine that is busy.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from bench.rounds import Figure, figure
from replayground.consumers.clickhouse.columns import TABLES_STORED, stored_columns
from replayground.consumers.clickhouse.rows import Row, event_row
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.reports.lineage import Lineages
from replayground.schemas.events import Address, Event, StepTaken
from replayground.streams.rules.runs import fold
from tests.consumers.synthetic_run import SyntheticRun, run_of

_RUN = "long"
_STEPS = 16
"of the part that is copied, each of 16 groups of 8 as the default job has them"
_FIRST = 2
"version that the first of these steps makes, after base model and cold start"
_NAMES = ("id", "task_id", "group_id", "trajectory_id", "attempt_id", "causation_id", "batch_id")
_LISTS = ("member_trajectories", "member_attempts", "member_groups", "batches")
_VERSIONS = ("version", "base_version", "policy_version", "policy_version_oldest", "policy_floor")
_MERGES_SECONDS = 600.0
_PLACES = ("offset", "trajectory_offset")


def lineage(quick: bool) -> dict[str, Figure]:
    """Limit: lineage_seconds at most 2."""
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder:
        return measured(f"chdb://{folder}/store", 10_000 if quick else 1_000_000, 5 if quick else 20)


def measured(dsn: str, trajectories: int, rounds: int) -> dict[str, Figure]:
    """Figures in a store that is filled first with at least so many trajectories of one run."""
    store = Store(dsn, "lineage", threads=1)
    try:
        long = LongRun(store)
        count = long.grow(trajectories)
        _await_merges(store)
        lineages = Lineages(store, fold(long.prefix), list)
        versions = _spread(long.versions, rounds)
        forwards = [_timed(lineages, f"{_RUN}:{version}") for version in versions]
        names = [row[0] for row in store.ask(_SOME_TRAJECTORIES.format(count=rounds)).rows]
        backwards = [_timed(lineages, name) for name in names]
    finally:
        store.close()
    print(f"  versions {versions}: {[round(seconds, 3) for seconds, _ in forwards]} s", file=sys.stderr, flush=True)
    return {
        "lineage_seconds": figure([max(seconds for seconds, _ in forwards)]),
        "lineage_seconds_median": figure(seconds for seconds, _ in forwards),
        "lineage_processor_seconds": figure([max(processor for _, processor in forwards)]),
        "lineage_of_trajectory_seconds": figure([max(seconds for seconds, _ in backwards)]),
        "lineage_trajectories": figure([count]),
    }


_SOME_TRAJECTORIES = (
    f"SELECT trajectory_id FROM events WHERE run_id = '{_RUN}' AND type = 'TrajectoryAssembled' AND purpose = 'train' "
    "ORDER BY cityHash64(id) LIMIT {count}"
)


def _await_merges(store: Store) -> None:
    """ClickHouse merges what was inserted at once here, and in practice over the hours of such a run."""
    until = time.monotonic() + _MERGES_SECONDS
    while int(store.ask("SELECT count() FROM system.merges").rows[0][0]) and time.monotonic() < until:
        time.sleep(0.5)


def _spread(newest: int, count: int) -> list[int]:
    """The first versions, the newest, and some between."""
    chance = random.Random(0)
    return sorted({0, 1, newest, *(chance.randrange(_FIRST, newest) for _ in range(max(1, count - 3)))})


def _timed(lineages: Lineages, of: str) -> tuple[float, float]:
    """Seconds by the clock, and of the processor with ClickHouse's threads."""
    began, processor = time.perf_counter(), time.process_time()
    found = lineages.of(of)
    seconds = time.perf_counter() - began, time.process_time() - processor
    if found.version is not None and found.version.version.version >= _FIRST:
        batch = found.version.batch
        assert batch is not None
        # All of it was found, with its rewards: a lineage that finds nothing is fast.
        assert len(batch.trajectories) == 128
        assert all(member.rewards and member.run_id == _RUN for member in batch.trajectories)
        assert found.version.steps == found.version.version.version + 1
    assert found.trajectory is None or [step.run_id for step in found.trajectory.steps] == [_RUN]
    return seconds


@dataclass(frozen=True)
class _Shift:
    """What tells a copy from what it is a copy of."""

    name: str
    offsets: int
    steps: int
    microseconds: int

    def of(self, column: str) -> str:
        """The SQL expression of a column of the copy."""
        if column in _NAMES:
            return f"concat(`{column}`, '{self.name}')"
        if column in _LISTS:
            return f"arrayMap(one -> concat(one, '{self.name}'), `{column}`)"
        if column in _VERSIONS:
            return f"`{column}` + {self.steps}"
        if column in _PLACES:
            return f"`{column}` + {self.offsets}"
        if column == "member_offsets":
            return f"arrayMap(one -> one + {self.offsets}, `{column}`)"
        if column == "index":
            return f"if(type = 'BatchCut', `index` + {self.steps}, `index`)"
        return f"`{column}` + {self.microseconds}" if column == "timestamp" else f"`{column}`"


class LongRun:
    """A run in a store, which is doubled until it is long enough."""

    def __init__(self, store: Store) -> None:
        job = replace(run_of(_STEPS, 1).job, groups_per_batch=16, group_size=8)
        made = SyntheticRun(replace(run_of(_STEPS, 1, run_id=_RUN), job=job), evaluation_tasks=0)
        events = list(made.events())
        first = next(at for at, event in enumerate(events) if event.meta.session_id == "train")
        self.prefix, self._part = events[:first], _until_last_step(events[first:])
        rows = list(_rows([*self.prefix, *self._part]))
        store.insert(rows)
        self._store = store
        self._offsets = 1 + max(row["offset"] for row in rows)
        self._began, self._ended = self._part[0].meta.timestamp, self._part[-1].meta.timestamp
        self._copies = 1

    @property
    def versions(self) -> int:
        """The newest version."""
        return _FIRST + self._copies * _STEPS - 1

    def grow(self, trajectories: int) -> int:
        """Doubles the run until it has so many trajectories; returns how many it has then."""
        count = self._count()
        while count < trajectories:
            self._double()
            count = self._count()
            print(f"  {count:,} trajectories", file=sys.stderr, flush=True)
        return count

    def _double(self) -> None:
        times = self._copies
        shift = _Shift(
            f"-{times}", times * self._offsets, times * _STEPS, times * (self._ended - self._began + 1_000_000)
        )
        for table in TABLES_STORED:
            names = stored_columns(table)
            told = ", ".join(f"`{name}`" for name in names)
            shifted = ", ".join(shift.of(name) for name in names)
            self._store._writing.command(
                f"INSERT INTO {table} ({told}) SELECT {shifted} FROM {table} "
                f"WHERE run_id = '{_RUN}' AND timestamp >= {self._began}"
            )
        self._copies *= 2

    def _count(self) -> int:
        asked = f"SELECT count() FROM events WHERE run_id = '{_RUN}' AND type = 'TrajectoryAssembled'"
        return int(self._store.ask(asked).rows[0][0])


def _until_last_step(events: Sequence[Event]) -> list[Event]:
    """Up to what belongs to the last step: the end of the run is not copied."""
    last = max(at for at, event in enumerate(events) if isinstance(event, StepTaken))
    return list(events[: last + 3])


def _rows(events: Sequence[Event]) -> Iterator[Row]:
    """Rows at the addresses that the events themselves name: trajectories are counted from 1."""
    next_offset: Counter[Any] = Counter({"trajectories": 1})
    for event in events:
        topic = event.meta.topic
        yield event_row(Address(topic, 0, next_offset[topic]), event)
        next_offset[topic] += 1
