"""Compares the trace store with the log (P9) by count and checksum of each partition, and repairs it from the log.

Every table is compared in all its columns. The checksum of a row is ClickHouse's hash of them; rows that the log gives
are written to tables in memory to get theirs (Store.staging). A partition whose sums differ is compared row by row. A
repair deletes every row at an offset where something is wrong and inserts what the log has there, in all tables.

For one run, only its own events and rows are compared, from its start positions on. Undecodable messages belong to no
run and are compared only with the whole field.

Not covered: a row beyond the end of the log also makes the running trace writer skip what is appended at its offset
later. Once the row is removed, restart the traces program or reconcile again.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import batched

from msgspec import Struct
from msgspec.structs import replace

from replayground.consumers.clickhouse.columns import TABLES_STORED, Table
from replayground.consumers.clickhouse.deliveries import delivery_row
from replayground.consumers.clickhouse.rows import Row
from replayground.consumers.clickhouse.store import Place, Staging, Store, row_hash
from replayground.schemas.events import Position
from replayground.schemas.topics import FOREVER, TOPIC_BY_NAME, TOPICS
from replayground.streams.log.protocol import Delivery, Log, Reader

_EVENTS_MAX = 5000
_POLL_SECONDS = 1.0

_OF_RUN = " AND run_id = {run:String}"


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

    def select(self, figures: str, table: Table, stretches: Sequence["_LogRange"]) -> str:
        """A question about the rows of these partitions that are in scope."""
        places = " OR ".join(stretch.condition for stretch in stretches) or "0"
        return f"SELECT {figures} FROM {table} WHERE ({places}){'' if self.run_id is None else _OF_RUN}"


class _LogRange:
    """What the log has of a partition, and the range of offsets in which the store is compared with it."""

    def __init__(self, place: Place, scope: Scope) -> None:
        self.topic, self.partition = place
        self.scope = scope
        self.events = 0
        self.checksums: Counter[Table] = Counter()
        self.first: int | None = None
        self.following = 0

    def add(self, offset: int, hashes: "Hashes") -> None:
        self.events += 1
        self.checksums.update(hashes)
        self.first = offset if self.first is None else self.first
        self.following = offset + 1

    @property
    def place(self) -> Place:
        return self.topic, self.partition

    @property
    def condition(self) -> str:
        """Its rows in the store, in SQL."""
        # Names of topics are those of schemas.topics, or of rows: quoted as ClickHouse reads them.
        topic = self.topic.replace("\\", "\\\\").replace("'", "\\'")
        return (
            f"(topic = '{topic}' AND partition = {self.partition} "
            f"AND offset >= {self._first} AND offset < {self.following})"
        )

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
    """Counts the differences of one partition. `in_store` has the checksums of all rows by table and offset."""

    def __init__(self, in_store: dict[Table, dict[int, list[int]]]) -> None:
        self._in_store = in_store
        self.missing = self.surplus = self.differing = 0

    @property
    def count(self) -> int:
        return self.missing + self.surplus + self.differing

    def is_right(self, offset: int, wanted: "Hashes") -> bool:
        """Whether every table has exactly this row at its offset; counts what is wrong otherwise."""
        found = {table: self._in_store[table].pop(offset, []) for table in TABLES_STORED}
        is_missing = not all(found.values())
        self.missing += is_missing
        self.differing += not is_missing and any(wanted[table] not in found[table] for table in TABLES_STORED)
        self.surplus += max(0, *(len(rows) - 1 for rows in found.values()))
        return all(found[table] == [wanted[table]] for table in TABLES_STORED)

    def rest(self) -> list[int]:
        """Offsets of the store without an event on the log, counted as surplus. Call it after all rows were
        compared."""
        left: dict[int, int] = {}
        for rows in self._in_store.values():
            for offset, found in rows.items():
                left[offset] = max(left.get(offset, 0), len(found))
        self.surplus += sum(left.values())
        return sorted(left)


WHOLE_FIELD = Scope()


def reconcile(
    log: Log, store: Store, await_written: Callable[[], None], repair: bool, scope: Scope = WHOLE_FIELD
) -> list[PartitionComparison]:
    """Compares everything of the scope that is on the log now. `await_written` blocks until the store has all of it.

    Rows of messages that retention or compaction removed from the log are no differences. Reads the whole log in scope.
    Raises LogUnavailable, StoreFailed, and what `await_written` raises."""
    # Before the log is read: every row up to here must have its event on the log (see reach).
    before = store.end_offsets()
    stretches = {place: _LogRange(place, scope) for place in before}
    with store.staging() as staging:
        reader = log.reader([topic.name for topic in TOPICS], start=scope.start)
        try:
            rows = (row for delivery in _everything(reader) if scope.has(row := delivery_row(delivery)))
            for row, hashes in _hashed(staging, rows):
                place = (row["topic"], row["partition"])
                stretches.setdefault(place, _LogRange(place, scope)).add(row["offset"], hashes)
        finally:
            reader.close()
        # After the log was read: everything that was found must be in the store before it can be missing there.
        await_written()
        for place, following in before.items():
            stretches[place].reach(following)
        ordered = [stretch for _, stretch in sorted(stretches.items())]
        sums = {table: _sums(store, scope, ordered, table) for table in TABLES_STORED}
        compared = [
            _compare(
                log, store, staging, stretch, {table: sums[table][stretch.place] for table in TABLES_STORED}, repair
            )
            for stretch in ordered
        ]
    if scope.run_id is None:
        return compared
    return [place for place in compared if place.log_events or place.store_rows]


Hashes = dict[Table, int]
"the checksum of a row in each table"


def _hashed(staging: Staging, rows: Iterator[Row]) -> Iterator[tuple[Row, Hashes]]:
    """Rows of the log with the checksums that the store would have for them."""
    for some in batched(rows, _EVENTS_MAX):
        yield from zip(some, staging.hashes(some), strict=True)


def _everything(reader: Reader) -> Iterator[Delivery]:
    while not reader.caught_up():
        yield from reader.poll(_EVENTS_MAX, _POLL_SECONDS)


def _compare(
    log: Log, store: Store, staging: Staging, stretch: _LogRange, sums: "dict[Table, Sums]", repair: bool
) -> PartitionComparison:
    # Sums first: they need no rows in memory, and in most partitions they agree.
    rows = sums["events"][0]
    seen = PartitionComparison(
        topic=stretch.topic, partition=stretch.partition, log_events=stretch.events, store_rows=int(rows)
    )
    if all(sums[table] == (stretch.events, stretch.checksums[table]) for table in TABLES_STORED):
        return seen
    mending = _Repair(store, stretch) if repair else None
    found = _differences(log, store, staging, stretch, mending)
    # A repair is compared again instead of being believed.
    left = found if mending is None or not found.count else _differences(log, store, staging, stretch, None)
    return replace(
        seen,
        missing=found.missing,
        surplus=found.surplus,
        differing=found.differing,
        removed=mending.removed if mending else 0,
        added=mending.added if mending else 0,
        agrees=left.count == 0,
    )


Sums = tuple[int, int]
"number of rows, and sum of their checksums"


def _sums(store: Store, scope: Scope, stretches: Sequence[_LogRange], table: Table) -> dict[Place, Sums]:
    # As a wide integer: the sum of many 64-bit hashes would overflow.
    asked = scope.select(f"topic, partition, count(), sum(toInt128({row_hash(table)}))", table, stretches)
    found: dict[Place, Sums] = {stretch.place: (0, 0) for stretch in stretches}
    for topic, partition, rows, total in store.ask(f"{asked} GROUP BY topic, partition", {"run": scope.run_id}).rows:
        found[topic, partition] = (int(rows), int(total))
    return found


class _Repair:
    """Replaces wrong rows, in batches. If the process is killed between delete and insert, rows are missing; the next
    repair inserts them."""

    def __init__(self, store: Store, stretch: _LogRange) -> None:
        self._store = store
        self._place = stretch.place
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


def _differences(log: Log, store: Store, staging: Staging, stretch: _LogRange, mending: _Repair | None) -> _Differences:
    found = _Differences({table: _stored_hashes(store, stretch, table) for table in TABLES_STORED})
    for row, hashes in _hashed(staging, _rows_of(log, stretch)):
        if not found.is_right(row["offset"], hashes) and mending is not None:
            mending.replace(row)
    # On a compacted topic a row without a message is no surplus: a newer message of its key replaced it.
    unknown = [] if stretch.may_have_holes else found.rest()
    if mending is not None:
        mending.finish(unknown)
    return found


def _stored_hashes(store: Store, stretch: _LogRange, table: Table) -> dict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    asked = stretch.scope.select(f"offset, {row_hash(table)}", table, [stretch])
    for offset, of_row in store.ask(asked, {"run": stretch.scope.run_id}).rows:
        found[int(offset)].append(int(of_row))
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
