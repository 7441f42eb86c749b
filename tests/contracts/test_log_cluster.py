"""The log on a cluster of three brokers: SASL_SSL, three copies, ACLs made from the table, a prefix for each tenant."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from replayground.deploy.local.cluster import NODES
from replayground.schemas.errors import BadInput, LogUnavailable, NotAllowed
from replayground.schemas.events import Address, Event
from replayground.schemas.programs import ACCESS, WATCHED, Access
from replayground.schemas.run import Run, SecuritySettings
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from tests.flow.synthetic import rollout
from tests.torture.oracle import events_of
from tests.torture.programs import streams_program
from tests.torture.secure_field import SecureField, secure_field
from tests.torture.stopping import await_that

A, B = "a.", "b."


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureField]:
    with secure_field(tmp_path_factory.mktemp("secure"), [A, B]) as field:
        yield field


def with_security(run: Run, **changes: str) -> Run:
    security = msgspec.structs.replace(run.log.security, **changes)
    return msgspec.structs.replace(run, log=msgspec.structs.replace(run.log, security=security))


@pytest.mark.parametrize("access", ACCESS, ids=lambda access: access.program)
def test_a_program_may_do_what_it_is_declared_to_do(access: Access, field: SecureField) -> None:
    run = field.run_of(A, access.program, run_id=f"r{uuid.uuid4().hex[:8]}")
    with closing(open_log(field.run_of(A))) as operator:
        for topic in access.consumes:
            operator.append_bytes(topic, b"key", b"of a test")
    with closing(open_log(run)) as log:
        for topic in sorted(access.topics_written):
            log.append_bytes(topic, b"key", b"of a test")
        log.flush()
        log.unread("traces", WATCHED)
        _read(log, access, run.run_id)


def _read(log: KafkaLog, access: Access, run_id: str) -> None:
    if access.reads:
        reader = log.reader(access.reads)
        while not reader.caught_up():
            reader.poll(1000, 1.0)
        reader.close()
    if access.consumes:
        group = access.group_of(run_id)
        reader = log.reader(list(access.consumes), group, alone=access.is_transactional)
        while not reader.caught_up():
            reader.poll(1000, 1.0)
        if access.is_transactional:
            transactor = log.transactor(group)
            transactor.commit([], reader)
            transactor.close()
        else:
            reader.commit()
        reader.close()
        until = time.monotonic() + 30  # positions of a transaction are there a moment after its commit
        while any(
            group_lags.committed == 0 < group_lags.end
            for group_lags in log.group_lags(group, list(access.consumes)).values()
        ):
            assert time.monotonic() < until, f"{group} has no positions"


@pytest.mark.parametrize(
    ("program", "user", "use", "what"),
    [
        ("cut", "trainer", lambda log: log.reader(["groups"]), "topic a.groups"),
        ("cut", "vllm", lambda log: log.reader(["groups"], "cut-r", alone=True), "topic a.groups"),
        ("trainer", "scheduler", lambda log: log.reader(["batches"], "trainer-r", alone=True), "group trainer-r"),
        ("trainer", "cut", lambda log: log.transactor("trainer-r"), "transactional id trainer-r"),
        ("rollouts", "vllm", lambda log: _append(log), "write an event"),
    ],
)
def test_a_program_with_the_credentials_of_another_is_told(
    program: str, user: str, use: Callable[[KafkaLog], object], what: str, field: SecureField
) -> None:
    log = open_log(field.run_of(A, program, user))
    with pytest.raises(
        NotAllowed, match=f"program {program} as user a.{user} is not allowed to .*{what}.*replayground acls"
    ):
        use(log)
    log.codec.close()


def _append(log: KafkaLog) -> None:
    log.append(rollout(0, 0, run_id="refused")[0])
    log.flush()


def test_streams_with_the_credentials_of_another_end_at_once(field: SecureField, tmp_path: Path) -> None:
    program = streams_program(field.run_of(A, "streams", "cut"), tmp_path)
    assert program.ended().startswith("NotAllowed: program streams as user a.cut is not allowed")


@pytest.mark.parametrize(
    "use",
    [
        lambda log: log.reader(["messages"]),
        lambda log: log.transactor("operator-r"),
        lambda log: log.make_topics(),
        lambda log: _append(log),
    ],
)
def test_a_wrong_password_is_told_at_once(
    use: Callable[[KafkaLog], object], field: SecureField, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRONG", "password")
    log = open_log(with_security(field.run_of(A), password="env:WRONG"))
    with pytest.raises(NotAllowed, match=r"do not accept program operator as user a\.operator: .*\[log\.security\]"):
        use(log)
    log.codec.close()


def test_brokers_of_another_authority_are_not_trusted(field: SecureField) -> None:
    run = with_security(field.run_of(A), ca_file="")
    with pytest.raises(NotAllowed, match="do not accept"):
        open_log(run).reader(["messages"])


def test_clients_without_credentials_are_refused(field: SecureField) -> None:
    run = field.run_of(A)
    run = msgspec.structs.replace(run, log=msgspec.structs.replace(run.log, security=SecuritySettings()))
    with pytest.raises((NotAllowed, LogUnavailable)):
        open_log(run).reader(["messages"])


def test_a_missing_password_file_is_named(field: SecureField) -> None:
    run = with_security(field.run_of(A), password="file:/no/such/{program}")
    with pytest.raises(BadInput, match="file:/no/such/operator"):
        open_log(run).reader(["messages"])


def test_tenants_neither_see_nor_reach_each_other(field: SecureField) -> None:
    run_id = uuid.uuid4().hex
    events = rollout(0, 0, run_id=run_id)
    with closing(open_log(field.run_of(A))) as a, closing(open_log(field.run_of(B))) as b:
        for event in events:
            a.append(event)
        a.flush()
        assert events_of(a, run_id, "messages") == events
        assert events_of(b, run_id, "messages") == []
    as_b = msgspec.structs.replace(field.run_of(A), log=field.running.cluster.log_settings(f"{B}{{program}}", A))
    with pytest.raises(NotAllowed, match=r"as user b\.operator is not allowed to see topic a\.messages"):
        open_log(as_b).reader(["messages"])


def test_topics_have_three_copies_of_which_two_must_be_in_sync(field: SecureField) -> None:
    with closing(open_log(field.run_of(A))) as log:
        log.make_topics()  # compares what is there with what [log] says
    run = field.run_of(A)
    fewer = msgspec.structs.replace(run, log=msgspec.structs.replace(run.log, min_in_sync=1))
    with (
        closing(open_log(fewer)) as log,
        pytest.raises(BadInput, match=r"min\.insync\.replicas 2 where the map says 1"),
    ):
        log.make_topics()


def test_a_reader_learns_the_ends_of_its_topics_while_a_broker_is_away(field: SecureField) -> None:
    """A client that knows the dead broker as a leader finds the new one. One that waits for the old gives up (LogUnavailable)."""
    with closing(open_log(field.run_of(A, "scheduler"))) as log, closing(log.reader(["tasks", "groups"])) as reader:
        while not reader.caught_up():
            reader.poll(1000, 1.0)
        for node in NODES:
            field.running.kill(node)
            assert reader.caught_up()
            field.running.start(node)
            await_that(field.is_in_sync, "every replica is in sync")


def test_streams_assemble_while_a_broker_is_killed(field: SecureField, tmp_path: Path) -> None:
    """Faust by SASL_SSL, as its own user. Each node is killed once, and started again."""
    run_id = f"r{uuid.uuid4().hex[:8]}"
    run = field.run_of(A, "streams", run_id=run_id)
    program = streams_program(run, tmp_path)
    acknowledged: list[Address] = []
    rollouts = [rollout(group, 0, group_size=1, run_id=run_id) for group in range(9)]
    try:
        with closing(open_log(field.run_of(A))) as log:
            for number, messages in enumerate(rollouts):
                for event in messages:
                    log.append(event, acknowledged.append)
                log.flush(60.0)
                if number % 3 == 1:
                    node = 1 + number // 3
                    field.running.kill(node)
                    field.running.start(node)
            assert len(acknowledged) == sum(map(len, rollouts))
            until = time.monotonic() + 180
            while len({event.meta.id for event in _trajectories(log, run_id)}) < len(rollouts):
                if not program.is_alive:
                    # It met a broker that had just died, by our client (LogUnavailable) or by Faust's (an error of
                    # aiokafka): a supervisor starts it again. These it would not.
                    assert not program.ended().startswith(("exit code", "NotAllowed", "LogBroken"))
                    program = streams_program(run, tmp_path)
                assert time.monotonic() < until, "trajectories are missing"
                time.sleep(0.5)
    finally:
        program.leave()
        program.ended()


def _trajectories(log: KafkaLog, run_id: str) -> list[Event]:
    try:
        return events_of(log, run_id, "trajectories")
    except LogUnavailable:
        return []
