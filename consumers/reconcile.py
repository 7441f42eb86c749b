"""Compares the trace store with the log (P9) by count and checksum of each partition, and repairs it from the log.

The checksum of a partition is the sum of the CRC-32 of every row's offset, id and body. ClickHouse computes it over
its rows, this program over the rows that the log gives. A partition whose sums differ is compared row by row. A repair
deletes every row at an offset where something is wrong and inserts what the log has there.

For one run, only its own events and rows are compared, from its start positions on. Undecodable messages belong to no
run and are compared only with the whole field.

Not covered: a row beyond the end of the log also makes the running trace writer skip what is appended at its offset
later. Once the row is removed, restart the traces program or reconcile again.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from replayground.consumers.clickhouse.deliveries import delivery_row
from replayground.consumers.clickhouse.rows import Row
from replayground.consumers.clickhouse.store import Place, Store
from replayground.schemas.events import Position
from replayground.schemas.topics import FOREVER, TOPIC_BY_NAME, TOPICS
from replayground.streams.log.protocol import Delivery, Log, Reader

_EVENTS_MAX = 5000
_POLL_SECONDS = 1.0

_STRETCH = """
FROM events WHERE topic = {topic:String} AND partition = {partition:Int32}
AND offset >= {first:Int64} AND offset < {following:Int64}
"""
_OF_RUN = "AND run_id = {run:String}"
# Both must compute what `checksum` computes, over the same bytes.
_SUMS = f"SELECT count(), sum(CRC32(concat(toString(offset), ' ', id, ' ', body))) {_STRETCH}"
_ROWS = f"SELECT offset, CRC32(concat(toString(offset), ' ', id, ' ', body)) {_STRETCH}"


class PartitionComparison(Struct, frozen=True, kw_only=True):
    """What was found in one partition, and what a repair changed."""

    topic: str
    partition: int
    log_events: int
    store_rows: int
    missing: int = 0
    "events of the log without a row"
    surplus: int = 0
    "rows without an event, or beside another row of the same event"
    differing: int = 0
    "events of which no row has the right content"
    removed: int = 0
    "rows that were deleted"
    added: int = 0
    "rows that were inserted from the log"
    agrees: bool = True
    "whether store and log agree now; compared again after a repair"


class Scope(Struct, frozen=True, kw_only=True):
    """What is compared: one run from its start positions on, or by default the whole field."""

    run_id: str | None = None
    start: tuple[Position, ...] = ()

    def has(self, row: Row) -> bool:
        # Rows of undecodable messages have no run_id.
        return self.run_id is None or row.get("run_id") == self.run_id

    def first(self, place: Place) -> int:
        return next((p.offset for p in self.start if (p.topic, p.partition) == place), 0)

    def of(self, sql: str) -> str:
        return sql if self.run_id is None else sql + _OF_RUN


class _LogRange:
    """What the log has of a partition, and the range of offsets in which the store is compared with it."""

    def __init__(self, place: Place, scope: Scope) -> None:
        self.topic, self.partition = place
        self.scope = scope
        self.events = 0
        self.checksum = 0
        self.first: int | None = None
        self.following = 0

    def add(self, row: Row) -> None:
        self.events += 1
        self.checksum += checksum(row)
        self.first = row["offset"] if self.first is None else self.first
        self.following = row["offset"] + 1

    @property
    def question(self) -> dict[str, object]:
        return {
            "topic": self.topic,
            "partition": self.partition,
            "first": self._first,
            "following": self.following,
            "run": self.scope.run_id,
        }

    @property
    def _first(self) -> int:
        """Where comparing begins. Retention may have deleted what was before the first event, so rows before it are no
        surplus."""
        if self.first is None or (self.scope.run_id is not None and not self._forgets):
            return self.scope.first((self.topic, self.partition))
        return self.first

    @property
    def _forgets(self) -> bool:
        topic = TOPIC_BY_NAME.get(self.topic)
        return topic is not None and (topic.compacted or topic.retention_milliseconds != FOREVER)

    @property
    def may_have_holes(self) -> bool:
        """Whether compaction may have removed offsets between others."""
        return self.topic in TOPIC_BY_NAME and TOPIC_BY_NAME[self.topic].compacted

    def reach(self, following: int) -> None:
        """Extends the range to rows beyond the last event that was found."""
        # These rows were in the store before the log was read, so their events would have been found. Where messages
        # expire, they may have been deleted instead.
        if not self._forgets:
            self.following = max(self.following, following)


class _Differences:
    """Counts the differences of one partition. `in_store` has the checksums of all rows by offset."""

    def __init__(self, in_store: dict[int, list[int]]) -> None:
        self._in_store = in_store
        self.missing = self.surplus = self.differing = 0

    @property
    def count(self) -> int:
        return self.missing + self.surplus + self.differing

    def is_right(self, row: Row) -> bool:
        """Whether the store has exactly this row at its offset; counts what is wrong otherwise."""
        found = self._in_store.pop(row["offset"], [])
        wanted = checksum(row)
        self.missing += not found
        self.differing += bool(found) and wanted not in found
        self.surplus += max(0, len(found) - 1)
        return found == [wanted]

    def rest(self) -> list[int]:
        """Offsets of the store without an event on the log, counted as surplus. Call it after all rows were
        compared."""
        self.surplus += sum(len(found) for found in self._in_store.values())
        return sorted(self._in_store)


WHOLE_FIELD = Scope()


def reconcile(
    log: Log, store: Store, await_written: Callable[[], None], repair: bool, scope: Scope = WHOLE_FIELD
) -> list[PartitionComparison]:
    """Compares everything of the scope that is on the log now. `await_written` blocks until the store has all of it.

    Rows of messages that retention or compaction removed from the log are no differences. Reads the whole log in scope.
    Raises LogUnavailable, StoreFailed, and what `await_written` raises."""
    # Before the log is read: every row up to here must have its event on the log (see reach).
    before = store.next_offsets()
    stretches = {place: _LogRange(place, scope) for place in before}
    reader = log.reader([topic.name for topic in TOPICS], start=scope.start)
    try:
        for delivery in _everything(reader):
            place = (delivery.address.topic, delivery.address.partition)
            row = delivery_row(delivery)
            if scope.has(row):
                stretches.setdefault(place, _LogRange(place, scope)).add(row)
    finally:
        reader.close()
    # After the log was read: everything that was found must be in the store before it can be missing there.
    await_written()
    for place, following in before.items():
        stretches[place].reach(following)
    compared = [_compare(log, store, stretch, repair) for _, stretch in sorted(stretches.items())]
    if scope.run_id is None:
        return compared
    return [place for place in compared if place.log_events or place.store_rows]


def checksum(row: Row) -> int:
    return zlib.crc32(f"{row['offset']} {row.get('id', '')} ".encode() + bytes(row["body"]))


def _everything(reader: Reader) -> Iterator[Delivery]:
    while not reader.caught_up():
        yield from reader.poll(_EVENTS_MAX, _POLL_SECONDS)


def _compare(log: Log, store: Store, stretch: _LogRange, repair: bool) -> PartitionComparison:
    # Sums first: they need no rows in memory, and in most partitions they agree.
    ((rows, total),) = store.ask(stretch.scope.of(_SUMS), stretch.question).rows
    seen = PartitionComparison(
        topic=stretch.topic, partition=stretch.partition, log_events=stretch.events, store_rows=int(rows)
    )
    if int(rows) == stretch.events and int(total) == stretch.checksum:
        return seen
    mending = _Repair(store, stretch) if repair else None
    found = _differences(log, store, stretch, mending)
    # A repair is compared again instead of being believed.
    left = found if mending is None or not found.count else _differences(log, store, stretch, None)
    return replace(
        seen,
        missing=found.missing,
        surplus=found.surplus,
        differing=found.differing,
        removed=mending.removed if mending else 0,
        added=mending.added if mending else 0,
        agrees=left.count == 0,
    )


class _Repair:
    """Replaces wrong rows, in batches. If the process is killed between delete and insert, rows are missing; the next
    repair inserts them."""

    def __init__(self, store: Store, stretch: _LogRange) -> None:
        self._store = store
        self._place = (stretch.topic, stretch.partition)
        self._wrong: list[Row] = []
        self.removed = self.added = 0

    def replace(self, row: Row) -> None:
        # In batches, which bounds memory: every row of a partition may be wrong.
        self._wrong.append(row)
        if len(self._wrong) >= _EVENTS_MAX:
            self.finish([])

    def finish(self, unknown: list[int]) -> None:
        """Writes the last batch and deletes all rows at the unknown offsets."""
        rows, self._wrong = self._wrong, []
        self.removed += self._store.replace(self._place, [row["offset"] for row in rows], rows)
        self.added += len(rows)
        for start in range(0, len(unknown), _EVENTS_MAX):
            self.removed += self._store.replace(self._place, unknown[start : start + _EVENTS_MAX], [])


def _differences(log: Log, store: Store, stretch: _LogRange, mending: _Repair | None) -> _Differences:
    in_store: defaultdict[int, list[int]] = defaultdict(list)
    for offset, of_row in store.ask(stretch.scope.of(_ROWS), stretch.question).rows:
        in_store[int(offset)].append(int(of_row))
    found = _Differences(in_store)
    for row in _rows_of(log, stretch):
        if not found.is_right(row) and mending is not None:
            mending.replace(row)
    # On a compacted topic a row without a message is no surplus: a newer message of its key replaced it.
    unknown = [] if stretch.may_have_holes else found.rest()
    if mending is not None:
        mending.finish(unknown)
    return found


def _rows_of(log: Log, stretch: _LogRange) -> Iterator[Row]:
    """Rows of the partition, read again from the log as far as the first pass read it."""
    if not stretch.events:
        return
    reader = log.reader([stretch.topic], start=stretch.scope.start)
    try:
        for delivery in _everything(reader):
            address = delivery.address
            if address.partition == stretch.partition and address.offset < stretch.following:
                row = delivery_row(delivery)
                if stretch.scope.has(row):
                    yield row
    finally:
        reader.close()
