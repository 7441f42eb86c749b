"""Tasks that are added while a run goes on: `replayground submit`, and the same from Python.

    with open("tasks.jsonl", "rb") as lines:
        submit(lines, run, log, sampling=Sampling())

A task's id follows from the run and its content, and what the run has been given already is left out: submitting the same
file twice changes nothing.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import batched

import msgspec

from producers.scheduling.ledger import RECENT_TASKS
from producers.task_lines import KnownNames, TaskLine, parse_lines
from producers.topology import agent_catalog_of
from schemas.events import Meta, Sampling, Task, TaskSubmitted
from schemas.ids import derived_id, now_microseconds
from schemas.job import load_job
from schemas.run import Run
from streams.log.protocol import Log, Reader

SESSION = "submitted"
"session of every task that was not made by the feeder"
_EVENTS_AT_ONCE = 5000
_TASKS_AT_ONCE = RECENT_TASKS // 4
"""Before each so many tasks the log is read again. Two who submit the same file at the same time write no more than these twice,
and close to each other, unless one stalls just then: the scheduler knows a copy that is close."""


@dataclass(frozen=True, slots=True)
class SubmissionResult:
    """What came of a submission."""

    submitted: int
    repeated: int
    "tasks that the run has already, or that stand in the file twice"


def submit(
    lines: Iterable[bytes], run: Run, log: Log, *, sampling: Sampling, source: str = "tasks", now: int | None = None
) -> SubmissionResult:
    """Puts tasks to a run; returns when the log has them. `source` is what errors call the lines.

    Raises BadInput, before anything is submitted, when any line is bad; LogUnavailable."""
    job = load_job(run.job.module)
    names = KnownNames(job, agent_catalog_of(job, run.job.agents))
    parsed = parse_lines(lines, source, names, run.job.group_size)
    now = now_microseconds() if now is None else now
    events = {
        event.meta.task_id or "": event
        for number, (line, task) in enumerate(parsed)
        for event in [_task_submitted(run, line, task, sampling, now + number)]
    }
    fresh = 0
    reader, known = log.reader(["tasks"], start=run.start, run_id=run.run_id), set[str]()
    try:
        for portion in batched(events.items(), _TASKS_AT_ONCE):
            _read_ids(run, reader, known)
            new = [event for task_id, event in portion if task_id not in known]
            for event in new:
                log.append(event)
            log.flush()
            fresh += len(new)
    finally:
        reader.close()
    return SubmissionResult(fresh, len(parsed) - fresh)


def _read_ids(run: Run, reader: Reader, known: set[str]) -> None:
    """Adds all tasks of the run that are on the log by now: its planners remember the newest ones only."""
    while not reader.caught_up():
        for delivery in reader.poll(_EVENTS_AT_ONCE, 0.5):
            event = delivery.event
            if event is not None and event.meta.run_id == run.run_id and event.meta.session_id == SESSION:
                known.add(event.meta.task_id or "")


def _task_submitted(run: Run, line: TaskLine, task: Task, sampling: Sampling, timestamp: int) -> TaskSubmitted:
    content = hashlib.sha256(msgspec.json.encode((line.purpose, task, sampling), order="sorted")).hexdigest()
    task_id = derived_id("task", run.run_id, SESSION, content)
    return TaskSubmitted(
        meta=Meta(
            id=derived_id("TaskSubmitted", task_id),
            run_id=run.run_id,
            session_id=SESSION,
            task_id=task_id,
            category="task",
            topic="tasks",
            sender="operator",
            receiver="scheduler",
            timestamp=timestamp,
            idempotency_key=task_id,
            purpose=line.purpose,
        ),
        task=task,
        sampling=sampling,
    )
