"""The log refuses what a program is not declared to do, and keeps two prefixes apart."""

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import KafkaError, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from replayground.deploy.local.ports import choose_ports
from replayground.deploy.local.stack import LogAddresses
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput, LogBroken, LogUnavailable
from replayground.schemas.events import Address, Event, Position
from replayground.schemas.programs import UndeclaredAccess
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import LogSettings, Run
from replayground.schemas.topics import TOPICS
from replayground.streams.log import connection
from replayground.streams.log.access import RECORD_FOLDER
from replayground.streams.log.connect import open_log, registry_of
from replayground.streams.log.kafka import KafkaLog, prefixes_of
from tests.flow.synthetic import rollout
from tests.torture.oracle import events_of
from tests.torture.programs import cut_program, streams_program
from tests.torture.scenario import completed_groups

Opened = Callable[[Run], KafkaLog]


@pytest.fixture
def opened() -> Iterator[Opened]:
    logs: list[KafkaLog] = []

    def open_it(run: Run) -> KafkaLog:
        logs.append(open_log(run))
        return logs[-1]

    yield open_it
    for log in logs:
        log.close()


def as_program(run: Run, program: str) -> Run:
    return msgspec.structs.replace(run, program=program, run_id=f"r{uuid.uuid4().hex[:8]}")


def with_prefix(run: Run, prefix: str) -> Run:
    return msgspec.structs.replace(run, log=msgspec.structs.replace(run.log, topic_prefix=prefix))


@pytest.fixture(scope="module")
def tenant(kafka_run: Run) -> Run:
    """A run on topics of its own, on the session's broker."""
    return tenant_of(kafka_run, "tenant-")


def tenant_of(run: Run, prefix: str) -> Run:
    run = with_prefix(run, prefix)
    log = open_log(run)
    log.make_topics()
    log.codec.register_all()
    log.close()
    return run


def _message() -> Event:
    return rollout(0, 0, run_id=uuid.uuid4().hex)[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda log: log.append(_message()),
        lambda log: log.append_bytes("groups", b"key", b"value"),
        lambda log: log.reader(["messages"]),
        lambda log: log.reader(["messages"], "cut-r"),
        lambda log: log.reader(["groups"], "trainer-r"),
        lambda log: log.begin_group("streams-r", ["groups"]),
        lambda log: log.transactor("trainer-r"),
        lambda log: log.count(["messages"]),
        lambda log: list(log.messages(["messages"])),
    ],
)
def test_what_is_not_declared_is_refused(use: Callable[[KafkaLog], object], kafka_run: Run, opened: Opened) -> None:
    with pytest.raises(UndeclaredAccess, match=r"program cut: .*schemas\.programs"):
        use(opened(as_program(kafka_run, "cut")))


def test_a_transaction_writes_what_is_declared(kafka_run: Run, opened: Opened) -> None:
    run = as_program(kafka_run, "cut")
    log = opened(run)
    reader = log.reader(["groups"], f"cut-{run.run_id}", alone=True)
    transactor = log.transactor(f"cut-{run.run_id}")
    with pytest.raises(UndeclaredAccess, match="program cut: write RolloutStarted"):
        transactor.commit([_message()], reader)
    reader.close()


def test_a_program_that_nobody_declared_cannot_open_the_log(kafka_run: Run) -> None:
    with pytest.raises(AssertionError, match="'cutter' is no program"):
        open_log(as_program(kafka_run, "cutter"))


def test_uses_are_recorded_once_for_those_who_compare(
    kafka_run: Run, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORD_FOLDER, str(tmp_path))
    log = opened(as_program(kafka_run, "rollouts"))
    for event in rollout(0, 0, run_id="recorded")[:1] * 2:
        log.append(event)
    log.reader(["weights"]).close()
    assert (tmp_path / "rollouts").read_text() == "write RolloutStarted\nread weights\n"


def test_two_prefixes_do_not_see_each_other(kafka_run: Run, tenant: Run, opened: Opened) -> None:
    run_id = uuid.uuid4().hex
    events = rollout(0, 0, run_id=run_id)
    log = opened(tenant)
    for event in events:
        log.append(event)
    log.flush()
    assert events_of(log, run_id, "messages") == events
    assert events_of(opened(kafka_run), run_id, "messages") == []
    reader = log.reader(["messages"], f"group-{run_id}")
    while not reader.caught_up():
        reader.poll(1000, 1.0)
    reader.commit()
    reader.close()
    assert log.group_lags(f"group-{run_id}", ["messages"])["messages"].lag == 0
    assert opened(kafka_run).group_lags(f"group-{run_id}", ["messages"])["messages"].committed == 0


def test_addresses_and_positions_have_no_prefix(tenant: Run, opened: Opened) -> None:
    log = opened(tenant)
    addresses: list[Address] = []
    event = _message()
    log.append(event, addresses.append)
    log.flush()
    assert addresses[0].topic == "messages"
    assert log.read_at(addresses) == [event]
    assert {position.topic for position in log.end_positions(["messages", "steps"])} == {"messages", "steps"}
    (found,) = [message for message in log.messages(["messages"]) if message.address == addresses[0]]
    assert found.value == log.codec.encode(event)
    assert log.unread("group-new", ["messages"])["messages"].oldest_milliseconds is not None


def test_transactions_of_two_prefixes_do_not_fence_each_other(kafka_run: Run, tenant: Run, opened: Opened) -> None:
    name = f"cut-{uuid.uuid4().hex}"
    (group,) = completed_groups(name, 1)
    logs = [opened(kafka_run), opened(tenant)]
    transactors = [log.transactor(name) for log in logs]
    for log, transactor in zip(logs, transactors, strict=True):
        reader = log.reader(["messages"], name, alone=True)
        transactor.commit([group], reader)
        reader.close()
        assert events_of(log, name, "groups") == [group]


def test_subjects_have_the_prefix_too(tenant: Run) -> None:
    registry = registry_of(tenant)
    try:
        subjects = set(registry._client.get_subjects())
    finally:
        registry.close()
    for topic in TOPICS:
        assert any(subject.startswith(f"tenant-{topic.name}-") for subject in subjects), topic.name


def test_streams_and_cut_work_with_a_prefix(tenant: Run, opened: Opened, tmp_path: Path) -> None:
    """Faust too: its sources, its group and its changelogs have the prefix, what it writes has not."""
    run = as_program(tenant, "streams")
    messages = [
        event for index in range(4) for event in rollout(0, index, answer=str(7 + index % 2), run_id=run.run_id)
    ]
    log = opened(msgspec.structs.replace(tenant, run_id=run.run_id))
    programs = [streams_program(run, tmp_path), cut_program(msgspec.structs.replace(run, program="cut"))]
    try:
        for event in messages:
            log.append(event)
        log.flush()
        until = time.monotonic() + 120
        while not (found := events_of(log, run.run_id, "groups")):
            assert all(program.is_alive for program in programs), [program.ended() for program in programs]
            assert time.monotonic() < until, "no group was completed"
            time.sleep(0.2)
    finally:
        for program in programs:
            program.leave()
        ends = [program.ended() for program in programs]
    assert ends == ["exit code 0"] * 2
    assert len(found) == 1
    assert log.group_lags(f"streams-{run.run_id}", ["messages"])["messages"].lag == 0
    topics = AdminClient({"bootstrap.servers": tenant.log.bootstrap_servers}).list_topics(timeout=20).topics
    assert f"tenant-streams-{run.run_id}-assemble-state-changelog" in topics


def test_a_wrong_prefix_is_told_with_those_that_there_are(kafka_run: Run, tenant: Run, opened: Opened) -> None:
    log = opened(with_prefix(kafka_run, "tennant-"))
    with pytest.raises(BadInput, match=r"no topics with topic_prefix 'tennant-' .* there are with '', 'tenant-'"):
        log.reader(["messages"])


def test_brokers_that_do_not_answer_are_told_to_the_operator_once(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "ASK_SECONDS", 1.0)
    nowhere = f"127.0.0.1:{choose_ports({'broker': 0})['broker']}"
    addresses = LogAddresses(LogSettings(bootstrap_servers=nowhere, registry_url="http://127.0.0.1"), tmp_path.as_uri())
    with pytest.raises(LogUnavailable, match=f"the brokers at {nowhere} do not answer"):
        opened(addresses.run_of("command")).end_positions(["runs"])
    assert capfd.readouterr().err == ""


def test_prefixes_are_those_with_every_topic() -> None:
    names = [topic.name for topic in TOPICS]
    assert prefixes_of(["a-runs", "other", *names, *(f"b.{name}" for name in names)]) == ["", "b."]


def test_the_registry_of_another_log_is_refused(kafka_run: Run, tenant: Run) -> None:
    run = tenant_of(kafka_run, "other-")
    codec = Codec(MemoryRegistry(), Blobs("memory://"))
    unknown = b"\0" + (2_000_000_000).to_bytes(4) + codec.encode(_message())[5:]
    log = open_log(run)
    log.require_registry()  # nothing is on the log yet
    log.append_bytes("messages", b"key", unknown)
    log.flush()
    with pytest.raises(BadInput, match=r"unknown schema id 2000000000.*registry of another log. Correct registry_url"):
        log.require_registry()
    log.append(_message())
    log.flush()
    log.require_registry()  # a foreign message alone says nothing
    log.close()


def test_a_topic_with_other_copies_than_wanted_is_refused(tenant: Run, opened: Opened) -> None:
    settings = msgspec.structs.replace(tenant.log, replication=3)
    with pytest.raises(BadInput, match=r"topic tenant-runs has 1 copies where \[log\] says replication = 3: set"):
        opened(msgspec.structs.replace(tenant, log=settings)).make_topics()


def test_more_copies_than_brokers_are_refused(tenant: Run, opened: Opened) -> None:
    settings = msgspec.structs.replace(tenant.log, replication=3, topic_prefix="copies-")
    with pytest.raises(BadInput, match=r"cannot have replication = 3 of \[log\]"):
        opened(msgspec.structs.replace(tenant, log=settings)).make_topics()


def test_a_topic_that_forgets_by_age_is_read_from_its_oldest_event(kafka_run: Run, opened: Opened) -> None:
    """Those that keep everything are not: test_log.py."""
    run = tenant_of(kafka_run, "forgetful-")
    log = opened(run)
    for topic in ("control", "steps"):
        for _ in range(10):
            log.append_bytes(topic, b"key", b"value")
    log.flush()
    admin = AdminClient({"bootstrap.servers": run.log.bootstrap_servers})
    removed = [TopicPartition(f"forgetful-{topic}", 0, 5) for topic in ("control", "steps")]
    for future in admin.delete_records(removed).values():
        future.result()
    start = [Position(topic=topic, partition=0, offset=3) for topic in ("control", "steps")]
    for group in (None, "group"):
        reader = log.reader(["control"], group, start=start)
        found = []
        while not reader.caught_up():
            found += reader.poll(100, 1.0)
        assert [delivery.address.offset for delivery in found] == [5, 6, 7, 8, 9]
        reader.close()
    with pytest.raises(LogBroken, match="removed unread"):
        log.reader(["control", "steps"], start=start)


def test_an_error_behind_messages_is_raised_by_the_next_poll(
    kafka_run: Run, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised by the same poll, it would drop messages that the positions have passed already."""
    run = as_program(kafka_run, "operator")
    log = opened(run)
    start = log.end_positions(["messages"])
    for event in rollout(0, 0, run_id=run.run_id):
        log.append(event)
    log.flush()
    gone = Message(topic="messages", partition=0, offset=5, error=KafkaError(KafkaError._AUTO_OFFSET_RESET))
    reader = log.reader(["messages"], start=start)
    take_fetched = reader._take_fetched
    monkeypatch.setattr(reader, "_take_fetched", lambda count: [*take_fetched(count), gone])
    found: list[Event | None] = []
    while not found:
        found += [delivery.event for delivery in reader.poll(1000, 1.0)]
    with pytest.raises(LogBroken, match="cannot be read on"):
        reader.poll(1000, 1.0)
    monkeypatch.undo()
    while not reader.caught_up():
        found += [delivery.event for delivery in reader.poll(1000, 1.0)]
    assert [event for event in found if event is not None and event.meta.run_id == run.run_id] == list(
        rollout(0, 0, run_id=run.run_id)
    )
    reader.close()
