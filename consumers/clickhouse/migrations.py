"""Numbered migrations of the trace store: from any released layout to this one, and back. Views: `views`.

    1  one table `events`, with the event as JSON in its column `body`                      (release 0.1.0)
    2  columns that decide about passing, computed from `body` at each insert
    3  a light table `events` and the heavy `payloads`, with every shown figure in a typed column

`migrate` brings a store to a layout and may be interrupted at any time: the old table stays until the new ones are
complete. A store of a newer layout is refused. A column that a release adds without a migration, such as a new field of
the envelope, is added to existing stores when they are opened.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import inspect

from replayground.consumers.clickhouse.columns import ORDER, TABLES_STORED, Table, columns_of
from replayground.consumers.clickhouse.rows import UNDECODABLE, Row, encode_rows, event_row
from replayground.consumers.clickhouse.views import SQL_BY_VIEW
from replayground.consumers.clickhouse.views import TABLES as TABLES
from replayground.schemas.errors import ReplaygroundError
from replayground.schemas.events import EVENTS, Address, Event, Meta, SnapshotTaken, TrajectoriesSelected

Progress = Callable[[int, int], None]
"called with rows done and rows in all"


class LayoutRefused(ReplaygroundError):
    """The store has a layout that this release cannot use."""


class Database(Protocol):
    """What a migration needs of a connection to the database of the store."""

    def command(self, cmd: str) -> Any: ...
    def query(self, query: str, parameters: dict[str, Any] | None = None) -> Any: ...
    def raw_insert(self, table: str, *, insert_block: bytes, fmt: str, settings: dict[str, Any]) -> Any: ...


INSERT_SETTINGS: Mapping[str, Any] = {
    # `body` is an object in the JSON lines and a String in the table.
    "input_format_json_read_objects_as_strings": 1,
    # A line has the columns of all tables; a test checks that each of them is in some table.
    "input_format_skip_unknown_fields": 1,
}

# --- layout 1, as release 0.1.0 made it

TABLE = """
CREATE TABLE IF NOT EXISTS events
(
    topic           LowCardinality(String),
    partition       Int32,
    offset          Int64,
    type            LowCardinality(String)           COMMENT 'class of the event, or undecodable',
    id              String,
    run_id          LowCardinality(String),
    session_id      LowCardinality(Nullable(String)) COMMENT 'demonstrations, train, or one evaluation',
    task_id         Nullable(String),
    group_id        Nullable(String),
    trajectory_id   Nullable(String),
    attempt_id      Nullable(String),
    seq             Nullable(Int32),
    category        LowCardinality(String),
    sender          LowCardinality(String),
    receiver        LowCardinality(Nullable(String)),
    caller          LowCardinality(Nullable(String)),
    priority        Int32,
    headers         Map(String, String),
    timestamp       Int64                            COMMENT 'microseconds since the epoch, event time',
    time            DateTime64(6, 'UTC') ALIAS fromUnixTimestamp64Micro(timestamp, 'UTC'),
    correlation_id  Nullable(String),
    causation_id    Nullable(String),
    idempotency_key Nullable(String),
    purpose         LowCardinality(Nullable(String)),
    policy_version  Nullable(Int64),
    tokens          UInt32                           COMMENT 'sampled tokens of a TurnGenerated',
    score           Nullable(Float64)                COMMENT 'of a RewardAssigned',
    verdict         LowCardinality(String)           COMMENT 'of a RewardAssigned',
    ended_by        LowCardinality(String)           COMMENT 'of a RolloutEnded, TrajectoryAssembled or RewardAssigned',
    version         Nullable(Int64)                  COMMENT 'weights made, published, loaded or held',
    body            String                           COMMENT 'the event as JSON without its envelope; bytes in base64',
    INDEX by_trajectory trajectory_id TYPE bloom_filter GRANULARITY 4
)
ENGINE = MergeTree
ORDER BY (run_id, type, topic, partition, offset)
SETTINGS non_replicated_deduplication_window = 10000
"""
_ENVELOPE_AND_BODY = (*Meta.__struct_fields__, "partition", "offset", "type", "body")
_COLUMNS_OF_1 = (*_ENVELOPE_AND_BODY, "tokens", "score", "verdict", "ended_by", "version")

# The condition is inside the aggregate, not in WHERE: projection `standing` has no column `type`, so with a WHERE on it
# ClickHouse would read the table instead.
LAST_OFFSET = "maxIf(offset, type != 'undecodable')"
LAST_ID = "argMaxIf(id, offset, type != 'undecodable')"
# All facts of a run in one row of the projection. The condition is inside the aggregate for the same reason.
RUN_FACTS = "groupArrayIf((offset, type, id, sender, timestamp, body), topic = 'runs')"

_PROJECTIONS: Mapping[str, str] = {
    # How far a table is on each partition, and its last event there: read at every start (TraceWriter).
    "standing": f"(SELECT topic, partition, max(offset), count(), {LAST_OFFSET}, {LAST_ID} GROUP BY topic, partition)",
    # Rows by address instead of by run: for counting rows against the messages of a partition.
    "by_place": "(SELECT topic, partition, offset ORDER BY topic, partition, offset)",
    # For the list of runs and the counters of the page, which are refreshed every few seconds.
    "by_run": "(SELECT run_id, type, count(), min(timestamp), max(timestamp), max(version) GROUP BY run_id, type)",
    "run_facts": f"(SELECT run_id, {RUN_FACTS} GROUP BY run_id)",
}

# By default ClickHouse refuses DELETE on a table with projections. reconcile deletes rows, and `rebuild` makes the
# projections of the parts that it touches again.
_REBUILD_PROJECTIONS = "MODIFY SETTING lightweight_mutation_projection_mode = 'rebuild'"

_LAYOUT_1 = (
    TABLE,
    *(
        f"ALTER TABLE events {change}"
        for change in (
            _REBUILD_PROJECTIONS,
            *(f"ADD PROJECTION IF NOT EXISTS {name} {select}" for name, select in _PROJECTIONS.items()),
        )
    ),
)

# --- layout 2

_COMPUTED = (
    ("scorer_set", "LowCardinality(String)", "JSONExtractString(body, 'scorer_set')", "''"),
    (
        "weight",
        "Nullable(Float64)",
        "if(JSONHas(body, 'weight'), JSONExtract(body, 'weight', 'Nullable(Float64)'), 1)",
        "NULL",
    ),
    ("passed", "Nullable(Bool)", "JSONExtract(body, 'passed', 'Nullable(Bool)')", "NULL"),
    ("scorers", "UInt16", "toUInt16(JSONLength(body, 'scorers'))", "0"),
)
_TO_2 = tuple(
    f"ALTER TABLE events ADD COLUMN IF NOT EXISTS {name} {kind} "
    f"MATERIALIZED if(type = 'RewardAssigned', {extracted}, {otherwise})"
    for name, kind, extracted, otherwise in _COMPUTED
)
_FROM_2 = tuple(f"ALTER TABLE events DROP COLUMN IF EXISTS {name}" for name, *_ in _COMPUTED)

# --- layout 3

_OLD = "events_before_3"
"where the rows of layout 2 wait until all of them are in the tables of layout 3"
_PROJECTIONS_OF: Mapping[Table, tuple[str, ...]] = {
    "events": ("standing", "by_place", "by_run"),
    "payloads": ("standing", "run_facts"),
}
_SETTINGS = (
    # How many insert tokens ClickHouse remembers: what is sent again after a lost answer adds nothing (Store.insert).
    "non_replicated_deduplication_window = 10000",
    "lightweight_mutation_projection_mode = 'rebuild'",
    # Nothing plans by them, and every insert would compute them.
    "auto_statistics_types = ''",
    # Offsets are committed once their rows are inserted. Without these two a power cut loses such rows: ClickHouse
    # leaves it to the kernel when to write, which takes half a minute (decision 0030). Parts that were merged are kept
    # for eight minutes (old_parts_lifetime), so merges need no fsync.
    "fsync_after_insert = 1",
    "fsync_part_directory = 1",
)


def _create(table: Table) -> str:
    parts = [
        *(column.definition for column in columns_of(table)),
        *(f"INDEX by_{name} {name}_id TYPE bloom_filter GRANULARITY 4" for name in ("trajectory", "group")),
        *(f"PROJECTION {name} {_PROJECTIONS[name]}" for name in _PROJECTIONS_OF[table]),
    ]
    return (
        f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(parts)}) ENGINE = MergeTree ORDER BY ({ORDER}) "
        f"SETTINGS {', '.join(_SETTINGS)}"
    )


def _to_1(database: Database, progress: Progress) -> None:
    _run(database, _LAYOUT_1)


def _to_0(database: Database, progress: Progress) -> None:
    _run(database, ("DROP TABLE IF EXISTS events SYNC",))


def _to_2(database: Database, progress: Progress) -> None:
    _run(database, _TO_2)


def _back_to_1(database: Database, progress: Progress) -> None:
    _run(database, _FROM_2)


def _to_3(database: Database, progress: Progress) -> None:
    # Otherwise it was renamed by a migration that was interrupted.
    if "body" in _columns_in(database, "events"):
        _run(database, (f"DROP TABLE IF EXISTS {_OLD} SYNC", f"RENAME TABLE events TO {_OLD}"))
    # What an interrupted migration has left.
    _run(database, [f"DROP TABLE IF EXISTS {table} SYNC" for table in TABLES_STORED])
    _run(database, map(_create, TABLES_STORED))
    ((total,),) = database.query(f"SELECT count() FROM {_OLD}").result_rows
    done = 0
    for rows in _old_rows(database):
        block = encode_rows(rows)
        for table in TABLES_STORED:
            database.raw_insert(table, insert_block=block, fmt="JSONEachRow", settings=dict(INSERT_SETTINGS))
        done += len(rows)
        progress(done, int(total))


def _back_to_2(database: Database, progress: Progress) -> None:
    names = ", ".join(f"`{name}`" for name in _COLUMNS_OF_1)
    chosen = ", ".join(f"heavy.`{name}`" if name == "body" else f"light.`{name}`" for name in _COLUMNS_OF_1)
    _run(
        database,
        (
            f"DROP TABLE IF EXISTS {_OLD} SYNC",
            TABLE.replace("EXISTS events", f"EXISTS {_OLD}"),
            f"INSERT INTO {_OLD} ({names}) SELECT {chosen} FROM payloads AS heavy INNER JOIN events AS light "
            "USING (topic, partition, offset)",
            # At once: there is never a moment without a complete table.
            f"EXCHANGE TABLES events AND {_OLD}",
            f"DROP TABLE {_OLD} SYNC",
            "DROP TABLE payloads SYNC",
            *_LAYOUT_1,
            *_TO_2,
        ),
    )


@dataclass(frozen=True)
class Migration:
    """One step between two layouts. Both directions may be interrupted and run again."""

    number: int
    name: str
    up: Callable[[Database, Progress], None]
    down: Callable[[Database, Progress], None]


MIGRATIONS: tuple[Migration, ...] = (
    Migration(1, "one table of events", _to_1, _to_0),
    Migration(2, "columns that decide about passing", _to_2, _back_to_1),
    Migration(3, "a light table, and payloads", _to_3, _back_to_2),
)
LAYOUT = MIGRATIONS[-1].number
"what this release makes and reads"

_RECORD = """
CREATE TABLE IF NOT EXISTS migrations
(number UInt32, name String, applied_at DateTime DEFAULT now())
ENGINE = MergeTree ORDER BY number SETTINGS fsync_after_insert = 1, fsync_part_directory = 1
"""


def show_nothing(done: int, total: int) -> None:
    """Shows no progress."""


def migrate(database: Database, to: int = LAYOUT, progress: Progress = show_nothing) -> None:
    """Brings the store to a layout. Raises LayoutRefused, and what the database raises."""
    standing = layout_of(database)
    if standing > LAYOUT:
        raise LayoutRefused(
            f"it has layout {standing}, made by a newer release, and this one reads layouts up to {LAYOUT}: use that "
            "release, or set [traces] dsn to another folder to have one filled from the log"
        )
    database.command(_RECORD)
    for migration in MIGRATIONS[standing:to]:
        # Nothing to carry over in a new store: it gets the tables of the newest layout at once.
        if standing == 0 and to >= 3 and migration.number < 3:
            _record(database, migration)
            continue
        if standing == 0 and migration.number == 3:
            _run(database, map(_create, TABLES_STORED))
        else:
            migration.up(database, progress)
        _record(database, migration)
    for migration in reversed(MIGRATIONS[to:standing]):
        _drop_views(database)
        migration.down(database, progress)
        database.command(f"DELETE FROM migrations WHERE number >= {migration.number}")
    if to == LAYOUT:
        _run(database, (f"DROP TABLE IF EXISTS {_OLD} SYNC",))
        _add_missing_columns(database)
        _renew_views(database)


def layout_of(database: Database) -> int:
    """The layout of the store, 0 when it is empty. Raises LayoutRefused when no release made it."""
    recorded = 0
    if _exists(database, "migrations"):
        ((recorded,),) = database.query("SELECT max(number) FROM migrations").result_rows
    # Above 3 the record says it. Below, the tables do: layouts 1 and 2 have no record, and a migration that was
    # interrupted, in either direction, is known by what it has left.
    if recorded > 3:
        return int(recorded)
    columns = _columns_in(database, "events")
    if "body" in columns or (columns and "load_seconds" not in columns):
        _require_order(database)
        return 2 if "scorer_set" in columns else 1
    if _exists(database, _OLD) and (recorded < 3 or not columns):
        return 2
    return 3 if columns else 0


def _require_order(database: Database) -> None:
    asked = "SELECT sorting_key FROM system.tables WHERE database = currentDatabase() AND name = 'events'"
    ((key,),) = database.query(asked).result_rows
    if key != ORDER:
        raise LayoutRefused(
            f"it was made by another release (its rows are ordered by {key}, not by {ORDER}): set [traces] dsn to "
            "another folder, or remove that one to have it filled again from the log"
        )


def _record(database: Database, migration: Migration) -> None:
    database.command(f"INSERT INTO migrations (number, name) VALUES ({migration.number}, '{migration.name}')")


def _add_missing_columns(database: Database) -> None:
    """Columns that were declared after the store was made. Changes no rows."""
    for table in TABLES_STORED:
        there = _columns_in(database, table)
        _run(
            database,
            [
                f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {column.definition}"
                for column in columns_of(table)
                if column.name not in there
            ],
        )


def _renew_views(database: Database) -> None:
    """Makes the views that are not there, or that another release has made otherwise."""
    asked = "SELECT name, comment FROM system.tables WHERE database = currentDatabase() AND engine = 'View'"
    there = dict(database.query(asked).result_rows)
    # In order: a view may select from one before it.
    for name, sql in SQL_BY_VIEW.items():
        digest = hashlib.sha256(sql.encode()).hexdigest()
        if there.get(name) != digest:
            database.command(f"CREATE OR REPLACE VIEW {name} AS {sql} COMMENT '{digest}'")


def _drop_views(database: Database) -> None:
    views = database.query(
        "SELECT name FROM system.tables WHERE database = currentDatabase() AND engine = 'View'"
    ).result_rows
    _run(database, [f"DROP VIEW IF EXISTS `{name}` SYNC" for (name,) in views])


def _exists(database: Database, table: str) -> bool:
    return bool(database.query(f"EXISTS TABLE {table}").result_rows[0][0])


def _columns_in(database: Database, table: str) -> set[str]:
    asked = "SELECT name FROM system.columns WHERE database = currentDatabase() AND table = {table:String}"
    return {name for (name,) in database.query(asked, {"table": table}).result_rows}


def _run(database: Database, statements: Iterable[str]) -> None:
    for statement in statements:
        database.command(statement)


# --- from layout 2 to 3: each event is made again from its row, so that its new row is the one that the log would give

_ROWS_AT_ONCE = 5000
_CLASSES = {kind.__name__: kind for kind in EVENTS}
_TYPES = {kind: inspect.type_info(kind) for kind in EVENTS}
_LEFT_OUT: Mapping[type[Event], Mapping[str, Any]] = {
    SnapshotTaken: {"state": ""},
    TrajectoriesSelected: {"partitions": "", "offsets": "", "group_sizes": ""},
}
"fields that rows do not have, as nothing"


def _old_rows(database: Database) -> Iterator[list[Row]]:
    """All rows of layout 2 as rows of layout 3, in pieces."""
    names = ", ".join(f"`{name}`" for name in _ENVELOPE_AND_BODY)
    kinds = database.query(f"SELECT DISTINCT run_id, type FROM {_OLD} ORDER BY run_id, type").result_rows
    for run_id, kind in kinds:
        asked: dict[str, Any] = {"run": run_id, "kind": kind, "topic": "", "partition": -1, "offset": -1}
        while True:
            # Along the order of the table: each piece begins where the one before ended, without a search.
            found = database.query(
                f"SELECT {names} FROM {_OLD} WHERE run_id = {{run:String}} AND type = {{kind:String}} "
                "AND (topic, partition, offset) > ({topic:String}, {partition:Int32}, {offset:Int64}) "
                f"ORDER BY topic, partition, offset LIMIT {_ROWS_AT_ONCE}",
                asked,
            ).result_rows
            if not found:
                break
            yield [_converted(dict(zip(_ENVELOPE_AND_BODY, values, strict=True))) for values in found]
            last = dict(zip(_ENVELOPE_AND_BODY, found[-1], strict=True))
            asked |= {name: last[name] for name in ("topic", "partition", "offset")}


def _converted(old: dict[str, Any]) -> Row:
    """A row of layout 3 from one of layout 2."""
    address = Address(old["topic"], old["partition"], old["offset"])
    kind = _CLASSES.get(old["type"])
    # Of a message that is no event, or of a newer release: as it is.
    if kind is None:
        row = {name: value for name, value in old.items() if value is not None}
        reason = msgspec.json.decode(old["body"]).get("reason") if old["type"] == UNDECODABLE else None
        return row | ({"reason": reason} if reason is not None else {})
    stored = msgspec.json.decode(old["body"])
    body = msgspec.Raw(old["body"].encode())
    meta = {name: old[name] for name in Meta.__struct_fields__}
    fields = _with_nan(_TYPES[kind], {"meta": meta, **stored, **_LEFT_OUT.get(kind, {})})
    row = event_row(address, msgspec.convert(fields, kind, strict=False))
    # Of what the row leaves out, its size is there already.
    row |= {name: stored[name] for name in ("size_bytes", "trajectories") if name in stored and kind in _LEFT_OUT}
    return row | {"body": body}


def _with_nan(kind: inspect.Type, value: Any) -> Any:
    """The value with NaN where JSON has null in place of a number: a row cannot tell NaN and infinity."""
    match kind:
        case inspect.FloatType():
            return float("nan") if value is None else value
        case inspect.StructType():
            if not isinstance(value, dict):
                return value
            types = {field.name: field.type for field in kind.fields}
            return {name: _with_nan(types[name], part) for name, part in value.items() if name in types}
        case inspect.DictType():
            return {name: _with_nan(kind.value_type, part) for name, part in value.items()}
        case inspect.ListType():
            return [_with_nan(kind.item_type, part) for part in value]
        case inspect.BytesType():
            return base64.b64decode(value) if isinstance(value, str) else value
        case inspect.UnionType():
            inner = next((option for option in kind.types if not isinstance(option, inspect.NoneType)), None)
            return value if value is None or inner is None else _with_nan(inner, value)
        case _:
            return value
