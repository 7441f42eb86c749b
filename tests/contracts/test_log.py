"""One suite, two logs: whatever the protocol promises holds on Kafka and in memory."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import EVENT_BYTES_MAX, Codec
from replayground.schemas.errors import Fenced, LogBroken, LogUnavailable
from replayground.schemas.events import Address, Event, Meta, Position, Probe, ToolObserved, WeightsPublished
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.hops.groups_to_batches import CutGroups
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Delivery, Log, Reader, Tombstone, UnreadMessages
from replayground.streams.log.weights import removal_of, versions_on_log, weights_on_log
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
    lag = log.group_lags(group, ["messages"])["messages"].lag
    drained(reader, run_id)
    reader.commit()
    reader.close()
    assert lag >= len(written)
    assert log.group_lags(group, ["messages"])["messages"].lag == 0


def test_a_topic_that_is_not_known_has_no_lag_that_could_be_told(opened: OpenLog, run_id: str) -> None:
    """A broker that starts knows no topics: a lag of 0 would say that all is read."""
    with pytest.raises(LogUnavailable, match="does not know topic"):
        opened().group_lags(f"group-{run_id}", ["messages", "no-such-topic"])


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


def test_a_commit_that_was_started_is_on_the_log_when_it_was_waited_for(opened: OpenLog, run_id: str) -> None:
    transactor = opened().transactor(f"writer-{run_id}")
    for held in (2, 1):
        for _ in range(held):
            transactor.hold([_group_completed(run_id)])
        transactor.start_commit()()
    assert len(drained(opened().reader(["groups"]), run_id)) == 3
    transactor.hold([_group_completed(run_id)])
    transactor.start_commit()
    transactor.hold([_group_completed(run_id)])
    # Waits for what was started; what is only held is never written.
    transactor.close()
    assert len(drained(opened().reader(["groups"]), run_id)) == 4


def test_a_started_commit_of_an_earlier_holder_is_fenced(opened: OpenLog, run_id: str) -> None:
    first = opened().transactor(f"writer-{run_id}")
    first.hold([_group_completed(run_id)])
    second = opened().transactor(f"writer-{run_id}")
    with pytest.raises(Fenced):
        first.start_commit()()
    second.hold([_group_completed(run_id)])
    second.start_commit()()
    assert len(drained(opened().reader(["groups"]), run_id)) == 1


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


def everything(reader: Reader) -> list[Delivery]:
    deliveries: list[Delivery] = []
    while not reader.caught_up():
        deliveries += reader.poll(1000, 1.0)
    reader.close()
    return deliveries


def test_a_reader_of_one_run_passes_over_the_messages_of_others(opened: OpenLog, run_id: str) -> None:
    log, other = opened(), f"other-{run_id}"
    start = log.end_positions(["messages"])
    own, foreign = rollout(0, 0, run_id=run_id), rollout(0, 0, run_id=other)
    _append_all(log, [event for pair in zip(foreign, own, strict=True) for event in pair])
    everybodys = everything(opened().reader(["messages"], start=start))
    deliveries = everything(opened().reader(["messages"], start=start, run_id=run_id))
    assert [d.address for d in deliveries] == [d.address for d in everybodys]  # its positions say where each stands
    assert [d.event for d in deliveries if d.event is not None] == own
    passed = [d for d in deliveries if d.event is None]
    assert {(d.other_run, d.undecodable) for d in passed} == {(other, None)}
    assert len(passed) == len(foreign)


def test_positions_go_past_what_was_passed_over(opened: OpenLog, run_id: str) -> None:
    log, group = opened(), f"group-{run_id}"
    start = log.end_positions(["messages"])
    _append_all(log, rollout(0, 0, run_id=f"other-{run_id}"))
    reader = log.reader(["messages"], group, start=start, run_id=run_id)
    while not reader.caught_up():
        assert all(delivery.event is None for delivery in reader.poll(1000, 1.0))
    reader.commit()
    reader.close()
    assert log.group_lags(group, ["messages"])["messages"].lag == 0
    own = rollout(0, 0, run_id=run_id)
    _append_all(log, own)
    again = everything(opened().reader(["messages"], group, run_id=run_id))
    assert [delivery.event for delivery in again] == own


def test_what_cannot_be_decoded_is_passed_over_only_if_it_names_another_run(opened: OpenLog, run_id: str) -> None:
    log, other = opened(), f"other-{run_id}"
    start = log.end_positions(["messages"])
    own, foreign = (log.codec.encode(rollout(0, 0, run_id=name)[0])[:-7] for name in (run_id, other))
    nobodys = run_id.encode()
    for value in (own, foreign, nobodys):
        log.append_bytes("messages", b"key", value)
    log.flush()
    deliveries = everything(opened().reader(["messages"], start=start, run_id=run_id))
    assert [(d.value, d.other_run, d.undecodable is None, d.event) for d in deliveries] == [
        (own, None, False, None),
        (foreign, other, True, None),
        (nobodys, None, False, None),
    ]
    # of the run that it names, it is the one that cannot be decoded
    of_other = everything(opened().reader(["messages"], start=start, run_id=other))
    assert [(d.value, d.undecodable is None) for d in of_other] == [(own, True), (foreign, False), (nobodys, False)]


def test_a_spilled_event_of_another_run_is_passed_over_without_its_blob(
    opened: OpenLog, run_id: str, tmp_path: Path
) -> None:
    """Nor does a store of blobs that is away hold up a run that needs nothing from it."""
    blobs, log = tmp_path / "away", opened()
    assert isinstance(log, KafkaLog | MemoryLog)
    log.codec.blobs = Blobs(blobs.as_uri())
    start = log.end_positions(["messages"])
    observed = next(e for e in rollout(0, 0, run_id=f"other-{run_id}") if isinstance(e, ToolObserved))
    own = rollout(0, 0, run_id=run_id)
    _append_all(log, [msgspec.structs.replace(observed, content="x" * EVENT_BYTES_MAX), *own])
    blobs.rename(tmp_path / "elsewhere")
    deliveries = everything(log.reader(["messages"], start=start, run_id=run_id))
    assert [d.other_run for d in deliveries if d.event is None] == [f"other-{run_id}"]
    assert [d.event for d in deliveries if d.event is not None] == own
    with pytest.raises(LogUnavailable, match="there is no store of blobs"):
        everything(log.reader(["messages"], start=start))


def test_a_tombstone_is_written_with_the_transaction_and_delivered_to_nobody(opened: OpenLog, run_id: str) -> None:
    log, key = opened(), f"{run_id}:0".encode()
    start, before = log.end_positions(["weights"]), log.count(["weights"])["weights"]
    reader = log.reader(["messages"], f"group-{run_id}", alone=True)
    first, second = log.transactor(f"writer-{run_id}"), opened().transactor(f"writer-{run_id}")
    with pytest.raises(Fenced):
        first.commit([], reader, [Tombstone("weights", b"of a transaction that is not committed")])
    second.commit([_group_completed(run_id)], reader, [Tombstone("weights", key)])
    reader.close()
    assert [(m.key, m.value) for m in log.messages(["weights"], start)] == [(key, None)]
    assert log.count(["weights"])["weights"] == before
    for of_run in (None, run_id, "another"):
        assert everything(opened().reader(["weights"], start=start, run_id=of_run)) == []


def test_a_version_is_on_the_log_until_its_tombstone(opened: OpenLog, run_id: str) -> None:
    log = opened()
    start = tuple(log.end_positions(["weights"]))
    run = Run(run_id=run_id, seed=0, job=JobSettings(), log=LogSettings(), blobs_url="memory://", start=start)
    versions = [_weights(name, version) for name in (run_id, f"{run_id}:1", "other") for version in range(3)]
    _append_all(log, list(versions))
    assert versions_on_log(log, run) == {0, 1, 2}
    reader = log.reader(["messages"], f"group-{run_id}", alone=True)
    log.transactor(f"writer-{run_id}").commit([], reader, [removal_of(run, 1)])
    reader.close()
    assert versions_on_log(log, run) == {0, 2}
    assert [weights_on_log(log, run, version) for version in range(4)] == [versions[0], None, versions[2], None]


def _weights(run_id: str, version: int) -> Event:
    return WeightsPublished(
        meta=Meta(
            id=f"{run_id}-{version}", run_id=run_id, category="weights", topic="weights", sender="t", timestamp=0
        ),
        version=version,
        base_version=None,
        kind="full",
        files=[],
        checkpoint=[],
        batches=[],
        probe=Probe(tokens=b"", logprobs=b""),
    )


def test_unread_is_as_old_as_the_oldest_message_that_is_not_committed(opened: OpenLog, run_id: str) -> None:
    log, group = opened(), f"group-{run_id}"
    appended(log, run_id, count=2)
    reader = opened().reader(["messages"], group)
    drained(reader, run_id)
    reader.commit()
    assert log.unread(group, ["messages"])["messages"] == UnreadMessages(None)
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
    log.codec.blobs = Blobs(blobs.as_uri())
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


def test_a_reader_begins_at_its_start(opened: OpenLog, run_id: str) -> None:
    log = opened()
    appended(log, run_id, count=2)
    start = log.end_positions(["messages"])
    after = rollout(99, 0, run_id=run_id)
    _append_all(log, after)
    reader = opened().reader(["messages"], start=start)
    assert [delivery.event for delivery in drained(reader, run_id)] == after
    reader.close()


def test_end_positions_name_every_partition(opened: OpenLog, run_id: str) -> None:
    log = opened()
    before = {(p.topic, p.partition): p.offset for p in log.end_positions(["messages", "steps"])}
    written = appended(log, run_id, count=4)
    after = {(p.topic, p.partition): p.offset for p in log.end_positions(["messages", "steps"])}
    assert before.keys() == after.keys() == {*(("messages", number) for number in range(4)), ("steps", 0)}
    assert sum(after.values()) - sum(before.values()) == len(written)


def test_a_reader_at_the_end_has_caught_up(opened: OpenLog, run_id: str) -> None:
    log = opened()
    appended(log, run_id, count=1)
    reader = opened().reader(["messages"], start=log.end_positions(["messages"]))
    assert reader.caught_up()
    reader.close()


@pytest.mark.parametrize("alone", [False, True])
def test_a_new_group_begins_at_its_start(opened: OpenLog, run_id: str, alone: bool) -> None:
    log = opened()
    appended(log, run_id, count=2)
    start = log.end_positions(["messages"])
    after = rollout(99, 0, run_id=run_id)
    _append_all(log, after)
    reader = opened().reader(["messages"], f"group-{run_id}", alone=alone, start=start)
    assert [delivery.event for delivery in drained(reader, run_id)] == after
    reader.close()


@pytest.mark.parametrize("alone", [False, True])
def test_a_group_that_has_begun_goes_on_where_it_was(opened: OpenLog, run_id: str, alone: bool) -> None:
    """A run is resumed with its own start: what its groups have committed counts."""
    log, group = opened(), f"group-{run_id}"
    start = log.end_positions(["messages"])
    appended(log, run_id, count=2)
    first = opened().reader(["messages"], group, alone=alone, start=start)
    drained(first, run_id)
    first.commit()
    first.close()
    after = rollout(99, 0, run_id=run_id)
    _append_all(log, after)
    second = opened().reader(["messages"], group, alone=alone, start=start)
    assert [delivery.event for delivery in drained(second, run_id)] == after
    second.close()


@pytest.mark.parametrize("group", [None, "group"])
def test_a_start_beyond_the_end_is_of_another_log(opened: OpenLog, run_id: str, group: str | None) -> None:
    log = opened()
    start = [msgspec.structs.replace(p, offset=p.offset + 1) for p in log.end_positions(["messages"])]
    with pytest.raises(
        LogBroken, match=r"is to read messages/\d from \d+, and the topic ends at \d+: this is another log"
    ):
        opened().reader(["messages"], group and f"{group}-{run_id}", start=start)


def test_a_group_that_read_another_log_is_refused(opened: OpenLog, run_id: str) -> None:
    """Its brokers were replaced by others, and the positions are those it had on the first."""
    log, group = opened(), f"group-{run_id}"
    reader = opened().reader(["messages"], group, alone=True)
    reader.commit([msgspec.structs.replace(p, offset=p.offset + 1) for p in log.end_positions(["messages"])])
    reader.close()
    with pytest.raises(LogBroken, match="this is another log"):
        opened().begin_group(group, ["messages"])


def test_members_that_start_at_once_share_one_start(opened: OpenLog, run_id: str) -> None:
    log, group = opened(), f"group-{run_id}"
    appended(log, run_id, count=2)
    start = log.end_positions(["messages"])
    after = [event for number in range(50, 58) for event in rollout(number, 0, run_id=run_id)]
    logs = [opened(), opened()]
    barrier = threading.Barrier(2)
    seen: list[list[Delivery]] = [[], []]
    done = threading.Event()

    def member(number: int) -> None:
        barrier.wait()
        reader = logs[number].reader(["messages"], group, start=start)
        while not done.is_set():
            seen[number] += reader.poll(100, 0.1)
        reader.close()

    threads = [threading.Thread(target=member, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    _append_all(log, after)
    wanted = {event.meta.id for event in after}
    for _ in range(600):
        if ids(seen[0]) | ids(seen[1]) >= wanted:
            break
        time.sleep(0.1)
    done.set()
    for thread in threads:
        thread.join()
    assert ids([d for d in [*seen[0], *seen[1]] if d.event and d.event.meta.run_id == run_id]) == wanted


@pytest.fixture
def forgetting(kafka_run: Run, run_id: str) -> Iterator[str]:
    """A topic that no other test reads, whose first five of ten messages were removed by the broker."""
    admin = AdminClient({"bootstrap.servers": kafka_run.log.bootstrap_servers})
    topic = f"test-{run_id}"
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    log = open_log(kafka_run)
    for _ in range(10):
        log.append_bytes(topic, b"key", b"value")
    log.close()
    removed = TopicPartition(topic, 0, 5)
    admin.delete_records([removed])[removed].result()
    yield topic
    admin.delete_topics([topic])[topic].result()


def test_what_the_broker_removed_unread_is_not_passed_over(forgetting: str, kafka_run: Run, run_id: str) -> None:
    log, group = open_log(kafka_run), f"group-{run_id}"
    committed = [Position(topic=forgetting, partition=0, offset=3)]
    told = f"is to read {forgetting}/0 from 3, and the oldest event there is 5: 2 events were removed unread"
    try:
        with pytest.raises(LogBroken, match=told):
            log.reader([forgetting], start=committed)
        with pytest.raises(LogBroken, match=told):
            log.begin_group(group, [forgetting], start=committed)
        reader = log.reader([forgetting], group, alone=True)
        reader.commit(committed)
        reader.close()
        with pytest.raises(LogBroken, match=told):
            log.reader([forgetting], group)
        log.begin_group(f"{group}-later", [forgetting])  # a group without a position has missed nothing
    finally:
        log.close()


def test_what_is_removed_under_a_reader_is_noticed(forgetting: str, kafka_run: Run) -> None:
    log = open_log(kafka_run)
    reader = log.reader([forgetting])
    try:
        reader.seek([Position(topic=forgetting, partition=0, offset=6)])
        reader.poll(1, 10.0)
        reader.seek([Position(topic=forgetting, partition=0, offset=2)])
        with pytest.raises(LogBroken, match="the broker has removed those events"):
            _poll_for_long(reader, [])
    finally:
        reader.close()
        log.close()


def test_a_reader_that_is_alone_can_go_back_behind_what_its_group_has_committed(opened: OpenLog, run_id: str) -> None:
    log, group = opened(), f"group-{run_id}"
    start = log.end_positions(["messages"])
    events = appended(log, run_id, count=12)
    log.flush()
    reader = log.reader(["messages"], group, alone=True, start=start)
    drained(reader, run_id)
    reader.commit()
    reader.close()
    again = log.reader(["messages"], group, alone=True, start=start)
    again.seek(start)  # before anything was fetched
    assert ids(drained(again, run_id)) == {event.meta.id for event in events}
    again.seek(start)
    assert ids(drained(again, run_id)) == {event.meta.id for event in events}
    beyond = [msgspec.structs.replace(position, offset=position.offset + 10**6) for position in start]
    with pytest.raises(LogBroken, match="the topic ends at"):
        again.seek(beyond)
    again.close()


def test_messages_can_be_read_from_somewhere_on(opened: OpenLog, run_id: str) -> None:
    log = opened()
    log.append_bytes("messages", b"key", b"before")
    log.flush()
    start = log.end_positions(["messages"])
    log.append_bytes("messages", b"key", run_id.encode())
    log.flush()
    (message,) = log.messages(["messages"], start)
    assert message.value == run_id.encode()
    assert message.address.offset == next(p.offset for p in start if p.partition == message.address.partition)


def test_asking_about_many_groups_keeps_few_connections(kafka_run: Run, run_id: str) -> None:
    log = open_log(kafka_run)
    for number in range(40):
        assert log.group_lags(f"asked-{run_id}-{number}", ["steps"])["steps"].committed == 0
    assert len(log._askers) <= 32
    log.close()
