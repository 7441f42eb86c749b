"""P9 proven: the trace store against the log, partition by partition, by count and checksum; and mended by reading again.

The checksum of a partition is the sum of the CRC-32 of every row's offset, id and body. ClickHouse computes it over what it
has, this program over what the rows of the log ought to be. A partition whose sums differ is compared row by row. It is
mended by removing every row at an offset where something is wrong and inserting what the log says there.

Of one run, only its own events and rows are compared, from where it started on. What cannot be read belongs to no run and is
compared only with the whole field.

Not covered: a row beyond the end of the log also hides from the running trace writer what is appended there later; once it
is removed, restart the traces program or reconcile again.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from consumers.clickhouse.deliveries import delivery_row
from consumers.clickhouse.rows import Row
from consumers.clickhouse.store import Place, Store
from schemas.events import Position
from schemas.topics import FOREVER, TOPIC_BY_NAME, TOPICS
from streams.log.protocol import Delivery, Log, Reader

_EVENTS_MAX = 5000
_POLL_SECONDS = 1.0

_STRETCH = """
FROM events WHERE topic = {topic:String} AND partition = {partition:Int32}
AND offset >= {first:Int64} AND offset < {following:Int64}
"""
_OF_RUN = "AND run_id = {run:String}"
_SUMS = f"SELECT count(), sum(CRC32(concat(toString(offset), ' ', id, ' ', body))) {_STRETCH}"
_ROWS = f"SELECT offset, CRC32(concat(toString(offset), ' ', id, ' ', body)) {_STRETCH}"


class PartitionComparison(Struct, frozen=True, kw_only=True):
    """One partition, as it was found; and, when it was mended, what that came to."""

    topic: str
    partition: int
    log_events: int
    store_rows: int
    missing: int = 0
    "events of the log without a row"
    surplus: int = 0
    "rows that stand for no event, or for one that has another row"
    differing: int = 0
    "events whose rows all say something else"
    removed: int = 0
    "rows that were taken away"
    added: int = 0
    "rows that were read again from the log"
    agrees: bool = True
    "whether the two say the same now, by a second comparison if something was mended"


class Scope(Struct, frozen=True, kw_only=True):
    """What is compared: one run from where it started, or, by default, the whole field."""

    run_id: str | None = None
    start: tuple[Position, ...] = ()

    def has(self, row: Row) -> bool:
        return self.run_id is None or row.get("run_id") == self.run_id

    def first(self, place: Place) -> int:
        return next((p.offset for p in self.start if (p.topic, p.partition) == place), 0)

    def of(self, sql: str) -> str:
        return sql if self.run_id is None else sql + _OF_RUN


class _LogRange:
    """What the log has of a partition."""

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
        """Where comparing begins. A topic may have forgotten what was before its first event."""
        if self.first is None or (self.scope.run_id is not None and not self._forgets):
            return self.scope.first((self.topic, self.partition))
        return self.first

    @property
    def _forgets(self) -> bool:
        topic = TOPIC_BY_NAME.get(self.topic)
        return topic is not None and (topic.compacted or topic.retention_milliseconds != FOREVER)

    @property
    def may_have_holes(self) -> bool:
        """Whether an offset between others may have been forgotten, because a newer message has its key."""
        return self.topic in TOPIC_BY_NAME and TOPIC_BY_NAME[self.topic].compacted

    def reach(self, following: int) -> None:
        """Also covers rows up to here: the log was read after they were in the store, so an event of theirs would have been
        found. A topic that forgets may have had it once."""
        if not self._forgets:
            self.following = max(self.following, following)


class _Differences:
    """A partition compared row by row."""

    def __init__(self, in_store: dict[int, list[int]]) -> None:
        self._in_store = in_store
        self.missing = self.surplus = self.differing = 0

    @property
    def count(self) -> int:
        return self.missing + self.surplus + self.differing

    def is_right(self, row: Row) -> bool:
        """Whether the store has this row, once, and nothing else in its place."""
        found = self._in_store.pop(row["offset"], [])
        wanted = checksum(row)
        self.missing += not found
        self.differing += bool(found) and wanted not in found
        self.surplus += max(0, len(found) - 1)
        return found == [wanted]

    def rest(self) -> list[int]:
        """Offsets of the store that no row of the log was compared with."""
        self.surplus += sum(len(found) for found in self._in_store.values())
        return sorted(self._in_store)


WHOLE_FIELD = Scope()


def reconcile(
    log: Log, store: Store, await_written: Callable[[], None], repair: bool, scope: Scope = WHOLE_FIELD
) -> list[PartitionComparison]:
    """Compares everything of the scope that is on the log now. `await_written` returns when the store has been given all of it.

    What the log has forgotten (by age, or because a newer value stands for it) is not held against the store."""
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
    ((rows, total),) = store.ask(stretch.scope.of(_SUMS), stretch.question).rows
    seen = PartitionComparison(
        topic=stretch.topic, partition=stretch.partition, log_events=stretch.events, store_rows=int(rows)
    )
    if int(rows) == stretch.events and int(total) == stretch.checksum:
        return seen
    mending = _Repair(store, stretch) if repair else None
    found = _differences(log, store, stretch, mending)
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
    """Puts rows right, some at a time. Rows that were removed and not yet inserted when this process is killed are missing,
    and are added by the next time."""

    def __init__(self, store: Store, stretch: _LogRange) -> None:
        self._store = store
        self._place = (stretch.topic, stretch.partition)
        self._wrong: list[Row] = []
        self.removed = self.added = 0

    def replace(self, row: Row) -> None:
        self._wrong.append(row)
        if len(self._wrong) >= _EVENTS_MAX:
            self.finish([])

    def finish(self, unknown: list[int]) -> None:
        """Also removes whatever stands at the unknown offsets."""
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
    unknown = [] if stretch.may_have_holes else found.rest()
    if mending is not None:
        mending.finish(unknown)
    return found


def _rows_of(log: Log, stretch: _LogRange) -> Iterator[Row]:
    """The partition read again, as far as it was read the first time."""
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
