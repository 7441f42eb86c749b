"""Lags and the flow are those of the declared programs."""

from replayground.consumers.dashboard.flow import FLOW
from replayground.consumers.lag_watch import expiries_of, groups_of, lags_of
from replayground.schemas.programs import ACCESS
from replayground.schemas.run import FIELD
from replayground.schemas.topics import TOPICS
from replayground.streams.log.memory import MemoryLog
from tests.consumers.synthetic_run import SyntheticRun, run_of


def test_every_declared_group_is_watched_once() -> None:
    groups = groups_of("r")
    assert [group.program for group in groups] == [access.program for access in ACCESS if access.consumes]
    assert {group.name for group in groups} == {*("rollouts-r", "streams-r", "judge-r", "cut-r", "trainer-r", "traces")}


def test_the_field_has_only_groups_of_its_own() -> None:
    assert {group.name for group in groups_of(FIELD)} == {"traces"}


def test_lags_are_of_the_chosen_run_and_of_the_field(memory_log: MemoryLog) -> None:
    SyntheticRun(run_of(steps=2, demonstrations=1, run_id="one"), 1).append_to(memory_log)
    start = memory_log.end_positions([topic.name for topic in TOPICS])
    events = SyntheticRun(run_of(steps=1, demonstrations=1, run_id="two"), 1).append_to(memory_log)
    # The run has no judges, so their group never begins, and is not behind.
    for group in groups_of("two"):
        if not group.of_field and not group.is_optional:
            memory_log.begin_group(group.name, list(group.stage_by_topic), start)
    lags = lags_of(memory_log, "two", of_field=False)
    assert list(lags) == ["rollouts", "assemble", "score", "group", "cut", "trainer"]
    assert lags["assemble"] == sum(event.meta.topic == "messages" for event in events)
    assert lags["trainer"] == 1
    reader = memory_log.reader(["groups"], "cut-two")
    while not reader.caught_up():
        reader.poll(100, 0.0)
    reader.commit()
    assert lags_of(memory_log, "two", of_field=False)["cut"] == 0
    every = sum(memory_log.count([topic.name for topic in TOPICS]).values())
    assert lags_of(memory_log, "two", of_field=True) == {"traces": every}


def test_only_what_a_topic_forgets_can_expire(memory_log: MemoryLog) -> None:
    SyntheticRun(run_of(steps=1, demonstrations=1), 1).append_to(memory_log)
    (expiry,) = expiries_of(memory_log, "run-1", now_milliseconds=0)
    assert (expiry.group, expiry.topic) == ("traces", "control")


def test_the_flow_has_every_topic_with_the_stage_that_takes_it() -> None:
    assert [station.topic for station in FLOW] == [topic.name for topic in TOPICS]
    stages = {station.topic: station.stage for station in FLOW if station.stage}
    declared = [(access, topic) for access in ACCESS if not access.of_field for topic in access.consumes]
    assert stages.keys() == {topic for _, topic in declared}
    # Of several stages of a topic the page shows one that every run has.
    always = {topic: access.consumes[topic] for access, topic in declared if not access.is_optional}
    optional = {topic: access.consumes[topic] for access, topic in declared if access.is_optional}
    assert stages == optional | always
