"""Runs as facts: whoever writes a start reads back whether it has it."""

import json
from collections.abc import Callable, Sequence

import msgspec
import pytest

from replayground.deploy.experience.runs import Interrupted, ended_on_log, write_new_run
from replayground.deploy.runs import (
    end_of,
    find_run,
    list_runs,
    only_id,
    started_event,
    write_end,
    write_resume,
    write_start,
)
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput, LogUnavailable
from replayground.schemas.events import Address, Event, Position, RunResumed, RunStarted
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog, MemoryReader


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))


def start_of(run_id: str) -> RunStarted:
    config = json.dumps({"job": {"module": "m", "steps": 1}})
    return started_event(run_id, "practise", config, [], 0, "v", {}, [])


def test_a_run_is_started_stopped_and_resumed(log: MemoryLog) -> None:
    assert write_start(log, start_of("a")).starts == 0
    write_end(log, "a", 0, "stopped", "by me")
    assert not list_runs(log)["a"].is_active
    assert write_resume(log, "a", "v", {}).starts == 1
    write_end(log, "a", 1, "finished", "done")
    assert list_runs(log)["a"].is_finished
    assert write_resume(log, "a", "v", {}).starts == 2


def test_an_id_belongs_to_the_first_who_wrote_it(log: MemoryLog) -> None:
    write_start(log, start_of("a"))
    with pytest.raises(BadInput, match="another run got the id a"):
        write_start(log, start_of("a"))


class InterruptedLog(MemoryLog):
    """Ctrl-C comes once: before the next event is on the log, or after it, before it is acknowledged."""

    comes = ""

    def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
        if self.comes == "before":
            self.comes = ""
            raise KeyboardInterrupt
        super().append(event, acknowledged)

    def flush(self, timeout_seconds: float = 30.0) -> None:
        if self.comes == "after":
            self.comes = ""
            raise KeyboardInterrupt
        super().flush(timeout_seconds)


@pytest.fixture
def interrupted() -> InterruptedLog:
    return InterruptedLog(Codec(MemoryRegistry(), Blobs("memory://")))


def test_a_start_that_is_interrupted_is_ended_if_it_is_on_the_log(interrupted: InterruptedLog) -> None:
    interrupted.comes = "after"
    with pytest.raises(Interrupted) as stopped:
        write_new_run(interrupted, "rescore", start_of)
    state = list_runs(interrupted)[stopped.value.run_id]
    assert (state.reason, state.detail) == ("stopped", "interrupted while it started")
    assert write_resume(interrupted, state.run_id, "v", {}).is_active


def test_a_start_that_is_interrupted_before_it_is_on_the_log_leaves_nothing(interrupted: InterruptedLog) -> None:
    interrupted.comes = "before"
    with pytest.raises(KeyboardInterrupt):
        write_new_run(interrupted, "rescore", start_of)
    assert list_runs(interrupted) == {}


@pytest.mark.parametrize(
    ("error", "raised", "reason"),
    [(KeyboardInterrupt(), Interrupted, "stopped"), (LogUnavailable("away"), LogUnavailable, "failed")],
)
def test_work_on_a_run_that_ends_early_ends_the_run(
    log: MemoryLog, error: BaseException, raised: type[BaseException], reason: str
) -> None:
    state = write_new_run(log, "retrain", start_of)
    with pytest.raises(raised), ended_on_log(log, state):
        raise error
    assert list_runs(log)[state.run_id].reason == reason


def test_a_start_ends_once(log: MemoryLog) -> None:
    write_start(log, start_of("a"))
    write_end(log, "a", 0, "finished", "done")
    write_end(log, "a", 0, "stopped", "too late")
    end = end_of(log, "a", 0)
    assert end is not None
    assert (end.reason, end.detail) == ("finished", "done")
    assert len(log.end_positions(["runs"])) == 1
    assert log.end_positions(["runs"])[0].offset == 2


class Rivalled(MemoryLog):
    """A log on which somebody else resumes the same run just before our first resume is written."""

    rivals = 0

    def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
        if isinstance(event, RunResumed) and self.rivals == 0:
            self.rivals += 1
            super().append(msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, id="rival")))
        super().append(event, acknowledged)


def test_of_two_who_resume_at_once_each_gets_a_number_of_its_own() -> None:
    log = Rivalled(Codec(MemoryRegistry(), Blobs("memory://")))
    write_start(log, start_of("a"))
    assert write_resume(log, "a", "v", {}).starts == 2
    assert log.rivals == 1


class AwayOnce(MemoryLog):
    """A log that is away when it is asked for the first time."""

    away = True

    def reader(
        self,
        topics: Sequence[str],
        group: str | None = None,
        *,
        alone: bool = False,
        start: Sequence[Position] = (),
        run_id: str | frozenset[str] | None = None,
        partitions: Sequence[int] | None = None,
    ) -> MemoryReader:
        if self.away:
            self.away = False
            raise LogUnavailable("no leader")
        return super().reader(topics, group, alone=alone, start=start, run_id=run_id, partitions=partitions)


def test_a_log_that_is_away_for_a_moment_is_waited_for() -> None:
    log = AwayOnce(Codec(MemoryRegistry(), Blobs("memory://")))
    assert write_start(log, start_of("a")).run_id == "a"
    assert not log.away


def test_the_end_of_an_older_start_does_not_end_the_run(log: MemoryLog) -> None:
    write_start(log, start_of("a"))
    write_resume(log, "a", "v", {})
    write_end(log, "a", 0, "taken_over", "gave way")
    assert list_runs(log)["a"].is_active
    assert end_of(log, "a", 1) is None


def test_a_run_is_found_by_any_beginning_that_only_it_has(log: MemoryLog) -> None:
    for run_id in ("2026-a", "2026-b", "2026-b-2"):
        write_start(log, start_of(run_id))
    states = list_runs(log).values()
    assert find_run(states, "2026-a").run_id == "2026-a"
    assert find_run(states, "2026-b").run_id == "2026-b", "an id that is also a beginning of another"
    with pytest.raises(BadInput, match="2026 is the beginning of 3 runs: 2026-a, 2026-b, 2026-b-2"):
        only_id([state.run_id for state in states], "2026")
    with pytest.raises(BadInput, match="there is no run 2027 on this field"):
        find_run(states, "2027")
