"""Tasks that are added while a run goes on: what is checked, what is written, and that a second time changes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from replayground.producers.config import SchedulerSettings
from replayground.producers.scheduler import Plan
from replayground.producers.scheduling.ledger import RECENT_TASKS
from replayground.producers.submission import SESSION, SubmissionResult, submit
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Address, Event, RolloutRequested, Sampling, TaskSubmitted
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog
from tests.producers.field import a_log, a_run, events_on, published
from tests.producers.test_scheduler import loaded

LINES = [
    b'{"prompt": "2+2?", "reference": "4", "toolset": ["python"]}',
    b"",
    b'{"prompt": "key a?", "reference": "1", "toolset": ["kv"], "world": {"name": "w", "keys": {"a": 1}}, "group_size": 3}',
    b'{"prompt": "3+3?", "reference": "6", "purpose": "eval"}',
]
SAMPLING = Sampling(temperature=0.5)


def submitted_on(log: MemoryLog) -> list[TaskSubmitted]:
    return [event for event in events_on(log, "tasks") if isinstance(event, TaskSubmitted)]


def test_tasks_come_on_the_log_and_are_taken_up(tmp_path: Path) -> None:
    run = a_run(tmp_path, group_size=4)
    log, _ = a_log(tmp_path)
    assert submit(LINES, run, log, sampling=SAMPLING) == SubmissionResult(3, 0)
    events = {event.task.prompt: event for event in submitted_on(log)}
    assert {event.meta.session_id for event in events.values()} == {SESSION}
    assert {prompt: (e.meta.purpose, e.task.group_size, e.task.split) for prompt, e in events.items()} == {
        "2+2?": ("train", 4, "train"),
        "key a?": ("train", 3, "train"),
        "3+3?": ("eval", 1, "heldout"),
    }
    assert {event.sampling for event in events.values()} == {SAMPLING}
    plan = Plan(run, SchedulerSettings())
    for event in [published(1), loaded(1), *events.values()]:
        plan.apply(event)
    asked = [event for event in plan.decide(0) if isinstance(event, RolloutRequested)]
    assert len(asked) == 4 + 3 + 1


def test_the_same_file_twice_changes_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    log, _ = a_log(tmp_path)
    assert submit([*LINES, *LINES], run, log, sampling=SAMPLING) == SubmissionResult(3, 3)
    assert submit(LINES, run, log, sampling=SAMPLING, now=10**15) == SubmissionResult(0, 3)
    assert len(submitted_on(log)) == 3


def test_nothing_is_submitted_when_any_line_is_bad(tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    lines = [*LINES, b'{"prompt": "x", "scorers": ["exakt_match"]}']
    with pytest.raises(
        BadInput, match=r"more\.jsonl, line 5: there is no scorer 'exakt_match'; known scorers: .*exact_match"
    ):
        submit(lines, a_run(tmp_path), log, sampling=SAMPLING, source="more.jsonl")
    assert submitted_on(log) == []


def test_two_who_submit_the_same_file_at_the_same_time_write_little_twice(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    lines = [b'{"prompt": "%d?", "reference": "1"}' % number for number in range(3000)]

    class Shared(MemoryLog):
        """Somebody else submits the same in the middle of our submission."""

        appended = 0

        def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
            self.appended += 1
            if self.appended == 300:
                submit(lines, run, self, sampling=SAMPLING)
            super().append(event, acknowledged)

    log = Shared(Codec(MemoryRegistry(), Blobs(run.blobs_url)))
    submit(lines, run, log, sampling=SAMPLING)
    written = [event.meta.task_id for event in submitted_on(log)]
    assert len(set(written)) == len(lines)
    assert len(written) - len(lines) <= RECENT_TASKS // 4
