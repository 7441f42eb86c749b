"""Stores of every released layout open with all their rows, go back, and are refused when they are newer."""

import math
import uuid
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from clickhouse_connect import get_client
from clickhouse_connect.driver.client import Client

from replayground.consumers.clickhouse import migrations
from replayground.consumers.clickhouse.migrations import LAYOUT, TABLE, layout_of, migrate
from replayground.consumers.clickhouse.rows import Row, encode_rows, event_row, undecodable_row
from replayground.consumers.clickhouse.store import Store, StoreFailed
from replayground.schemas.events import Address, Event, RewardAssigned, StepTaken
from tests.consumers.synthetic_run import SyntheticRun, run_of

_COLUMNS_OF_1 = frozenset(migrations._COLUMNS_OF_1)


def made_rows() -> list[Row]:
    """Rows of every kind of event, of numbers that JSON does not have, and of a message that is no event."""
    rows = [event_row(Address(event.meta.topic, 0, n), event) for n, event in enumerate(events())]
    return [*rows, undecodable_row(Address("tasks", 1, 0), b"k", b"\xff", "no header")]


def events() -> Iterator[Event]:
    for event in SyntheticRun(run_of(steps=2, demonstrations=2), evaluation_tasks=2).events():
        yield event
        if isinstance(event, RewardAssigned):
            yield msgspec.structs.replace(event, score=math.nan, parts={"a": math.inf, "b": 1.0})
        if isinstance(event, StepTaken):
            yield msgspec.structs.replace(event, metrics={"loss": math.nan, "entropy": 0.5})


def released_store(store: Store, layout: int, rows: Sequence[Row]) -> str:
    """A database as a release of this layout has left it, with these rows as it wrote them."""
    name = f"released_{layout}_{uuid.uuid4().hex}"
    client = store._connect()
    client.command(f"CREATE DATABASE {name}")
    client.close()
    client = client_of(store, name)
    for statement in (*migrations._LAYOUT_1, *(migrations._TO_2 if layout == 2 else ())):
        client.command(statement)
    old = [{column: row[column] for column in _COLUMNS_OF_1 & row.keys()} for row in rows]
    settings = {"input_format_json_read_objects_as_strings": 1}
    client.raw_insert("events", insert_block=encode_rows(old), fmt="JSONEachRow", settings=settings)
    client.close()
    return name


def client_of(store: Store, database: str) -> Client:
    return get_client(dsn=store._dsn, database=database)


def test_a_layout_is_released_once() -> None:
    """A released table never changes: stores of it exist. A new layout is a new migration."""
    assert [migration.number for migration in migrations.MIGRATIONS] == list(range(1, LAYOUT + 1))
    assert " body " in TABLE
    assert "scorer_set" not in TABLE


@pytest.mark.parametrize("layout", [1, 2])
def test_a_released_store_is_what_the_log_would_give(store: Store, layout: int) -> None:
    store.insert(made_rows())
    name = released_store(store, layout, made_rows())
    seen: list[tuple[int, int]] = []
    opened = Store(store._dsn, name, threads=1, progress=lambda done, total: seen.append((done, total)))
    assert opened.checksums() == store.checksums()
    assert opened.next_offsets() == store.next_offsets()
    assert seen[-1] == (len(made_rows()), len(made_rows()))
    assert opened.ask("SELECT count() FROM outcomes").rows == store.ask("SELECT count() FROM outcomes").rows
    opened.close()


def test_an_interrupted_migration_is_taken_up_again(store: Store) -> None:
    store.insert(made_rows())
    name = released_store(store, 2, made_rows())

    class Interrupted(Exception):
        pass

    def interrupt(done: int, total: int) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        Store(store._dsn, name, threads=1, progress=interrupt)
    opened = Store(store._dsn, name, threads=1)
    assert opened.checksums() == store.checksums()
    opened.close()


def test_a_store_goes_back_and_forth(store: Store) -> None:
    store.insert(made_rows())
    before = store.checksums()
    migrate(store._writing, to=1)
    assert layout_of(store._writing) == 1
    ((rows, bodies),) = store.ask("SELECT count(), countIf(isValidJSON(body)) FROM events").rows
    assert rows == bodies == len(made_rows())
    again = Store(store._dsn, store._database, threads=1)
    assert again.checksums() == before
    again.close()


def test_a_newer_store_is_refused_in_one_sentence(store: Store) -> None:
    store._writing.command(f"INSERT INTO migrations (number, name) VALUES ({LAYOUT + 1}, 'from the future')")
    with pytest.raises(StoreFailed, match="made by a newer release") as refused:
        Store(store._dsn, store._database, threads=1)
    assert "\n" not in str(refused.value)


def test_a_field_that_an_existing_store_does_not_have_yet_is_added(store: Store) -> None:
    """As when a release adds a field to the envelope, or a figure to an event."""
    rows = made_rows()
    for column in ("idempotency_key", "priority", "metrics"):
        store._writing.command(f"ALTER TABLE events DROP COLUMN {column}")
    store._writing.command("DROP VIEW steps")
    opened = Store(store._dsn, store._database, threads=1)
    opened.insert(rows)
    wanted = sum(bool(row.get("metrics")) for row in rows)
    assert opened.ask("SELECT countIf(notEmpty(metrics)) FROM events").rows == [(wanted,)]
    opened.close()
