"""feeder: puts tasks to the field: demonstrations, then training, with held-out evaluations at the start, between and end.

Feed is pure: `apply` folds what happened, `decide` says what to submit next. The shell reads the log from its beginning
and lets the feed catch up before its first decision. Ids of tasks follow from run, session and number, so a restart
goes on where it was. For each evaluation the servers are told to hold its version and to let go when all have ended;
telling them twice changes nothing, so after a restart they are told again.
"""

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import singledispatchmethod
from itertools import count, cycle
from pathlib import Path
from typing import Any, Literal

import msgspec

from producers.config import FeederSettings
from producers.planner import follow
from producers.topology import Cast, cast_of
from sandboxes.outside.providers import require_tools
from sandboxes.worlds.world import world_from_json
from schemas.errors import BadInput
from schemas.events import (
    ControlIssued,
    Event,
    GroupSize,
    Meta,
    Purpose,
    Sampling,
    Task,
    TaskSubmitted,
    TrajectoryAssembled,
    WeightsPublished,
)
from schemas.ids import derived_id
from schemas.job import Job, load_job
from schemas.metrics import Pulse
from schemas.run import Run
from streams.log.connect import open_log
from streams.log.protocol import Log

TOPICS_READ = ("tasks", "trajectories", "weights")
_SENDER = "feeder"
_EVENTS_PER_DECISION_MAX = 1000

type Tasks = Callable[[str, int], Iterator[Task]]


def run(run: Run, settings: FeederSettings, pulse: Pulse, stop: threading.Event) -> None:
    """Feeds until told to stop. Raises LogUnavailable, and BadInput for a tasks file or job that cannot be used."""
    log = open_log(run)
    try:
        feed(run, settings, pulse, stop, log)
    finally:
        log.close()


def feed(run: Run, settings: FeederSettings, pulse: Pulse, stop: threading.Event, log: Log) -> None:
    """The program over any log."""
    job = load_job(run.job.module)
    feed = Feed(run, settings, tasks_of(run, settings, job), cast_of(job, run.job.agents))
    follow(feed, run.run_id, log, TOPICS_READ, settings.poll_seconds, pulse, stop, lambda: _tell(feed, pulse))


def _tell(feed: "Feed", pulse: Pulse) -> None:
    pulse.detail = feed.phase
    pulse.gauge("step", max(0, feed.version - feed.version_first))


def evaluation_session(version: int, kind: Literal["sampled", "greedy"]) -> str:
    """Name of the session that an evaluation is found by."""
    return f"eval-v{version:04d}-{kind}"


@dataclass(frozen=True, slots=True)
class _Session:
    """A set of tasks submitted under one name."""

    name: str
    purpose: Purpose
    split: str
    group_size: int
    sampling: Sampling
    required_version: int | None = None
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """What is judged at one version."""

    version: int
    sessions: tuple[_Session, ...]
    tasks: int


class Feed:
    """What was submitted, what came of it, and what to submit next. Pure: time is an argument."""

    def __init__(self, run: Run, settings: FeederSettings, tasks: Tasks, cast: Cast | None = None) -> None:
        self._run = run
        self._settings = settings
        self._tasks = tasks
        self._cast = cast or Cast()
        self.version_first = run.job.first_version
        self.version_last = self.version_first + run.job.steps
        self.version = -1
        "newest published version"
        self.phase = "waits for the first weights"
        self._submitted: set[str] = set()
        self._members_ended: defaultdict[str, set[int]] = defaultdict(set)
        self._ended: set[str] = set()
        self._ended_by_session: Counter[str] = Counter()
        self._streams: dict[str, Iterator[tuple[int, Task]]] = {}
        self._submitted_by_session: Counter[str] = Counter()
        self._evaluations = tuple(self._planned())
        self._held: set[int] = set()
        self._released: set[int] = set()

    # what happened

    @singledispatchmethod
    def apply(self, event: Event) -> None:
        """Takes note of a fact of the run; the same fact twice changes nothing. Feeding depends on no other."""

    @apply.register
    def _(self, event: TaskSubmitted) -> None:
        self._submitted.add(event.meta.task_id or "")

    @apply.register
    def _(self, event: TrajectoryAssembled) -> None:
        task_id = event.meta.task_id or ""
        if event.ended_by == "infra_error" or event.meta.purpose == "replay" or task_id in self._ended:
            return
        members = self._members_ended[task_id]
        members.add(event.index)
        if len(members) >= event.task.group_size:
            del self._members_ended[task_id]
            self._ended.add(task_id)
            self._ended_by_session[event.meta.session_id or ""] += 1

    @apply.register
    def _(self, event: WeightsPublished) -> None:
        self.version = max(self.version, event.version)

    # what follows

    def decide(self, now: int) -> list[Event]:
        """What to write next; it counts as done at once. `now` is in microseconds."""
        events: list[Event] = []
        self._demonstrate(now, events)
        for evaluation in self._evaluations:
            if self.version >= evaluation.version:
                self._evaluate(evaluation, now, events)
        if self._evaluated(self._evaluations[0]) and self.version >= self.version_first:
            self._train(now, events)
        self.phase = self._phase()
        return events

    def _phase(self) -> str:
        if self.version < self.version_first:
            done = self._ended_by_session["demonstrations"]
            return f"cold start: {done} of {self._run.job.demonstrations} demonstrations"
        for evaluation in self._evaluations:
            if self.version >= evaluation.version and not self._evaluated(evaluation):
                return f"evaluates version {evaluation.version}"
        return "done" if self.version >= self.version_last else f"trains: version {self.version} of {self.version_last}"

    def _planned(self) -> Iterator[_Evaluation]:
        every, first, last = self._settings.evaluation_every, self.version_first, self.version_last
        yield self._evaluation(first, self._settings.evaluation_tasks, greedy=first == last)
        if every > 0:
            for version in range(first + every, last, every):
                yield self._evaluation(version, self._settings.evaluation_tasks_between)
        if last > first:
            yield self._evaluation(last, self._settings.evaluation_tasks, greedy=True)

    def _evaluation(self, version: int, tasks: int, greedy: bool = False) -> _Evaluation:
        sampled = self._evaluation_session(version, "sampled", self._settings.sampling)
        still = msgspec.structs.replace(self._settings.sampling, temperature=0.0)
        sessions = (sampled, self._evaluation_session(version, "greedy", still)) if greedy else (sampled,)
        return _Evaluation(version, sessions, tasks)

    @staticmethod
    def _evaluation_session(version: int, kind: Literal["sampled", "greedy"], sampling: Sampling) -> _Session:
        return _Session(evaluation_session(version, kind), "eval", "heldout", 1, sampling, required_version=version)

    def _demonstrate(self, now: int, events: list[Event]) -> None:
        session = _Session("demonstrations", "demonstrate", "train", 1, self._settings.sampling, agent="demonstrator")
        self._submit_up_to(session, self._run.job.demonstrations, now, events)

    def _evaluate(self, evaluation: _Evaluation, now: int, events: list[Event]) -> None:
        """Hold, submit, and release when all have ended."""
        version = evaluation.version
        if self._evaluated(evaluation):
            if version not in self._released and evaluation.tasks > 0:
                self._released.add(version)
                events.append(self._control("release", version, now))
            return
        if version not in self._held:
            self._held.add(version)
            events.append(self._control("hold", version, now))
        for session in evaluation.sessions:
            self._submit_up_to(session, evaluation.tasks, now, events)

    def _evaluated(self, evaluation: _Evaluation) -> bool:
        return all(
            self._ended_by_session[session.name] >= self._available(session, evaluation.tasks)
            for session in evaluation.sessions
        )

    def _available(self, session: _Session, tasks: int) -> int:
        """How many tasks the session will have: a file may hold fewer held-out tasks than are wanted."""
        stream_is_over = self._streams.get(session.name, "") is _OVER
        return min(tasks, self._submitted_by_session[session.name]) if stream_is_over else tasks

    def _train(self, now: int, events: list[Event]) -> None:
        if self.version >= self.version_last:
            return
        job = self._run.job
        session = _Session("train", "train", "train", job.group_size, self._settings.sampling)
        backlog = max(self._settings.train_backlog, (job.staleness_target + 2) * job.groups_per_batch)
        wanted = (self._ended_by_session["train"] + backlog) * self._settings.tasks_per_lesson
        self._submit_up_to(session, wanted, now, events)

    def _submit_up_to(self, session: _Session, tasks: int, now: int, events: list[Event]) -> None:
        """Submits until the session has so many tasks, a bounded number at a time; what the log has is passed over."""
        if session.name not in self._streams:
            self._streams[session.name] = self._stream(session)
        stream = self._streams[session.name]
        while self._submitted_by_session[session.name] < tasks and len(events) < _EVENTS_PER_DECISION_MAX:
            numbered = next(stream, None)
            if numbered is None:
                self._streams[session.name] = _OVER
                return
            self._submitted_by_session[session.name] += 1
            number, task = numbered
            event = self._task_submitted(session, number, task, now)
            if event.meta.task_id not in self._submitted:
                self._submitted.add(event.meta.task_id or "")
                events.append(event)

    def _stream(self, session: _Session) -> Iterator[tuple[int, Task]]:
        """All evaluations see the same held-out tasks; demonstrations and training see different ones."""
        purpose = "heldout" if session.split == "heldout" else session.name
        digest = hashlib.sha256(f"{self._run.seed}/{purpose}".encode()).digest()
        return zip(count(), self._tasks(session.split, int.from_bytes(digest[:4])), strict=False)

    def _task_submitted(self, session: _Session, number: int, task: Task, now: int) -> TaskSubmitted:
        task_id = derived_id("task", self._run.run_id, session.name, number)
        agent = task.agent if self._cast.plays(task.agent) else session.agent or task.agent
        changes: dict[str, Any] = {"group_size": session.group_size, "agent": agent}
        return TaskSubmitted(
            meta=Meta(
                id=derived_id("TaskSubmitted", task_id),
                run_id=self._run.run_id,
                session_id=session.name,
                task_id=task_id,
                category="task",
                topic="tasks",
                sender=_SENDER,
                receiver="scheduler",
                timestamp=now,
                idempotency_key=task_id,
                purpose=session.purpose,
            ),
            task=msgspec.structs.replace(task, **changes),
            sampling=session.sampling,
            required_version=session.required_version,
        )

    def _control(self, command: Literal["hold", "release"], version: int, now: int) -> ControlIssued:
        return ControlIssued(
            meta=Meta(
                id=derived_id("ControlIssued", self._run.run_id, command, version),
                run_id=self._run.run_id,
                session_id=evaluation_session(version, "sampled"),
                category="control",
                topic="control",
                sender=_SENDER,
                receiver="reloader",
                timestamp=now,
            ),
            command=command,
            version=version,
            requested_by=_SENDER,
            reason=f"evaluation of version {version} {'begins' if command == 'hold' else 'has ended'}",
        )


_OVER: Iterator[tuple[int, Task]] = iter(())
"Stands for a stream of tasks that has no more."


class _TaskLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task as people write it: fields of Task, most of them optional. The world is JSON, quoted or not."""

    prompt: str
    reference: str | None = None
    agent: str = "agent"
    toolset: list[str] = []
    world: msgspec.Raw = msgspec.Raw(b'{"name":"empty"}')
    scorers: list[str] = msgspec.field(default_factory=lambda: ["exact_match"])
    group_size: GroupSize = 1
    split: Literal["train", "heldout"] = "train"
    tags: dict[str, str] = {}


def tasks_of(run: Run, settings: FeederSettings, job: Job) -> Tasks:
    """Where tasks come from: the job, or a file of one's own. Raises BadInput."""
    taught = any(agent.teacher for agent in cast_of(job, run.job.agents).agents.values())
    if run.job.demonstrations > 0 and job.demonstrate is None and not taught:
        raise BadInput(
            f"job {job.name} has no function demonstrate: give it one, give an agent a teacher, or set [job] demonstrations = 0"
        )
    if settings.tasks_file is None:
        return job.tasks
    found = read_tasks(Path(settings.tasks_file), job)
    by_split = {split: [task for task in found if task.split == split] for split in ("train", "heldout")}
    if not by_split["train"]:
        raise BadInput(f"tasks file {settings.tasks_file} has no task of split train")

    def tasks(split: str, seed: int) -> Iterator[Task]:
        return cycle(by_split["train"]) if split == "train" else iter(by_split["heldout"])

    return tasks


def read_tasks(path: Path, job: Job) -> list[Task]:
    """The tasks of a JSONL file. Raises BadInput that names the file, the line and what is wrong with it."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"tasks file {path} cannot be read: {error.strerror}") from error
    tasks: list[Task] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                tasks.append(_task_of(line, job))
            except (ValueError, msgspec.MsgspecError) as error:
                raise BadInput(f"tasks file {path}, line {number}: {error}") from error
    return tasks


def _task_of(line: bytes, job: Job) -> Task:
    """Raises ValueError or a msgspec error that says what is wrong."""
    read = msgspec.json.decode(line, type=_TaskLine)
    world = bytes(read.world)
    text = msgspec.json.decode(world, type=str) if world.startswith(b'"') else world.decode()
    world_from_json(text)
    require_tools(read.toolset, job.tools)
    fields = {name: getattr(read, name) for name in read.__struct_fields__}
    return Task(**(fields | {"world": text}))
