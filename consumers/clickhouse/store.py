"""The trace store: ClickHouse in this process (chDB) or on a server, by the same client. The only module that opens it.

chDB allows one process per folder and one folder per process. A batch of rows becomes one block of each table, stored
whole or not at all and fsynced. `payloads` comes first and `events` last: how far the store is, the table that is least
far says, and each table takes only what it does not have.
"""

import hashlib
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import clickhouse_connect
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError

from replayground.consumers.clickhouse.columns import TABLES_STORED, Table, columns_of, stored_columns
from replayground.consumers.clickhouse.migrations import INSERT_SETTINGS, LayoutRefused, Progress, migrate, show_nothing
from replayground.consumers.clickhouse.queries import ROWS_AT, standing_of
from replayground.consumers.clickhouse.rows import Row, encode_rows
from replayground.schemas.errors import BadInput, ReplaygroundError

Place = tuple[str, int]
"a topic and a partition"


_AT = "topic = {topic:String} AND partition = {partition:Int32} AND offset IN {offsets:Array(Int64)}"
_KINDS_AT = f"SELECT run_id, type, count() FROM events WHERE {_AT} GROUP BY run_id, type"


_EXACT = {"optimize_use_implicit_projections": 0}
"""ClickHouse 26.9 overcounts when a query with a condition counts rows of a table with projections: 11,960 for 8,428.
It takes whole marks of a projection as matching; without this optimization it looks at the rows."""


class StoreFailed(ReplaygroundError):
    """The store cannot be opened, rejected an insert, or failed a query."""


def require_store(dsn: str) -> None:
    """Raises BadInput when the folder of a chDB store does not exist."""
    # chDB would create the folder, and an empty store answers every query with nothing instead of an error.
    folder = urlparse(dsn).path
    if dsn.startswith("chdb:") and not Path(folder).is_dir():
        raise BadInput(
            f"there is no trace store in {folder}: nothing was written to it yet, or [traces] dsn names another folder"
        )


@dataclass(frozen=True)
class QueryResult:
    """Column names and rows of one query."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Store:
    """One database of traces. Safe to share between threads; calls block. Inserts, our own queries and each query of a
    user have separate connections: calls on one connection wait for each other, so a slow query would delay inserts."""

    def __init__(self, dsn: str, database: str, threads: int, progress: Progress = show_nothing) -> None:
        """Opens the store and brings it to the layout of this release; `progress` is called while that rewrites rows.
        Raises StoreFailed."""
        self._dsn = dsn
        self._database = database
        self._threads = threads
        self._inserted: Counter[tuple[str, str]] = Counter()
        # Part of every insert token. ClickHouse remembers tokens of parts that a power cut tore, too, and would drop
        # their rows when they come again. Within one process a token still means the same rows.
        self._opened = uuid.uuid4().hex[:8]
        try:
            # Without a database: connecting to one that does not exist fails.
            opening = clickhouse_connect.get_client(dsn=dsn)
            opening.command(f"CREATE DATABASE IF NOT EXISTS {database}")
            opening.close()
            self._writing = self._connect()
            self._asking = self._connect()
            migrate(self._writing, progress=progress)
        except LayoutRefused as error:
            raise StoreFailed(f"the trace store {dsn} cannot be used: {error}") from error
        except ClickHouseError as error:
            raise StoreFailed(f"the trace store {dsn} cannot be opened: {error}") from error
        self._standing: dict[Table, dict[Place, int]] = {table: self._next_offsets(table) for table in TABLES_STORED}

    def insert(self, rows: Sequence[Row]) -> None:
        """Inserts rows as one block of each table. Rows that a table has already, it does not take again. Raises
        StoreFailed."""
        # Before each insert, so that rows a process had inserted into one table when it was killed are not doubled.
        for table in TABLES_STORED:
            standing = self._standing[table]
            new = [row for row in rows if row["offset"] >= standing.get((row["topic"], row["partition"]), 0)]
            if new:
                self._insert(table, new)
                for row in new:
                    place = (row["topic"], row["partition"])
                    standing[place] = max(standing.get(place, 0), row["offset"] + 1)
        # After the inserts: a cached result must not count as current before the rows can be queried.
        self._inserted.update(map(_run_and_kind, rows))

    def _insert(self, table: str, rows: Sequence[Row], token: str | None = None) -> None:
        settings = {
            "insert_deduplication_token": token or f"{self._opened}-{_token(rows)}",
            "insert_deduplicate": 1,
            **INSERT_SETTINGS,
            # One block, whatever its size: with several, a crash between them would leave half a batch. Parallel
            # parsing and several insert threads would also split it.
            "max_insert_block_size": len(rows) + 1,
            "min_insert_block_size_rows": len(rows) + 1,
            "min_insert_block_size_bytes": 0,
            "input_format_parallel_parsing": 0,
            "max_insert_threads": 1,
            "max_threads": 1,
        }
        try:
            self._writing.raw_insert(table, insert_block=encode_rows(rows), fmt="JSONEachRow", settings=settings)
        except ClickHouseError as error:
            raise StoreFailed(f"{len(rows)} rows were not inserted into {table}: {error}") from error

    def replace(self, place: Place, offsets: Sequence[int], rows: Sequence[Row]) -> int:
        """Deletes the rows at these offsets of a partition, then inserts rows; returns how many events were deleted.
        Not atomic: StoreFailed may be raised between the two."""
        if not offsets:
            return 0
        there = {"topic": place[0], "partition": place[1], "offsets": list(offsets)}
        # Before the delete: it does not say which rows it removed.
        kinds = {(str(run_id), str(kind)): int(count) for run_id, kind, count in self.ask(_KINDS_AT, there).rows}
        try:
            # Not `_writing`: a DELETE that rewrites parts would hold up the trace writer.
            client = self._connect()
            try:
                for table in TABLES_STORED:
                    client.command(f"DELETE FROM {table} WHERE {_AT}", there)
                    if rows:
                        # A token that is never repeated: the same rows may have been inserted before.
                        self._insert(table, rows, f"again-{uuid.uuid4()}")
            finally:
                client.close()
        except ClickHouseError as error:
            raise StoreFailed(f"{len(offsets)} rows of {place[0]} were not replaced: {error}") from error
        # Kinds that only lost rows too: cached results about them are out of date as well.
        self._inserted.update(kinds.keys() | set(map(_run_and_kind, rows)))
        return sum(kinds.values())

    def checksums(self, before: Mapping[Place, int] | None = None) -> dict[Table, tuple[int, int]]:
        """Number of rows of each table, and the sum of their checksums: equal for stores of the same log. With
        `before`, only of rows before these offsets."""
        asked: dict[str, Any] = {}
        condition = "1" if before is None else _within({place: (0, end) for place, end in before.items()}, asked)
        return {
            table: (int(rows), int(total))
            for table in TABLES_STORED
            for rows, total in self.ask(
                f"SELECT count(), sum(toInt128({row_hash(table)})) FROM {table} WHERE {condition}", asked
            ).rows
        }

    def rows_between(self, stretches: Mapping[Place, tuple[int, int]]) -> int:
        """Number of rows of these partitions, each in its half-open range of offsets."""
        asked: dict[str, Any] = {}
        return int(self.ask(f"SELECT count() FROM events WHERE {_within(stretches, asked)}", asked).rows[0][0])

    def rows_at(self, place: Place, offsets: Sequence[int]) -> int:
        """Number of rows of a partition at these offsets."""
        asked = {"topic": place[0], "partition": place[1], "offsets": list(offsets)}
        return int(self.ask(ROWS_AT, asked).rows[0][0])

    def inserted(self, kinds: Iterable[str], run_id: str | None) -> int:
        """Grows whenever query results about these kinds of events may change, of the run or of all runs: the number of
        rows that this process has inserted, and a step for each repair. Rows of other processes are not counted."""
        if run_id is not None:
            return sum(self._inserted[run_id, kind] for kind in kinds)
        wanted = set(kinds)
        # A copy of the items: the trace writer may add keys in its own thread meanwhile.
        return sum(count for (_, kind), count in list(self._inserted.items()) if kind in wanted)

    def next_offsets(self) -> dict[Place, int]:
        """For every partition of the log, the offset after the last one that all tables have."""
        found = [self._next_offsets(table) for table in TABLES_STORED]
        return {place: min(of.get(place, 0) for of in found) for place in set().union(*found)}

    def end_offsets(self) -> dict[Place, int]:
        """For every partition of the log, the offset after the last one that any table has."""
        found = [self._next_offsets(table) for table in TABLES_STORED]
        return {place: max(of.get(place, 0) for of in found) for place in set().union(*found)}

    def _next_offsets(self, table: Table) -> dict[Place, int]:
        return {(topic, partition): following for topic, partition, following, _ in self.ask(standing_of(table)).rows}

    def ask(self, sql: str, parameters: Mapping[str, Any] | None = None) -> QueryResult:
        """Runs a query of our own (consumers.clickhouse.queries). Raises StoreFailed."""
        try:
            result = self._asking.query(sql, dict(parameters or {}), settings={"max_threads": self._threads, **_EXACT})
        except ClickHouseError as error:
            raise StoreFailed(f"the trace store could not answer: {error}") from error
        return QueryResult(tuple(result.column_names), [tuple(row) for row in result.result_rows])

    @contextmanager
    def staging(self) -> "Iterator[Staging]":
        """Tables in memory that hold rows for as long as their checksums are computed. Raises StoreFailed."""
        client = self._connect()
        # A name of its own: another process may compare the same store on a server.
        staging = Staging(client, uuid.uuid4().hex)
        try:
            staging.open()
            yield staging
        except ClickHouseError as error:
            raise StoreFailed(f"rows were not compared: {error}") from error
        finally:
            staging.close()
            client.close()

    def close(self) -> None:
        self._writing.close()
        self._asking.close()

    def _connect(self) -> Client:
        return clickhouse_connect.get_client(dsn=self._dsn, database=self._database)


class Staging:
    """What the checksums of rows would be in the store, by ClickHouse's own types."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._names: dict[Table, str] = {table: f"staged_{table}_{name}" for table in TABLES_STORED}

    def open(self) -> None:
        for table, name in self._names.items():
            columns = ", ".join(column.definition for column in columns_of(table))
            self._client.command(f"CREATE TABLE {name} ({columns}, `nth` UInt32) ENGINE = Memory")

    def hashes(self, rows: Sequence[Row]) -> list[dict[Table, int]]:
        """The checksums of each row, in order."""
        block = encode_rows([row | {"nth": nth} for nth, row in enumerate(rows)])
        found: list[dict[Table, int]] = [{} for _ in rows]
        for table, name in self._names.items():
            self._client.raw_insert(name, insert_block=block, fmt="JSONEachRow", settings=dict(INSERT_SETTINGS))
            for nth, of_row in self._client.query(f"SELECT nth, {row_hash(table)} FROM {name}").result_rows:
                found[nth][table] = int(of_row)
            self._client.command(f"TRUNCATE TABLE {name}")
        return found

    def close(self) -> None:
        for name in self._names.values():
            self._client.command(f"DROP TABLE IF EXISTS {name} SYNC")


def _within(stretches: Mapping[Place, tuple[int, int]], asked: dict[str, Any]) -> str:
    """A condition: rows of these partitions, each in its half-open range of offsets. Adds its parameters to `asked`."""
    conditions = ["0"]
    for number, ((topic, partition), (first, following)) in enumerate(stretches.items()):
        # Names are bound by ClickHouse; integers can be formatted into the text.
        asked[f"topic{number}"] = topic
        conditions.append(
            f"(topic = {{topic{number}:String}} AND partition = {int(partition)} "
            f"AND offset >= {int(first)} AND offset < {int(following)})"
        )
    return f"({' OR '.join(conditions)})"


def migrate_store(dsn: str, database: str, to: int, progress: Progress) -> None:
    """Brings a store to a layout, without opening it for use. Raises StoreFailed."""
    try:
        client = clickhouse_connect.get_client(dsn=dsn, database=database)
        try:
            migrate(client, to, progress)
        finally:
            client.close()
    except LayoutRefused as error:
        raise StoreFailed(f"the trace store {dsn} cannot be migrated: {error}") from error
    except ClickHouseError as error:
        raise StoreFailed(f"the trace store {dsn} was not migrated: {error}") from error


def row_hash(table: Table) -> str:
    """The checksum of a row over all columns that are stored, in SQL."""
    # As text: a function of ClickHouse that meets null in any of its arguments may answer null.
    names = ", ".join(f"`{name}`" for name in stored_columns(table))
    return f"cityHash64(toString(tuple({names})))"


def _run_and_kind(row: Row) -> tuple[str, str]:
    return row.get("run_id", ""), row["type"]


def _token(rows: Iterable[Row]) -> str:
    """Names a batch by the stretches of the log that are in it: topic-partition-first-last of each."""
    # ClickHouse compares tokens, not rows. That is safe because the same stretch of the log always gives the same rows.
    stretches: dict[Place, tuple[int, int]] = {}
    for row in rows:
        place = (row["topic"], row["partition"])
        first, last = stretches.get(place, (row["offset"], row["offset"]))
        stretches[place] = (min(first, row["offset"]), max(last, row["offset"]))
    names = sorted(f"{topic}-{partition}-{first}-{last}" for (topic, partition), (first, last) in stretches.items())
    return names[0] if len(names) == 1 else hashlib.sha256("|".join(names).encode()).hexdigest()
