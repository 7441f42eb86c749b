"""The store against the log: what is missing, too much or different is found and put right."""

import pytest

from replayground.consumers.clickhouse.store import Store
from replayground.consumers.reconcile import PartitionComparison, reconcile
from replayground.streams.log.memory import MemoryLog
from tests.consumers.test_traces import events, write_all


@pytest.fixture
def filled(memory_log: MemoryLog, store: Store) -> MemoryLog:
    for event in events():
        memory_log.append(event)
    memory_log.append_bytes("tasks", b"key", b"no event at all")
    write_all(memory_log, store)
    return memory_log


def compared(log: MemoryLog, store: Store, repair: bool = False) -> list[PartitionComparison]:
    return reconcile(log, store, lambda: None, repair)


def disagreeing(places: list[PartitionComparison]) -> list[PartitionComparison]:
    return [place for place in places if not place.agrees]


def wrong(places: list[PartitionComparison]) -> list[PartitionComparison]:
    return [place for place in places if place.missing or place.surplus or place.differing or not place.agrees]


def row_count(store: Store) -> int:
    ((count,),) = store.ask("SELECT count() FROM events").rows
    return int(count)


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


def test_a_row_that_says_something_else_is_found_and_put_right(filled: MemoryLog, store: Store) -> None:
    for _ in range(2):  # the second time the very rows are inserted that were inserted before
        store._writing.command(
            "ALTER TABLE payloads UPDATE body = replaceAll(body, '1', '2') WHERE type = 'StepTaken'",
            settings={"mutations_sync": 1},
        )
        (steps,) = disagreeing(compared(filled, store))
        assert (steps.topic, steps.missing, steps.surplus) == ("steps", 0, 0)
        assert steps.differing > 0
        (mended,) = [place for place in compared(filled, store, repair=True) if place.differing]
        assert (mended.removed, mended.added, mended.agrees) == (steps.differing, steps.differing, True)
        assert wrong(compared(filled, store)) == []


def test_a_row_too_many_is_found_and_removed(filled: MemoryLog, store: Store) -> None:
    before = row_count(store)
    store._writing.command("INSERT INTO events SELECT * FROM events WHERE type = 'BatchCut' LIMIT 1")
    (batches,) = disagreeing(compared(filled, store))
    assert (batches.topic, batches.surplus) == ("batches", 1)
    compared(filled, store, repair=True)
    assert wrong(compared(filled, store)) == []
    assert row_count(store) == before


@pytest.mark.parametrize("offset", [1_000_000, 0], ids=["beyond the end", "of an empty partition"])
def test_a_row_without_an_event_is_found_and_removed(filled: MemoryLog, store: Store, offset: int) -> None:
    before = row_count(store)
    partition = 0 if offset else 99
    store._writing.command(
        "INSERT INTO events (topic, partition, offset, type, id) "
        f"VALUES ('rewards', {partition}, {offset}, 'RewardAssigned', 'nobody')"
    )
    (rewards,) = disagreeing(compared(filled, store))
    assert (rewards.topic, rewards.partition, rewards.surplus) == ("rewards", partition, 1)
    compared(filled, store, repair=True)
    assert wrong(compared(filled, store)) == []
    assert row_count(store) == before


def test_rows_of_what_the_log_has_forgotten_stay(filled: MemoryLog, store: Store) -> None:
    """A version whose newer message stands for it, and a heartbeat older than the topic's memory."""
    store._writing.command(
        "INSERT INTO events (topic, partition, offset, type, id) VALUES "
        "('weights', 0, 1000000, 'WeightsPublished', 'forgotten'), ('control', 99, 0, 'WorkerSeen', 'old')"
    )
    before = row_count(store)
    assert wrong(compared(filled, store, repair=True)) == []
    assert row_count(store) == before


def test_looking_changes_nothing(filled: MemoryLog, store: Store) -> None:
    store._writing.command("DELETE FROM events WHERE type = 'StepTaken'")
    before = row_count(store)
    compared(filled, store)
    assert row_count(store) == before
