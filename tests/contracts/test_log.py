"""One suite, two logs: whatever the protocol promises holds on Kafka and in memory."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.blobs import Blobs
from schemas.codec import EVENT_BYTES_MAX, Codec
from schemas.errors import Fenced, LogUnavailable
from schemas.events import Address, Event, Position, ToolObserved
from schemas.registry import MemoryRegistry
from schemas.run import Run
from streams.driver import Driver
from streams.hops.flow import hops
from streams.hops.groups_to_batches import CutGroups
from streams.log.connect import open_log
from streams.log.kafka import KafkaLog
from streams.log.memory import MemoryLog
from streams.log.protocol import Delivery, Log, Reader, Unread
from tests.flow.synthetic import groups, rollout

OpenLog = Callable[[], Log]


@pytest.fixture(params=["memory", "kafka"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenLog]:
    """Opens the same log again and again, as several programs would."""
    if request.param == "memory":
        memory = MemoryLog(Codec(MemoryRegistry(), Blobs((tmp_path / "blobs").as_uri())))
        yield lambda: memory
        return
    run: Run = request.getfixturevalue("kafka_run")
    logs: list[Log] = []

    def open_again() -> Log:
        logs.append(open_log(run))
        return logs[-1]

    yield open_again
    for log in logs:
        log.close()


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


def drained(reader: Reader, run_id: str) -> list[Delivery]:
    """Everything of one run that is on the reader's topics now."""
    deliveries: list[Delivery] = []
    while not reader.caught_up():
        deliveries += reader.poll(1000, 1.0)
    return [d for d in deliveries if d.event is not None and d.event.meta.run_id == run_id]


def ids(deliveries: list[Delivery]) -> set[str]:
    return {delivery.event.meta.id for delivery in deliveries if delivery.event is not None}


def appended(log: Log, run_id: str, count: int = 6) -> list[Event]:
    events = [event for messages in groups(count, run_id=run_id) for event in messages]
    _append_all(log, events)
    return events


def test_what_goes_in_comes_out_in_order_per_key(opened: OpenLog, run_id: str) -> None:
    written = appended(opened(), run_id)
    read = [delivery.event for delivery in drained(opened().reader(["messages"]), run_id)]
    assert len(read) == len(written)
    by_key = {event.meta.trajectory_id for event in written}
    for key in by_key:
        of_key = [event for event in written if event.meta.trajectory_id == key]
        assert [event for event in read if event and event.meta.trajectory_id == key] == of_key


def test_one_key_is_on_one_partition(opened: OpenLog, run_id: str) -> None:
    appended(opened(), run_id)
    partitions: dict[str, set[int]] = {}
    for delivery in drained(opened().reader(["messages"]), run_id):
        partitions.setdefault(str(delivery.key), set()).add(delivery.address.partition)
    assert partitions
    assert all(len(found) == 1 for found in partitions.values())


def test_acknowledged_address_is_where_the_event_stands(opened: OpenLog, run_id: str) -> None:
    log = opened()
    addresses: list[Address] = []
    events = rollout(0, 0, run_id=run_id)
    for event in events:
        log.append(event, addresses.append)
    log.flush()
    assert log.read_at(list(reversed(addresses))) == list(reversed(events))


def test_an_address_without_event_is_an_error(opened: OpenLog, run_id: str) -> None:
    log = opened()
    addresses: list[Address] = []
    log.append(rollout(0, 0, run_id=run_id)[0], addresses.append)
    log.flush()
    beyond = Address(addresses[0].topic, addresses[0].partition, addresses[0].offset + 10_000_000)
    with pytest.raises(LookupError):
        log.read_at([beyond])


def test_a_group_goes_on_where_it_committed(opened: OpenLog, run_id: str) -> None:
    written = appended(opened(), run_id)
    group = f"group-{run_id}"
    first = opened().reader(["messages"], group)
    assert len(drained(first, run_id)) == len(written)
    first.commit()
    first.close()
    more = rollout(99, 0, run_id=run_id)
    log = opened()
    for event in more:
        log.append(event)
    log.flush()
    second = opened().reader(["messages"], group)
    assert [delivery.event for delivery in drained(second, run_id)] == more


def test_what_was_not_committed_is_delivered_again(opened: OpenLog, run_id: str) -> None:
    written = appended(opened(), run_id, count=2)
    group = f"group-{run_id}"
    for _ in range(2):
        reader = opened().reader(["messages"], group)
        assert len(drained(reader, run_id)) == len(written)
        reader.close()


def test_part_of_what_was_polled_can_be_committed(opened: OpenLog, run_id: str) -> None:
    appended(opened(), run_id, count=2)
    group = f"group-{run_id}"
    reader = opened().reader(["messages"], group)
    deliveries = drained(reader, run_id)
    kept = deliveries[0].address
    reader.commit([Position(topic=kept.topic, partition=kept.partition, offset=kept.offset)])
    reader.close()
    again = drained(opened().reader(["messages"], group), run_id)
    assert deliveries[0].address in [delivery.address for delivery in again]


def test_lag_is_what_a_group_has_not_committed(opened: OpenLog, run_id: str) -> None:
    log = opened()
    group = f"group-{run_id}"
    reader = opened().reader(["messages"], group)
    drained(reader, run_id)
    reader.commit()
    written = appended(log, run_id, count=2)
    lag = log.standing(group, ["messages"])["messages"].lag
    drained(reader, run_id)
    reader.commit()
    reader.close()
    assert lag >= len(written)
    assert log.standing(group, ["messages"])["messages"].lag == 0


def test_a_topic_that_is_not_known_has_no_lag_that_could_be_told(opened: OpenLog, run_id: str) -> None:
    """A broker that starts knows no topics: a lag of 0 would say that all is read."""
    with pytest.raises(LogUnavailable, match="does not know topic"):
        opened().standing(f"group-{run_id}", ["messages", "no-such-topic"])


def test_a_transaction_shows_events_and_positions_together(opened: OpenLog, run_id: str) -> None:
    log = opened()
    written = appended(log, run_id, count=2)
    group = f"group-{run_id}"
    reader = log.reader(["messages"], group)
    assert len(drained(reader, run_id)) == len(written)
    transactor = log.transactor(f"writer-{run_id}")
    before = log.count(["groups"])["groups"]
    transactor.commit([_group_completed(run_id)], reader)
    reader.close()
    assert log.count(["groups"])["groups"] == before + 1
    assert drained(opened().reader(["messages"], group), run_id) == []


def test_a_second_holder_of_a_name_fences_the_first(opened: OpenLog, run_id: str) -> None:
    log = opened()
    appended(log, run_id, count=1)
    reader = log.reader(["messages"], f"group-{run_id}")
    drained(reader, run_id)
    first = log.transactor(f"writer-{run_id}")
    second = opened().transactor(f"writer-{run_id}")
    with pytest.raises(Fenced):
        first.commit([_group_completed(run_id)], reader)
    second.commit([_group_completed(run_id)], reader)
    reader.close()
    seen = drained(opened().reader(["groups"]), run_id)
    assert len(seen) == 1


def test_an_event_too_large_for_the_log_is_spilled_unseen(opened: OpenLog, run_id: str) -> None:
    log = opened()
    events = rollout(0, 0, run_id=run_id)
    observed = next(event for event in events if isinstance(event, ToolObserved))
    large = msgspec.structs.replace(observed, content="x" * EVENT_BYTES_MAX)
    log.append(large)
    log.flush()
    delivery = drained(opened().reader(["messages"]), run_id)[0]
    assert delivery.event == large
    assert len(delivery.value) < 1000


def test_a_reader_wakes_up_for_what_is_appended_later(opened: OpenLog, run_id: str) -> None:
    reader = opened().reader(["messages"])
    drained(reader, run_id)
    events = rollout(0, 0, run_id=run_id)
    log = opened()
    writer = threading.Thread(target=_append_all, args=(log, events))
    writer.start()
    seen: list[Delivery] = []
    for _ in range(100):
        seen += [d for d in reader.poll(100, 1.0) if d.event is not None and d.event.meta.run_id == run_id]
        if len(seen) == len(events):
            break
    writer.join()
    assert [delivery.event for delivery in seen] == events


def _poll_for_long(reader: Reader, seen: list[Delivery]) -> None:
    for _ in range(100):
        seen += reader.poll(100, 1.0)


def _append_all(log: Log, events: list[Event]) -> None:
    for event in events:
        log.append(event)
    log.flush()


def _group_completed(run_id: str) -> Event:
    """Any event of a topic that few others write to."""
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for answer, index in (("7", 0), ("8", 1)):
        for event in rollout(0, index, answer=answer, group_size=2, run_id=run_id):
            log.append(event)
    Driver(log, hops((), "centred"), run_id).run_until_caught_up()
    (delivery,) = log.reader(["groups"]).poll(10, 0.0)
    assert delivery.event is not None
    assert CutGroups(run_id, 1, 4, 1).key(delivery.event) == run_id
    return delivery.event


def test_a_reader_can_begin_before_the_end(opened: OpenLog, run_id: str) -> None:
    log = opened()
    old = appended(log, run_id, count=12)
    log.flush()
    reader = log.reader(["messages"])
    reader.seek_before_end(0)
    new = rollout(1, 0, run_id=run_id)
    for event in new:
        log.append(event)
    log.flush()
    assert ids(drained(reader, run_id)) == {event.meta.id for event in new}
    reader.seek_before_end(1)
    newest = drained(reader, run_id)
    assert len(newest) == len({delivery.address.partition for delivery in newest})
    reader.seek_before_end(10**6)
    assert ids(drained(reader, run_id)) == {event.meta.id for event in [*old, *new]}
    reader.close()


def test_bytes_are_written_as_they_are(opened: OpenLog, run_id: str) -> None:
    log = opened()
    reader = log.reader(["messages"])
    reader.seek_before_end(0)
    log.append_bytes("messages", b"key", run_id.encode())
    log.flush()
    deliveries: list[Delivery] = []
    while not reader.caught_up():
        deliveries += reader.poll(1000, 1.0)
    reader.close()
    assert [(d.key, d.value, d.event) for d in deliveries if d.value == run_id.encode()] == [
        (b"key", run_id.encode(), None)
    ]


def test_unread_is_as_old_as_the_oldest_message_that_is_not_committed(opened: OpenLog, run_id: str) -> None:
    log, group = opened(), f"group-{run_id}"
    appended(log, run_id, count=2)
    reader = opened().reader(["messages"], group)
    drained(reader, run_id)
    reader.commit()
    assert log.unread(group, ["messages"])["messages"] == Unread(None)
    before = time.time_ns() // 1_000_000
    appended(log, run_id, count=2)
    after = time.time_ns() // 1_000_000
    oldest = log.unread(group, ["messages"])["messages"].oldest_milliseconds
    reader.close()
    assert oldest is not None
    assert before <= oldest <= after


def test_messages_are_everything_as_bytes(opened: OpenLog, run_id: str) -> None:
    log = opened()
    log.append_bytes("messages", b"key", run_id.encode())
    event = rollout(0, 0, run_id=run_id)[0]
    log.append(event)
    log.flush()
    found = {message.value: message for message in log.messages(["messages"])}
    assert found[run_id.encode()].key == b"key"
    delivery = drained(opened().reader(["messages"]), run_id)[0]
    assert found[delivery.value].address == delivery.address


def test_what_cannot_be_judged_is_neither_delivered_nor_passed(opened: OpenLog, run_id: str, tmp_path: Path) -> None:
    """The store of blobs goes away and comes back: until then nobody knows what a spilled event says."""
    blobs = tmp_path / "away"
    log = opened()
    assert isinstance(log, KafkaLog | MemoryLog)
    log.codec._blobs = Blobs(blobs.as_uri())
    reader = log.reader(["messages"], f"group-{run_id}")
    drained(reader, run_id)
    events = rollout(0, 0, run_id=run_id)
    observed = next(event for event in events if isinstance(event, ToolObserved))
    events[events.index(observed)] = msgspec.structs.replace(observed, content="x" * EVENT_BYTES_MAX)
    _append_all(log, events)
    blobs.rename(tmp_path / "elsewhere")
    seen: list[Delivery] = []
    with pytest.raises(LogUnavailable, match="there is no store of blobs"):
        _poll_for_long(reader, seen)
    reader.commit()
    (tmp_path / "elsewhere").rename(blobs)
    while len(seen) < len(events):
        seen += [d for d in reader.poll(100, 1.0) if d.event is None or d.event.meta.run_id == run_id]
    reader.close()
    assert [delivery.event for delivery in seen] == events


def test_an_unknown_schema_is_asked_for_once_a_poll(opened: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, or whoever writes with another registry makes every reader wait for an answer at each message; and at every
    poll anew, or what is registered later would be refused."""
    log = opened()
    assert isinstance(log, KafkaLog | MemoryLog)
    registry = log.codec._registry
    unknown = 2_000_000_000 + uuid.uuid4().int % 10**8
    asked: list[int] = []
    answer = registry.schema_of

    def counted(schema_id: int) -> dict[str, Any]:
        asked.append(schema_id)
        return answer(schema_id)

    monkeypatch.setattr(registry, "schema_of", counted)
    bad = b"\0" + unknown.to_bytes(4) + b"of another registry"
    reader = log.reader(["steps"])
    polls = 0
    for _ in range(2):
        for _ in range(20):
            log.append_bytes("steps", b"key", bad)
        log.flush()
        found = 0
        while found < 20:
            refused = [d.undecodable for d in reader.poll(1000, 1.0) if d.value == bad]
            assert set(refused) <= {f"unknown schema id {unknown}"}
            found += len(refused)
            polls += bool(refused)
    reader.close()
    assert asked.count(unknown) == polls
