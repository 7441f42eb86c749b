"""What an operator sees of the log: reading along with filters, lags with rates, what may be lost, dead letters."""

import json
import time
import uuid

import pytest
from confluent_kafka import Producer

from replayground.consumers.lag_watch import expiries_of
from replayground.deploy.operate.dead_letters import dead_letters, describe, redrive, select
from replayground.deploy.operate.experience import progress_line
from replayground.deploy.operate.lag import lags
from replayground.deploy.operate.steer import control_event
from replayground.deploy.operate.tail import EventFilter, as_json, line, tail, topics_of
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.retention import expiry_of
from replayground.schemas.run import Run
from replayground.schemas.topics import TOPIC_BY_NAME
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.connect import open_log
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Delivery
from tests.flow.synthetic import RUN_ID, rollout


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for member in range(2):
        for event in rollout(0, member, group_size=2):
            log.append(event)
    log.append_bytes("messages", b"key", b"no event at all")
    return log


def derived(log: MemoryLog) -> None:
    Driver(log, hops((), "standardised"), RUN_ID).run_until_caught_up()


def read(
    log: MemoryLog, wanted: EventFilter, messages: int | None = None, topics: tuple[str, ...] = ()
) -> list[Delivery]:
    return list(tail(log, topics_of(topics), wanted, messages, lambda: False))


def test_everything_is_read_and_shown_in_one_line_each(log: MemoryLog) -> None:
    deliveries = read(log, EventFilter())
    assert len(deliveries) == 13
    shown = [line(delivery, 120) for delivery in deliveries]
    assert all(len(text) <= 120 and "\n" not in text for text in shown)
    assert any("TurnGenerated" in text and "g0-m0#1" in text for text in shown)
    assert any("undecodable" in text for text in shown)


def test_filters_narrow(log: MemoryLog) -> None:
    assert len(read(log, EventFilter(trajectory="g0-m1"))) == 6
    assert len(read(log, EventFilter(task="t0", types=frozenset({"TurnGenerated"})))) == 4
    assert read(log, EventFilter(run="another")) == []
    assert len(read(log, EventFilter(), topics=("rewards",))) == 0


def test_only_the_newest_are_read(log: MemoryLog) -> None:
    newest = read(log, EventFilter(), messages=1)
    assert 1 <= len(newest) <= 4  # one of every partition that has any


def test_json_holds_all_of_an_event(log: MemoryLog) -> None:
    told = json.loads(as_json(read(log, EventFilter(types=frozenset({"ToolCalled"})))[0]))
    assert (told["type"], told["event"]["tool"]) == ("ToolCalled", "python")
    assert told["address"]["topic"] == "messages"


def test_unknown_names_are_bad_input() -> None:
    with pytest.raises(BadInput, match="no topic news"):
        topics_of(["news"])
    with pytest.raises(BadInput, match="no event TurnGuessed"):
        EventFilter(types=frozenset({"TurnGuessed"}))


def test_lags_have_rates_from_the_second_look_on(log: MemoryLog) -> None:
    looks = lags(log, RUN_ID)
    first = {(row.group, row.topic): row for row in next(looks)}
    assert first["streams", "messages"].lag == 13
    assert first["streams", "messages"].taken_per_second is None
    reader = log.reader(["messages"], f"streams-{RUN_ID}")
    reader.poll(100, 0.0)
    reader.commit()
    second = {(row.group, row.topic): row for row in next(looks)}
    assert second["streams", "messages"].lag == 0
    assert (second["streams", "messages"].taken_per_second or 0) > 0


def test_a_dead_letter_is_listed_described_and_written_again(log: MemoryLog) -> None:
    derived(log)
    (letter,) = dead_letters(log)
    assert (letter.number, letter.reject.stage, letter.reject.original) == (1, "assemble", b"no event at all")
    assert "no Confluent wire header" in describe(log.codec, letter)
    assert dead_letters(log, stage="score") == []
    before = log.count(["messages"])["messages"]
    redrive(log, select(dead_letters(log), [1]))
    assert log.count(["messages"])["messages"] == before + 1
    with pytest.raises(BadInput, match="no dead letter 7"):
        select(dead_letters(log), [7])


def test_a_message_that_was_refused_for_want_of_another_is_taken_when_tried_again() -> None:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    messages = rollout(0, 0, group_size=1)
    for message in [*messages[:2], *messages[3:]]:  # the third is missing: what follows it is refused
        log.append(message)
    derived(log)
    refused = dead_letters(log)
    assert len(refused) == 3
    log.append(messages[2])
    redrive(log, refused)
    derived(log)
    assert log.count(["trajectories"]) == {"trajectories": 1}


CONTROL = TOPIC_BY_NAME["control"]
DAY_MILLISECONDS = 24 * 3600 * 1000


@pytest.mark.parametrize(
    ("age_days", "expired", "alarming"),
    [(0, 0, False), (22, 0, False), (23, 0, True), (31, 0, True), (0, 3, True), (None, 3, True)],
)
def test_unread_messages_alarm_before_the_topic_forgets_them(
    age_days: int | None, expired: int, alarming: bool
) -> None:
    now = 100 * DAY_MILLISECONDS
    oldest = None if age_days is None else now - age_days * DAY_MILLISECONDS
    expiry = expiry_of("traces", CONTROL, oldest, expired, now)
    assert expiry is not None
    assert expiry.is_alarming == alarming
    assert expiry.seconds_left == (30 - (age_days or 0)) * 24 * 3600
    assert str(expired) in str(expiry) if expired else "before retention removes" in str(expiry)


@pytest.mark.parametrize("topic", ["messages", "weights"])
def test_a_topic_that_forgets_nothing_never_alarms(topic: str) -> None:
    assert expiry_of("traces", TOPIC_BY_NAME[topic], 0, 0, 100 * DAY_MILLISECONDS) is None


def test_all_is_read_and_nothing_can_be_lost() -> None:
    assert expiry_of("traces", CONTROL, None, 0, 100 * DAY_MILLISECONDS) is None


def test_a_message_that_waits_on_the_real_broker_for_too_long_alarms(kafka_run: Run) -> None:
    """Its age is the one it was written with, so it is written as one of 29 days ago."""
    log, run_id = open_log(kafka_run), f"retention-{uuid.uuid4().hex[:8]}"
    reader = log.reader(["control"], "traces")
    while not reader.caught_up():
        reader.poll(1000, 1.0)
    reader.commit()
    now = time.time_ns() // 1_000_000
    assert [e for e in expiries_of(log, run_id, now) if e.is_alarming] == []
    producer = Producer({"bootstrap.servers": kafka_run.log.bootstrap_servers})
    producer.produce("control", b"no event", b"key", timestamp=now - 29 * DAY_MILLISECONDS)
    producer.flush()
    (row,) = [row for row in next(lags(log, run_id)) if (row.group, row.topic) == ("traces", "control")]
    assert row.expiry is not None
    assert row.expiry.is_alarming
    assert 23 * 3600 < row.expiry.seconds_left <= 24 * 3600
    while not reader.caught_up():
        reader.poll(1000, 1.0)
    reader.commit()
    reader.close()
    assert [e for e in expiries_of(log, run_id, now) if e.is_alarming] == []
    log.close()


def test_a_run_is_steered_by_facts() -> None:
    cancelled = control_event("run-1", "cancel", "task-1", None, False, "a wrong task", 7)
    assert (cancelled.command, cancelled.meta.task_id, cancelled.meta.timestamp) == ("cancel", "task-1", 7)
    assert control_event("run-1", "cancel", None, None, True, "", 7).meta.task_id is None
    assert control_event("run-1", "pause", None, None, False, "", 7).meta.run_id == "run-1"


@pytest.mark.parametrize(
    ("command", "task", "every", "says"),
    [
        ("stop", None, False, "one of pause"),
        ("cancel", None, False, "--task"),
        ("cancel", "t", True, "--task"),
        ("pause", "t", False, "whole run"),
    ],
)
def test_a_command_that_says_too_little_or_too_much_is_refused(
    command: str, task: str | None, every: bool, says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        control_event("run-1", command, task, None, every, "", 7)


def test_progress_says_a_rate_that_is_not_zero() -> None:
    assert progress_line("judging", 3_000, 12_000, 2.0, "") == "judging 25%  1,500/s  6 s left  "
    assert progress_line("training", 5, 40, 20.0, "taking step 5") == "training 12%  15/min  140 s left  taking step 5"
    assert progress_line("training", 0, 40, 3.0, "loading") == "training 0%  0/min  loading"
    assert progress_line("judging", 1, 1, 20.0, "comparing") == "judging 100%  comparing"
    assert progress_line("judging", 0, 0, 1.0, "reading") == "judging  reading"
