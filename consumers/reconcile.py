"""P9 proven: the trace store against the log, partition by partition, by count and checksum; and mended by reading again.

The checksum of a partition is the sum of the CRC-32 of every row's offset, id and body. ClickHouse computes it over what it
has, this program over what the rows of the log ought to be.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from consumers.clickhouse.deliveries import delivery_row
from consumers.clickhouse.rows import Row
from consumers.clickhouse.store import Place, Store
from schemas.topics import TOPICS
from streams.log.protocol import Delivery, Log, Reader

_EVENTS_MAX = 5000
_POLL_SECONDS = 1.0

_SUMS = """
SELECT count(), sum(CRC32(concat(toString(offset), ' ', id, ' ', body))) FROM events
WHERE topic = {topic:String} AND partition = {partition:Int32} AND offset >= {first:Int64} AND offset < {following:Int64}
"""

_ROWS = """
SELECT offset, CRC32(concat(toString(offset), ' ', id, ' ', body)) FROM events
WHERE topic = {topic:String} AND partition = {partition:Int32} AND offset >= {first:Int64} AND offset < {following:Int64}
"""


class Compared(Struct, frozen=True, kw_only=True):
    """One partition."""

    topic: str
    partition: int
    log_events: int
    store_rows: int
    missing: int = 0
    "events of the log without a row"
    surplus: int = 0
    "rows that stand for no event, or for one that has another row"
    differing: int = 0
    "rows that say something else than the event at their place"
    repaired: int = 0
    "events whose row was added"

    @property
    def agrees(self) -> bool:
        return self.surplus == self.differing == 0 and self.missing == self.repaired


class _Sum:
    """What the log has of a partition."""

    def __init__(self) -> None:
        self.events = 0
        self.checksum = 0
        self.first: int | None = None
        self.following = 0

    def add(self, row: Row) -> None:
        self.events += 1
        self.checksum += checksum(row)
        self.first = row["offset"] if self.first is None else self.first
        self.following = row["offset"] + 1


def reconcile(log: Log, store: Store, await_written: Callable[[], None], repair: bool) -> list[Compared]:
    """Compares everything that is on the log now. `await_written` returns when the store has been given all of it.

    What the log has forgotten (by age, or because a newer value stands for it) is not held against the store."""
    sums: defaultdict[Place, _Sum] = defaultdict(_Sum)
    reader = log.reader([topic.name for topic in TOPICS])
    try:
        for delivery in _everything(reader):
            sums[delivery.address.topic, delivery.address.partition].add(delivery_row(delivery))
    finally:
        reader.close()
    await_written()
    return [_compared(log, store, place, of_log, repair) for place, of_log in sorted(sums.items())]


def checksum(row: Row) -> int:
    return zlib.crc32(f"{row['offset']} {row.get('id', '')} ".encode() + bytes(row["body"]))


def _everything(reader: Reader) -> Iterator[Delivery]:
    while not reader.caught_up():
        yield from reader.poll(_EVENTS_MAX, _POLL_SECONDS)


def _compared(log: Log, store: Store, place: Place, of_log: _Sum, repair: bool) -> Compared:
    topic, partition = place
    asked = {"topic": topic, "partition": partition, "first": of_log.first or 0, "following": of_log.following}
    ((rows, total),) = store.ask(_SUMS, asked).rows
    same = Compared(topic=topic, partition=partition, log_events=of_log.events, store_rows=int(rows))
    if int(rows) == of_log.events and int(total) == of_log.checksum:
        return same
    return _differences(log, store, same, asked, repair)


def _differences(log: Log, store: Store, compared: Compared, asked: dict[str, object], repair: bool) -> Compared:
    """Row by row, for a partition whose sums do not agree."""
    in_store: defaultdict[int, list[int]] = defaultdict(list)
    for offset, of_row in store.ask(_ROWS, asked).rows:
        in_store[int(offset)].append(int(of_row))
    missing: list[Row] = []
    differing = matched = 0
    for row in _rows_of(log, compared, int(str(asked["following"]))):
        found = in_store.get(row["offset"])
        if found is None:
            missing.append(row)
        elif checksum(row) in found:
            matched += 1
        else:
            differing += 1
    if repair:
        store.insert(missing)
    surplus = sum(len(found) for found in in_store.values()) - matched - differing
    return Compared(
        topic=compared.topic,
        partition=compared.partition,
        log_events=compared.log_events,
        store_rows=compared.store_rows,
        missing=len(missing),
        surplus=surplus,
        differing=differing,
        repaired=len(missing) if repair else 0,
    )


def _rows_of(log: Log, compared: Compared, following: int) -> Sequence[Row]:
    """The partition read again; only one that does not agree is held in memory."""
    reader = log.reader([compared.topic])
    try:
        return [
            delivery_row(delivery)
            for delivery in _everything(reader)
            if delivery.address.partition == compared.partition and delivery.address.offset < following
        ]
    finally:
        reader.close()
