"""feeder: submits tasks: demonstrations, then training, with held-out evaluations before, during and after it.

Feed is pure: `apply` folds events, `decide` returns what to submit next. Task ids are derived from run, session and
number, so it remembers only counts for each session (feeding/numbers, feeding/ends), and a restart continues where it
was. For each evaluation it issues a hold of the weight version, and a release when all tasks have ended. A second hold
changes nothing, so after a restart it is issued again.
"""

import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, singledispatchmethod
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog
from msgspec import Struct

from replayground.producers.config import FeederSettings
from replayground.producers.feeding.ends import EndlessEnds, FiniteEnds, PartitionEnds, counts
from replayground.producers.feeding.numbers import EVENTS_PER_DECISION_MAX, NumbersState, SubmittedNumbers
from replayground.producers.planner import fold_version, follow
from replayground.producers.task_lines import KnownNames, check_tasks, read_tasks, require_first
from replayground.producers.topology import AgentCatalog, agent_catalog_of
from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
    Address,
    AttemptEnded,
    ControlIssued,
    Event,
    Meta,
    Purpose,
    Sampling,
    Task,
    TaskSubmitted,
    WeightsPublished,
)
from replayground.schemas.ids import derived_id
from replayground.schemas.job import Job, Tasks, load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log

logger = structlog.get_logger()

TOPICS_READ = ("tasks", "attempts", "weights")
DEMONSTRATIONS = "demonstrations"
TRAINING = "train"
DEMONSTRATOR = "demonstrator"
"Task.agent of demonstrations, if the job defines no agents"
# The inverse of evaluation_session. Limited in length: a session name comes from the log, and int() of thousands of
# digits raises.
_EVALUATION_NAME = re.compile(r"eval-v([0-9]{4}|[1-9][0-9]{4,17})-(?:sampled|greedy)")
_FOLD = "feeder-1"
"change it whenever the same events would give another state"
_SENDER = "feeder"


def run(run: Run, settings: FeederSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Submits until `stop` is set. Blocks. Raises LogUnavailable, and BadInput for a tasks file or job that cannot be
    used."""
    log = open_log(run)
    try:
        feed(run, settings, program_metrics, stop, log)
    finally:
        log.close()


def feed(run: Run, settings: FeederSettings, program_metrics: ProgramMetrics, stop: threading.Event, log: Log) -> None:
    """The program over any log."""
    job = load_job(run.job.module)
    feed = Feed(run, settings, tasks_of(run, settings, job), agent_catalog_of(job, run.job.agents))
    follow(
        feed,
        run,
        log,
        TOPICS_READ,
        settings.poll_seconds,
        program_metrics,
        stop,
        lambda: _report_metrics(feed, program_metrics),
    )


def _report_metrics(feed: "Feed", program_metrics: ProgramMetrics) -> None:
    program_metrics.detail = feed.phase
    program_metrics.gauge("step", max(0, feed.version - feed.version_first))
    while feed.skipped:
        remedy = "set a larger [job] versions_kept, or 0"
        logger.warning("evaluation_skipped", version=feed.skipped.pop(0), reason="it is not on the log", remedy=remedy)


def evaluation_session(version: int, kind: Literal["sampled", "greedy"]) -> str:
    """Name of the session of an evaluation."""
    return f"eval-v{version:04d}-{kind}"


@dataclass(frozen=True, slots=True)
class _Session:
    """A named set of tasks, and how they are submitted."""

    name: str
    purpose: Purpose
    split: str
    group_size: int
    sampling: Sampling
    required_version: int | None = None
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The evaluation of one weight version."""

    version: int
    sessions: tuple[_Session, ...]
    tasks: int


class _FeedState(Struct, frozen=True):
    """Everything that the feed remembers of the log."""

    version: int
    numbers: dict[str, NumbersState]
    "by session, for sessions that are not over"
    ends: dict[str, list[bytes]]
    "by session with an end, for those that are not over"
    train_ends: dict[int, PartitionEnds]
    demonstrations_are_over: bool
    evaluations_over: int
    "number of evaluations that are over, without a gap from the first on"
    evaluations_over_early: list[int]
    "numbers of evaluations that are over although an earlier one is not"


class Feed:
    """What was submitted, what came of it, and what to submit next. Pure: time is an argument."""

    def __init__(
        self, run: Run, settings: FeederSettings, tasks: Tasks, agent_catalog: AgentCatalog | None = None
    ) -> None:
        self._run = run
        self._settings = settings
        self._tasks = tasks
        self._agent_catalog = agent_catalog or AgentCatalog()
        self.version_first = run.job.first_version
        self.version_last = run.job.last_version
        "None = the run has no end (steps = 0)"
        self.version = -1
        "newest published version"
        self.phase = "waits for the first weights"
        self._numbers: dict[str, SubmittedNumbers] = {}
        self._ends: dict[str, FiniteEnds] = {}
        self._train_ends = EndlessEnds()
        self._demonstrations_are_over = False
        self._evaluations_over = 0
        self._evaluations_over_early: set[int] = set()
        self._is_caught_up = False
        # Not in the state, and found anew after a restart: drawn tasks, and holds that were issued.
        self._streams: dict[str, _TaskStream] = {}
        self._held: set[int] = set()
        self.skipped: list[int] = []
        "versions whose evaluation was skipped since the last look: the caller reports them"

    # what happened

    @singledispatchmethod
    def apply(self, event: Event, address: Address | None = None) -> None:
        """Folds an event of the run; the same event twice changes nothing. Events of other classes are ignored."""

    @apply.register
    def _(self, event: TaskSubmitted, address: Address | None = None) -> None:
        name = event.meta.session_id or ""
        if self._is_open(name):
            self._numbers_of(name).note(event.meta.task_id or "")

    @apply.register
    def _(self, event: AttemptEnded, address: Address | None = None) -> None:
        name = event.meta.session_id or ""
        if not counts(event) or not self._is_open(name):
            return
        if name == TRAINING:
            self._train_ends.note(event, address.partition if address is not None else 0)
        else:
            self._ends.setdefault(name, FiniteEnds()).note(event)

    @apply.register
    def _(self, event: WeightsPublished, address: Address | None = None) -> None:
        self.version = max(self.version, event.version)

    def _is_open(self, name: str) -> bool:
        """Whether a session is the feeder's own and not over. Others, such as that of submitted tasks, are ignored."""
        if name == TRAINING:
            return True
        if name == DEMONSTRATIONS:
            return not self._demonstrations_are_over
        found = _EVALUATION_NAME.fullmatch(name)
        number = None if found is None else self._number_of_evaluation(int(found[1]))
        return number is not None and not self._is_over(number)

    # what follows

    def decide(self, now: int) -> list[Event]:
        """What to write next; it counts as written at once. `now` is in microseconds. Call it when everything that was
        on the log has been applied. Raises BadInput for a task that cannot be used."""
        self._settle()
        events: list[Event] = []
        self._demonstrate(now, events)
        for number in self._evaluations_due():
            self._evaluate(number, now, events)
        self._note_evaluations_over()
        # Training waits for the first evaluation: it judges the policy before any training.
        if self._evaluations_over > 0:
            self._train(now, events)
        self.phase = self._phase()
        return events

    def _settle(self) -> None:
        # decide is called only when everything has been read: ids without a number are copies now.
        if not self._is_caught_up:
            self._is_caught_up = True
            for numbers in self._numbers.values():
                numbers.settle()

    def _phase(self) -> str:
        if self.version < self.version_first:
            wanted = self._run.job.demonstrations
            ended = wanted if self._demonstrations_are_over else len(self._ends.get(DEMONSTRATIONS, ()))
            return f"cold start: {ended} of {wanted} demonstrations"
        for number in self._evaluations_due():
            return f"evaluates version {self._evaluation(number).version}"
        if self.version_last is None:
            return f"trains: version {self.version}, until stopped"
        return "done" if self.version >= self.version_last else f"trains: version {self.version} of {self.version_last}"

    # evaluations: at the start, after every so many steps, and at the end if there is one

    def _evaluations_due(self) -> Iterator[int]:
        """Numbers of the evaluations that are not over and whose weight version exists."""
        for number in count(self._evaluations_over):
            version = self._version_of_evaluation(number)
            if version is None or version > self.version:
                return
            if number not in self._evaluations_over_early:
                yield number

    def _version_of_evaluation(self, number: int) -> int | None:
        """The version that evaluation 0, 1, 2 … judges; None when there is no such evaluation."""
        # 0 judges the start, the next ones every so many steps before the end, and one the end itself.
        first, last, every = self.version_first, self.version_last, self._settings.evaluation_every
        version = first + number * every
        if number == 0 or (every > 0 and (last is None or version < last)):
            return version
        between = 0 if last is None or every <= 0 else max(0, (last - first - 1) // every)
        return last if last is not None and last > first and number == between + 1 else None

    def _number_of_evaluation(self, version: int) -> int | None:
        """The inverse of _version_of_evaluation."""
        every = self._settings.evaluation_every
        number = (version - self.version_first) // every if every > 0 else 0
        # The last evaluation need not be a whole interval after the one before: then it has the next number.
        for near in (number, number + 1):
            if near >= 0 and self._version_of_evaluation(near) == version:
                return near
        return None

    def _is_over(self, number: int) -> bool:
        return number < self._evaluations_over or number in self._evaluations_over_early

    def _note_evaluations_over(self) -> None:
        # A later one may be over first. Only the gap-free beginning becomes a count, so the state stays small.
        while self._evaluations_over in self._evaluations_over_early:
            self._evaluations_over_early.discard(self._evaluations_over)
            self._evaluations_over += 1

    def _evaluation(self, number: int) -> _Evaluation:
        version = self._version_of_evaluation(number)
        assert version is not None
        is_first, is_last = version == self.version_first, version == self.version_last
        settings = self._settings
        tasks = settings.evaluation_tasks if is_first or is_last else settings.evaluation_tasks_between
        sessions = [self._evaluation_session(version, "sampled", settings.sampling)]
        # The final policy is also judged without sampling noise.
        if is_last or self.version_first == self.version_last:
            still = msgspec.structs.replace(settings.sampling, temperature=0.0)
            sessions.append(self._evaluation_session(version, "greedy", still))
        return _Evaluation(version, tuple(sessions), tasks)

    @staticmethod
    def _evaluation_session(version: int, kind: Literal["sampled", "greedy"], sampling: Sampling) -> _Session:
        return _Session(evaluation_session(version, kind), "eval", "heldout", 1, sampling, required_version=version)

    def _evaluate(self, number: int, now: int, events: list[Event]) -> None:
        """Holds the version, submits the tasks, and releases the version when all of them have ended."""
        evaluation = self._evaluation(number)
        if all(self._has_ended(session, evaluation.tasks) for session in evaluation.sessions):
            self._evaluations_over_early.add(number)
            for session in evaluation.sessions:
                self._forget(session.name)
            # Also if this life issued no hold: one of an earlier life may be open.
            if evaluation.tasks > 0:
                events.append(self._control("release", evaluation.version, now))
            return
        # The hold comes before the tasks, so that no server moves on while they are played (decision 0007).
        if self._came_too_late(evaluation):
            self._skip(number, evaluation, now, events)
            return
        if evaluation.version not in self._held:
            self._held.add(evaluation.version)
            events.append(self._control("hold", evaluation.version, now))
        for session in evaluation.sessions:
            self._submit_up_to(session, evaluation.tasks, now, events)

    def _came_too_late(self, evaluation: _Evaluation) -> bool:
        """Whether its version is gone: the feeder was away while newer versions took its place on the log."""
        kept = self._run.job.versions_kept
        has_begun = any(self._numbers_of(session.name).next > 0 for session in evaluation.sessions)
        return kept > 0 and evaluation.version <= self.version - kept and not has_begun

    def _skip(self, number: int, evaluation: _Evaluation, now: int, events: list[Event]) -> None:
        self._evaluations_over_early.add(number)
        # A hold of an earlier life may be on the log without any task, and would keep a server at a version that is gone.
        reason = f"evaluation of version {evaluation.version} is skipped: the version is no longer on the log"
        events.append(msgspec.structs.replace(self._control("release", evaluation.version, now), reason=reason))
        for session in evaluation.sessions:
            self._forget(session.name)
        self.skipped.append(evaluation.version)

    # demonstrations and training

    def _demonstrate(self, now: int, events: list[Event]) -> None:
        if self._demonstrations_are_over:
            return
        session = _Session(DEMONSTRATIONS, "demonstrate", "train", 1, self._settings.sampling, agent=DEMONSTRATOR)
        self._submit_up_to(session, self._run.job.demonstrations, now, events)
        if self._has_ended(session, self._run.job.demonstrations):
            self._demonstrations_are_over = True
            self._forget(session.name)

    def _train(self, now: int, events: list[Event]) -> None:
        if self.version_last is not None and self.version >= self.version_last:
            return
        job = self._run.job
        session = _Session(TRAINING, "train", "train", job.group_size, self._settings.sampling)
        # At least what the scheduler's budget can have open at once, or it would run out of tasks.
        backlog = max(self._settings.train_backlog, (job.staleness_target + 2) * job.groups_per_batch)
        wanted = (len(self._train_ends) + backlog) * self._settings.tasks_per_lesson
        self._submit_up_to(session, wanted, now, events)

    def _has_ended(self, session: _Session, tasks: int) -> bool:
        """Whether all tasks of the session are over. They may be fewer than `tasks`: a file may hold fewer."""
        ended, submitted = len(self._ends.get(session.name, ())), self._numbers_of(session.name).next
        if ended < submitted or ended >= tasks:
            return ended >= tasks
        # All that were submitted have ended. A restarted feeder must find out here that there are no more tasks, and
        # not after it has issued another hold.
        return next(self._draw(session, submitted), None) is None

    def _forget(self, name: str) -> None:
        """Drops the counts of a session: that it is over is all that has to be known."""
        self._numbers.pop(name, None)
        self._ends.pop(name, None)
        self._streams.pop(name, None)

    def _numbers_of(self, name: str) -> SubmittedNumbers:
        # A session that begins after the feed has caught up has nothing unread on the log.
        if name not in self._numbers:
            self._numbers[name] = SubmittedNumbers(lambda number: self._task_id(name, number))
            if self._is_caught_up:
                self._numbers[name].settle()
        return self._numbers[name]

    def _submit_up_to(self, session: _Session, tasks: int, now: int, events: list[Event]) -> None:
        """Submits tasks until the session has `tasks` of them, or this decision is full. Skips those on the log."""
        numbers = self._numbers_of(session.name)
        # Bounded: a crash before the flush leaves at most so many tasks that may be written twice (RECENT_TASKS).
        while numbers.next < tasks and len(events) < EVENTS_PER_DECISION_MAX:
            if session.name not in self._streams:
                self._streams[session.name] = _TaskStream(self._draw(session, numbers.next), numbers.next)
            task = self._streams[session.name].task(numbers.next)
            if task is None:
                return
            # Different times within a decision, so that readers of several partitions can restore the order.
            events.append(self._task_submitted(session, numbers.next, task, now + len(events)))
            numbers.submit(numbers.next)

    def _draw(self, session: _Session, start: int) -> Iterator[Task]:
        """The tasks of a session from number `start` on. All evaluations get the same held-out tasks; demonstrations
        and training get different ones."""
        return self._tasks(session.split, seed_of(self._run.seed, session.split, session.name), start)

    def _task_id(self, session: str, number: int) -> str:
        return derived_id("task", self._run.run_id, session, number)

    # what is remembered

    @property
    def code_version(self) -> str:
        """Version of the fold, with the settings that its state depends on."""
        job, settings = self._run.job, self._settings
        return fold_version(
            _FOLD,
            *(self._run.run_id, job.steps, job.demonstrations),
            *(settings.evaluation_every, settings.evaluation_tasks, settings.evaluation_tasks_between),
        )

    def encode(self) -> bytes:
        """The state; the same bytes for the same facts. Call it after `decide`, when the decisions are on the log."""
        state = _FeedState(
            version=self.version,
            numbers={name: numbers.state() for name, numbers in sorted(self._numbers.items())},
            ends={name: ends.state() for name, ends in sorted(self._ends.items())},
            train_ends=self._train_ends.state(),
            demonstrations_are_over=self._demonstrations_are_over,
            evaluations_over=self._evaluations_over,
            evaluations_over_early=sorted(self._evaluations_over_early),
        )
        return msgspec.msgpack.encode(state)

    def restore(self, encoded: bytes) -> None:
        """Continues from a state. Nothing may have been applied before."""
        state = msgspec.msgpack.decode(encoded, type=_FeedState)
        self.version = state.version
        self._numbers = {
            name: SubmittedNumbers(partial(self._task_id, name), numbers) for name, numbers in state.numbers.items()
        }
        self._ends = {name: FiniteEnds(ended) for name, ended in state.ends.items()}
        self._train_ends = EndlessEnds(state.train_ends)
        self._demonstrations_are_over = state.demonstrations_are_over
        self._evaluations_over = state.evaluations_over
        self._evaluations_over_early = set(state.evaluations_over_early)

    def _task_submitted(self, session: _Session, number: int, task: Task, now: int) -> TaskSubmitted:
        task_id = self._task_id(session.name, number)
        # A job without agents plays demonstrations under a name of their own.
        agent = task.agent if self._agent_catalog.plays(task.agent) else session.agent or task.agent
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
                # Derived: a hold that is issued again after a restart is the same event.
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


@dataclass
class _TaskStream:
    """The tasks of a session, drawn in the order of their numbers."""

    tasks: Iterator[Task]
    next: int
    "number of the next task to draw"
    is_over: bool = False

    def task(self, number: int) -> Task | None:
        """The task with this number, which must not be drawn yet; None when there are no more."""
        drawn: Task | None = None
        # Numbers that are on the log already are drawn and dropped.
        while self.next <= number and not self.is_over:
            drawn = next(self.tasks, None)
            self.is_over = drawn is None
            self.next += 1
        return drawn


def seed_of(run_seed: int, split: str, session: str) -> int:
    """The seed for drawing the tasks of a session. The same for all held-out sessions of a run."""
    purpose = "heldout" if split == "heldout" else session
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{purpose}".encode()).digest()[:4])


def require_teacher(job: Job, agent_catalog: AgentCatalog, demonstrations: int) -> None:
    """Raises BadInput when the run wants demonstrations and the job has no teacher."""
    taught = any(agent.teacher for agent in agent_catalog.agents.values())
    if demonstrations > 0 and job.demonstrate is None and not taught:
        raise BadInput(
            f"job {job.name} has no function demonstrate: give it one, name a teacher, or set [job] demonstrations = 0"
        )


def tasks_of(run: Run, settings: FeederSettings, job: Job) -> Tasks:
    """The source of tasks: the job, or the tasks file of the settings. Raises BadInput."""
    agent_catalog = agent_catalog_of(job, run.job.agents)
    require_teacher(job, agent_catalog, run.job.demonstrations)
    if settings.tasks_file is None:
        tasks = check_tasks(job.tasks, KnownNames(job, agent_catalog), f"job {job.name}")
        require_first(tasks, f"job {job.name}")
        return tasks
    found = read_tasks(Path(settings.tasks_file), KnownNames(job, agent_catalog))
    by_split = {split: [task for task in found if task.split == split] for split in ("train", "heldout")}
    if not by_split["train"]:
        raise BadInput(f"tasks file {settings.tasks_file} has no task of split train")

    def of_file(split: str, seed: int, start: int = 0) -> Iterator[Task]:
        """Training repeats the file endlessly; held-out tasks are used once each."""
        chosen = by_split[split]
        if split == "heldout":
            return iter(chosen[start:])
        return (chosen[number % len(chosen)] for number in count(start))

    return of_file
