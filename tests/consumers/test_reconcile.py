"""The store against the log: what is missing, too much or different is found, and what is missing comes back."""

import pytest

from consumers.clickhouse.store import Store
from consumers.reconcile import Compared, reconcile
from streams.log.memory import MemoryLog
from tests.consumers.test_traces import events, write_all


@pytest.fixture
def filled(memory_log: MemoryLog, store: Store) -> MemoryLog:
    for event in events():
        memory_log.append(event)
    memory_log.append_bytes("tasks", b"key", b"no event at all")
    write_all(memory_log, store)
    return memory_log


def compared(log: MemoryLog, store: Store, repair: bool = False) -> list[Compared]:
    return reconcile(log, store, lambda: None, repair)


def disagreeing(places: list[Compared]) -> list[Compared]:
    return [place for place in places if not place.agrees]


def test_a_whole_store_agrees(filled: MemoryLog, store: Store) -> None:
    places = compared(filled, store)
    assert disagreeing(places) == []
    assert sum(place.log_events for place in places) == sum(place.store_rows for place in places) > 0


def test_a_missing_row_is_found_and_comes_back(filled: MemoryLog, store: Store) -> None:
    store._writing.command("DELETE FROM events WHERE type IN ('StepTaken', 'undecodable')")
    (steps, tasks) = disagreeing(compared(filled, store))
    assert (steps.topic, tasks.topic, tasks.missing) == ("steps", "tasks", 1)
    assert steps.missing == steps.log_events
    assert disagreeing(compared(filled, store, repair=True)) == []
    assert disagreeing(compared(filled, store)) == []


def test_a_row_that_says_something_else_is_found(filled: MemoryLog, store: Store) -> None:
    store._writing.command(
        "ALTER TABLE events UPDATE body = replaceAll(body, '1', '2') WHERE type = 'StepTaken'",
        settings={"mutations_sync": 1},
    )
    (steps,) = disagreeing(compared(filled, store))
    assert (steps.topic, steps.missing, steps.surplus) == ("steps", 0, 0)
    assert steps.differing > 0


def test_a_row_too_many_is_found(filled: MemoryLog, store: Store) -> None:
    store._writing.command("INSERT INTO events SELECT * FROM events WHERE type = 'BatchCut' LIMIT 1")
    (batches,) = disagreeing(compared(filled, store))
    assert (batches.topic, batches.surplus) == ("batches", 1)
