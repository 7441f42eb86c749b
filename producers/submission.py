"""Adds tasks to an active run: `replayground submit`, and the same from Python.

    with open("tasks.jsonl", "rb") as lines:
        submit(lines, run, log, sampling=Sampling())

A task's id is derived from the run and the content of the task. Tasks that the run has already are left out, so
submitting the same file twice changes nothing.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import batched

import msgspec

from replayground.producers.scheduling.ledger import RECENT_TASKS
from replayground.producers.task_lines import KnownNames, TaskLine, parse_lines
from replayground.producers.topology import agent_catalog_of
from replayground.schemas.events import Meta, Sampling, Task, TaskSubmitted
from replayground.schemas.ids import derived_id, now_microseconds
from replayground.schemas.job import load_job
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log, Reader

SESSION = "submitted"
"session of every task that the feeder did not make"
_EVENTS_AT_ONCE = 5000
_TASKS_AT_ONCE = RECENT_TASKS // 4
"""The log is read again before each so many tasks. Two people who submit the same file at once write no more than these
twice, and close together unless one of them stalls: the scheduler recognises copies that are close (RECENT_TASKS)."""


@dataclass(frozen=True, slots=True)
class SubmissionResult:
    """The result of a submission."""

    submitted: int
    repeated: int
    "tasks that the run has already, or that are in the file twice"


def submit(
    lines: Iterable[bytes], run: Run, log: Log, *, sampling: Sampling, source: str = "tasks", now: int | None = None
) -> SubmissionResult:
    """Submits tasks to a run; blocks until the log has acknowledged them. Errors name the lines as `source`.

    Raises BadInput when any line is bad, before anything is submitted; LogUnavailable."""
    job = load_job(run.job.module)
    names = KnownNames(job, agent_catalog_of(job, run.job.agents))
    parsed = parse_lines(lines, source, names, run.job.group_size)
    now = now_microseconds() if now is None else now
    # By task id: a line that is in the file twice is one task. Times differ by 1 µs, in the order of the lines.
    events = {
        event.meta.task_id or "": event
        for number, (line, task) in enumerate(parsed)
        for event in [_task_submitted(run, line, task, sampling, now + number)]
    }
    fresh = 0
    reader, known = log.reader(["tasks"], start=run.start, run_id=run.run_id), set[str]()
    try:
        for portion in batched(events.items(), _TASKS_AT_ONCE):
            # Just before the append: whatever somebody else has submitted meanwhile is left out.
            _read_ids(run, reader, known)
            new = [event for task_id, event in portion if task_id not in known]
            for event in new:
                log.append(event)
            # Acknowledged before the next portion, so that whoever submits the same file at this moment sees them.
            log.flush()
            fresh += len(new)
    finally:
        reader.close()
    return SubmissionResult(fresh, len(parsed) - fresh)


def _read_ids(run: Run, reader: Reader, known: set[str]) -> None:
    """Adds the ids of all submitted tasks of the run that are on the log by now."""
    # All of them: the scheduler recognises copies of the newest tasks only.
    while not reader.caught_up():
        for delivery in reader.poll(_EVENTS_AT_ONCE, 0.5):
            event = delivery.event
            if event is not None and event.meta.run_id == run.run_id and event.meta.session_id == SESSION:
                known.add(event.meta.task_id or "")


def _task_submitted(run: Run, line: TaskLine, task: Task, sampling: Sampling, timestamp: int) -> TaskSubmitted:
    # Only what makes the task: without the time, so that the same line gives the same id on another day.
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
