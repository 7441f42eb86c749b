"""Answers that are kept: for their own parameters, and no longer than they are true."""

from replayground.consumers.clickhouse.query_cache import CachedQuery, QueryCache
from replayground.consumers.clickhouse.store import Store
from replayground.schemas.events import Event
from replayground.streams.log.memory import MemoryLog
from tests.consumers.synthetic_run import SyntheticRun
from tests.consumers.test_summary import RUN
from tests.consumers.test_traces import write_all

COUNT = "SELECT count() AS events FROM events WHERE run_id = {run:String}"
OF_TYPE = f"{COUNT} AND type = {{type:String}}"
SINCE = f"{COUNT} AND timestamp >= {{since:Int64}}"


def write_run(log: MemoryLog, store: Store) -> list[Event]:
    events = list(SyntheticRun(RUN, evaluation_tasks=2).events())
    for event in events:
        log.append(event)
    write_all(log, store)
    return events


def test_every_parameter_has_an_answer_of_its_own(memory_log: MemoryLog, store: Store) -> None:
    events = write_run(memory_log, store)
    answers, question = QueryCache(store), CachedQuery(OF_TYPE, ("StepTaken", "TaskSubmitted"), seconds=600)
    for kind in ("StepTaken", "TaskSubmitted", "StepTaken"):
        count = sum(type(event).__name__ == kind for event in events)
        assert answers.ask(question, {"run": RUN.run_id, "type": kind}).rows == [(count,)]


def test_an_answer_that_moves_with_the_clock_does_not_outlive_its_time(memory_log: MemoryLog, store: Store) -> None:
    """Programs that have ended insert nothing: without this they would be shown as running for ever."""
    events = write_run(memory_log, store)
    last = max(event.meta.timestamp for event in events)
    answers = QueryCache(store)
    asked = CachedQuery(SINCE, ("WorkerSeen",), moving=("since",))
    assert answers.ask(asked, {"run": RUN.run_id, "since": 0}).rows == [(len(events),)]
    assert answers.ask(asked, {"run": RUN.run_id, "since": last + 1}).rows == [(0,)]
    patient = CachedQuery(SINCE, ("WorkerSeen",), seconds=600, moving=("since",))
    assert answers.ask(patient, {"run": RUN.run_id, "since": 0}).rows == [(0,)], "kept for its seconds"
