"""scheduler: asks for rollouts, as many as staleness allows, and again when the infrastructure failed one.

Plan is pure: `apply` folds what happened, `decide` says what to ask for next. The shell reads the log from its beginning,
lets the plan catch up before its first decision, and writes what it decides; so a restart repeats nothing. Events of
different topics arrive in any order, and every fold here gives the same state for each of them.
"""

import hashlib
import heapq
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import singledispatchmethod

from producers.attempt import Attempt, close_unplayed
from producers.cancellation import Cancellations
from producers.config import SchedulerSettings
from producers.lessons import Lessons
from producers.planner import follow
from schemas.events import (
    BatchCut,
    ControlIssued,
    Event,
    GroupCompleted,
    Meta,
    Purpose,
    RolloutRequested,
    Sampling,
    Task,
    TaskSubmitted,
    TrajectoryAssembled,
    WeightsLoaded,
    WeightsPublished,
)
from schemas.ids import derived_id
from schemas.metrics import Pulse
from schemas.run import Run
from streams.log.connect import open_log
from streams.log.protocol import Log
from streams.rules.staleness import admitted, groups_allowed, oldest_version

TOPICS_READ = ("tasks", "rollouts", "trajectories", "groups", "batches", "weights", "serving", "control")
_SENDER = "scheduler"


def run(run: Run, settings: SchedulerSettings, pulse: Pulse, stop: threading.Event) -> None:
    """Schedules until told to stop. Raises LogUnavailable."""
    log = open_log(run)
    try:
        schedule(run, settings, pulse, stop, log)
    finally:
        log.close()


def schedule(run: Run, settings: SchedulerSettings, pulse: Pulse, stop: threading.Event, log: Log) -> None:
    """The program over any log."""
    plan = Plan(run, settings)
    follow(plan, run.run_id, log, TOPICS_READ, settings.poll_seconds, pulse, stop, lambda: _tell(plan, pulse))


def _tell(plan: "Plan", pulse: Pulse) -> None:
    pulse.gauge("running", plan.rollouts_running)
    pulse.gauge("waiting", plan.tasks_waiting)
    pulse.gauge("version", plan.version)
    pulse.detail = ("paused; " if plan.is_paused else "") + (
        f"groups: {plan.groups_accepted} accepted, {plan.groups_running} running, {plan.groups_budget} allowed"
        + (f", {plan.groups_stale} too old to be trained on" if plan.groups_stale else "")
    )


@dataclass(frozen=True, slots=True)
class _Ask:
    """What every member of a group is asked with. `meta` is that of the task, or of a request for a member of it."""

    meta: Meta = field(compare=False)
    task_id: str
    session_id: str | None
    purpose: Purpose
    priority: int
    task: Task
    sampling: Sampling
    required_version: int | None

    @property
    def group_id(self) -> str:
        return derived_id("group", self.task_id)

    @classmethod
    def of(cls, event: TaskSubmitted | RolloutRequested) -> "_Ask":
        meta = event.meta
        return cls(
            meta=meta,
            task_id=meta.task_id or "",
            session_id=meta.session_id,
            purpose=meta.purpose or "train",
            priority=meta.priority,
            task=event.task,
            sampling=event.sampling,
            required_version=event.required_version,
        )


@dataclass(slots=True)
class _Member:
    """One place of a group."""

    retry: int = -1
    "of the newest request; -1 = not asked for yet"
    failed: dict[str, int] = field(default_factory=dict)
    "ids of requests that ended by infra_error or not at all, and when"
    ended: bool = False
    closed: bool = False
    repair_due: bool = False


@dataclass(slots=True)
class _Group:
    """A group under way. Known from its requests, or from a trajectory that was read before them."""

    ask: _Ask | None = None
    members: dict[int, _Member] = field(default_factory=dict)
    members_ended: int = 0


class Plan:
    """What is asked for, what came of it, and what to ask for next. Pure: time is an argument."""

    def __init__(self, run: Run, settings: SchedulerSettings) -> None:
        self._run = run
        self._settings = settings
        self._known_tasks: set[str] = set()
        self._finished: set[str] = set()
        "tasks whose groups are over; all that is kept of them"
        self._pending: dict[tuple[Purpose, int | None], deque[_Ask]] = {}
        "tasks not asked for yet, by purpose and required version; those of training are in _lessons"
        self._lessons: Lessons[_Ask] = Lessons(settings, run.seed)
        self._groups: dict[str, _Group] = {}
        "by task id"
        self._members_open: Counter[str] = Counter()
        "by purpose"
        self._unsettled: set[str] = set()
        "tasks whose groups want a look: a member is missing or has failed"
        self._repairs: list[tuple[int, str, int]] = []
        self._overdue: list[tuple[int, str, int, int]] = []
        self._train_running: set[str] = set()
        "group ids"
        self._completed: set[str] = set()
        self._accepted: set[str] = set()
        "groups that teach, but for stale ones"
        self._stale: set[str] = set()
        self._cut: set[str] = set()
        "groups that are in batches"
        self._uncut: list[tuple[int, str]] = []
        "a heap of groups that were accepted before a batch was known to hold them, by the oldest version behind each"
        self._batches_cut = 0
        self._seconds_sampled: set[int] = set()
        "in which a rollout that a server sampled came to an end that counts"
        self._serving: dict[str, int] = {}
        self._version_served_max = -1
        self.version = -1
        "newest published version"
        self.is_paused = False
        self._cancellations = Cancellations()
        self._is_calling_off = False
        "true while something may have been called off that is not closed yet"

    # what happened

    @singledispatchmethod
    def apply(self, event: Event) -> None:
        """Takes note of a fact of the run; the same fact twice changes nothing. Scheduling depends on no other."""

    @apply.register
    def _(self, event: TaskSubmitted) -> None:
        ask = _Ask.of(event)
        if ask.task_id in self._known_tasks or ask.task_id in self._finished:
            return
        self._known_tasks.add(ask.task_id)
        if ask.purpose == "train" and ask.required_version is None:
            self._lessons.add(ask, ask.task)
        else:
            self._pending.setdefault((ask.purpose, ask.required_version), deque()).append(ask)
        self._note_called_off(ask)

    @apply.register
    def _(self, event: RolloutRequested) -> None:
        ask = _Ask.of(event)
        if ask.purpose == "train":
            self._lessons.asked(ask.group_id, ask.task, ask.group_id in self._completed)
        if ask.purpose == "train" and ask.group_id not in self._completed:
            self._train_running.add(ask.group_id)  # also when all members have ended: it may yet be judged live
        group = self._group(ask.task_id)
        if group is None:
            return
        if group.ask is None:
            self._take_up(group, ask)
        self._note_called_off(ask)
        member = group.members.setdefault(event.index, _Member())
        if event.retry > member.retry:
            member.retry = event.retry
            due = event.deadline + int(self._settings.overdue_seconds * 1e6)
            heapq.heappush(self._overdue, (due, ask.task_id, event.index, event.retry))
        self._unsettled.add(ask.task_id)

    @apply.register
    def _(self, event: TrajectoryAssembled) -> None:
        task_id = event.meta.task_id or ""
        if event.policy_version_oldest is not None and event.ended_by != "infra_error":
            self._seconds_sampled.add(event.meta.timestamp // 1_000_000)
        group = None if event.meta.purpose == "replay" else self._group(task_id)
        if group is None:
            return
        member = group.members.setdefault(event.index, _Member())
        if event.ended_by == "infra_error":
            member.failed.setdefault(event.meta.correlation_id or "", event.meta.timestamp)
            self._unsettled.add(task_id)
        elif not member.ended:
            member.ended = True
            group.members_ended += 1
            if group.ask is not None:
                self._members_open[group.ask.purpose] -= 1
            self._finish_if_over(task_id, group, event.task.group_size)

    @apply.register
    def _(self, event: GroupCompleted) -> None:
        group_id = event.meta.group_id or ""
        if event.meta.purpose != "train" or group_id in self._completed:
            return
        self._completed.add(group_id)
        self._train_running.discard(group_id)
        self._lessons.completed(group_id, event)
        if event.dropped_because is None and group_id not in self._stale:
            self._accept(group_id, oldest_version(event))

    @apply.register
    def _(self, event: BatchCut) -> None:
        self._cut.update(event.groups)
        self._batches_cut = max(self._batches_cut, event.index + 1)
        self._stale.update(event.groups_stale)
        self._accepted.difference_update(event.groups_stale)
        self._note_stale()

    def _accept(self, group_id: str, oldest: int | None) -> None:
        if oldest is None:
            self._stale.add(group_id)  # no batch ever takes it
            return
        self._accepted.add(group_id)
        if group_id not in self._cut:
            heapq.heappush(self._uncut, (oldest, group_id))
            self._note_stale()

    def _note_stale(self) -> None:
        """Gives up groups that no batch to come can take. The cutter tells of them too, but with its next batch, and that
        it may not be able to cut without the groups that are asked for instead. A batch that is cut already and not
        read yet holds none of them, since it is of later weights still."""
        training_version = self._run.job.first_version + self._batches_cut
        while self._uncut and not admitted(training_version, self._uncut[0][0], self._run.job.staleness_max):
            _, group_id = heapq.heappop(self._uncut)
            if group_id not in self._cut:
                self._stale.add(group_id)
                self._accepted.discard(group_id)

    @apply.register
    def _(self, event: WeightsPublished) -> None:
        self.version = max(self.version, event.version)
        self._lessons.published(self.version)

    @apply.register
    def _(self, event: WeightsLoaded) -> None:
        if event.refusal is not None:
            self._serving.pop(event.server, None)  # what it serves now is not known to be verified
            return
        self._serving[event.server] = event.version
        self._version_served_max = max(self._version_served_max, event.version)

    @apply.register
    def _(self, event: ControlIssued) -> None:
        if event.command in ("pause", "drain", "resume"):
            self.is_paused = event.command != "resume"
        if self._cancellations.note(event):
            self._is_calling_off = True

    def _note_called_off(self, ask: _Ask) -> None:
        """Whether the cancellation or the task is read first must not matter."""
        if self._cancellations and self._cancellations.covers(ask.meta):
            self._is_calling_off = True

    def _take_up(self, group: _Group, ask: _Ask) -> None:
        group.ask = ask
        self._members_open[ask.purpose] += ask.task.group_size - group.members_ended

    def _group(self, task_id: str) -> _Group | None:
        """The group of a task, new if it must be; None when it is over."""
        return None if task_id in self._finished else self._groups.setdefault(task_id, _Group())

    def _finish_if_over(self, task_id: str, group: _Group, group_size: int) -> None:
        if group.members_ended < group_size:
            return
        self._finished.add(task_id)
        self._known_tasks.discard(task_id)
        self._unsettled.discard(task_id)
        del self._groups[task_id]

    # what follows

    def decide(self, now: int) -> list[Event]:
        """What to write next; it counts as done at once. `now` is in microseconds. While paused nothing is asked for,
        and what runs goes on to its end; what is called off is closed all the same."""
        events: list[Event] = []
        self._call_off(now, events)
        if self.is_paused:
            return events
        self._note_overdue(now)
        self._settle(now, events)
        self._repair(now, events)
        self._demonstrate(now, events)
        self._evaluate(now, events)
        self._train(now, events)
        return events

    @property
    def groups_accepted(self) -> int:
        return len(self._accepted)

    @property
    def groups_stale(self) -> int:
        """Groups that taught something and were too old when they ended, or that no batch may take for another reason."""
        return len(self._stale)

    @property
    def groups_running(self) -> int:
        return len(self._train_running)

    @property
    def groups_budget(self) -> int:
        """Upper bound of accepted and running groups."""
        job = self._run.job
        versions_trained = max(0, self.version - self._run.job.first_version)
        return groups_allowed(versions_trained, job.staleness_target, job.groups_per_batch)

    @property
    def rollouts_running(self) -> int:
        return sum(self._members_open.values())

    @property
    def tasks_waiting(self) -> int:
        return len(self._lessons) + sum(len(asks) for asks in self._pending.values())

    def _call_off(self, now: int, events: list[Event]) -> None:
        """Closes every member that is called off and has not ended: absence is a fact, so that whoever counts can end."""
        if not self._is_calling_off:
            return
        self._is_calling_off = False
        for asks in self._pending.values():
            for ask in [ask for ask in asks if self._cancellations.covers(ask.meta)]:
                asks.remove(ask)
                self._close_unasked(ask)
        lessons = [ask for ask in self._lessons.waiting() if self._cancellations.covers(ask.meta)]
        self._lessons.remove(lessons)
        for ask in lessons:
            self._close_unasked(ask)
        for group in self._groups.values():
            if group.ask is not None and self._cancellations.covers(group.ask.meta):
                for index in range(group.ask.task.group_size):
                    self._close(group.ask, index, group.members.setdefault(index, _Member()), "called off", now, events)

    def _close_unasked(self, ask: _Ask) -> None:
        """A task that was never asked for becomes a group, to be closed like any other."""
        group = self._group(ask.task_id)
        if group is not None and group.ask is None:
            self._take_up(group, ask)

    def _close(self, ask: _Ask, index: int, member: _Member, reason: str, now: int, events: list[Event]) -> None:
        """Ends a member as cancelled, unless it has ended. The attempt is the same each time it is closed."""
        if member.ended or member.closed:
            return
        member.closed = True
        request = self._requested(ask, index, max(0, member.retry), now)
        attempt = Attempt(request, events.append, derived_id("cancelled", request.meta.id))
        close_unplayed(attempt, _SENDER, "cancelled", reason)

    def _note_overdue(self, now: int) -> None:
        """A request whose end was never seen has failed: its worker died and nobody took it over."""
        while self._overdue and self._overdue[0][0] <= now:
            _, task_id, index, retry = heapq.heappop(self._overdue)
            group = self._groups.get(task_id)
            member = group.members[index] if group is not None else None
            if member is not None and member.retry == retry and not member.ended:
                member.failed.setdefault(_request_id(task_id, index, retry), now)
                self._unsettled.add(task_id)

    def _settle(self, now: int, events: list[Event]) -> None:
        """Asks for members that a crash left out, and sets a time for those that failed."""
        unsettled, self._unsettled = self._unsettled, set()
        for task_id in unsettled:
            group = self._groups[task_id]
            if group.ask is None:
                continue  # only trajectories of it were read yet; its requests will bring it here again
            for index in range(group.ask.task.group_size):
                member = group.members.setdefault(index, _Member())
                if member.retry < 0 and not member.ended and not member.closed:
                    self._request(group.ask, index, 0, now, events)
                elif self._has_failed(task_id, index, member) and not member.repair_due:
                    member.repair_due = True
                    wait_seconds = self._settings.retry_seconds * 2 ** min(member.retry, self._settings.retries_max)
                    heapq.heappush(self._repairs, (now + int(wait_seconds * 1e6), task_id, index))

    def _repair(self, now: int, events: list[Event]) -> None:
        """Asks again for members whose time has come, or gives them up."""
        while self._repairs and self._repairs[0][0] <= now:
            _, task_id, index = heapq.heappop(self._repairs)
            group = self._groups.get(task_id)
            if group is None or group.ask is None:
                continue
            member = group.members[index]
            if not self._has_failed(task_id, index, member):
                member.repair_due = False
            elif not self._can_be_served(group.ask):
                heapq.heappush(self._repairs, (now + 1_000_000, task_id, index))
            else:
                member.repair_due = False
                self._ask_again(group.ask, index, member, now, events)

    def _has_failed(self, task_id: str, index: int, member: _Member) -> bool:
        return not member.ended and not member.closed and _request_id(task_id, index, member.retry) in member.failed

    def _ask_again(self, ask: _Ask, index: int, member: _Member, now: int, events: list[Event]) -> None:
        if not self._is_hopeless(ask, member):
            self._request(ask, index, member.retry + 1, now, events)
            return
        reason = f"given up after {member.retry + 1} requests that all failed"
        self._close(ask, index, member, reason, now, events)

    def _is_hopeless(self, ask: _Ask, member: _Member) -> bool:
        """Enough requests failed, and others succeeded between its last two failures: the fault is its own. While nobody
        succeeds the servers are away; giving members up would count that against the agent, as cancelled is no success."""
        if member.retry < self._settings.retries_max:
            return False
        failed_seconds = sorted(failed_at // 1_000_000 for failed_at in member.failed.values())
        first, before, last = failed_seconds[0], failed_seconds[-2:][0], failed_seconds[-1]
        is_outage = self._seconds_sampled.isdisjoint(range(before + 1, last))
        return not is_outage or last - first > self._settings.outage_seconds_max or ask.purpose == "demonstrate"

    def _can_be_served(self, ask: _Ask) -> bool:
        if ask.purpose == "demonstrate":
            return True
        if ask.required_version is not None:
            return ask.required_version in self._serving.values()
        return self._version_served_max >= self._run.job.first_version

    def _demonstrate(self, now: int, events: list[Event]) -> None:
        room = self._settings.demonstrations_in_flight - self._members_open["demonstrate"]
        self._open_while(("demonstrate", None), room, now, events)

    def _evaluate(self, now: int, events: list[Event]) -> None:
        """An evaluation is asked for only while a server serves just what it judges."""
        for place, asks in list(self._pending.items()):
            if place[0] == "eval" and asks and self._can_be_served(asks[0]):
                room = self._settings.evaluations_in_flight - self._members_open["eval"]
                self._open_while(place, room, now, events)

    def _train(self, now: int, events: list[Event]) -> None:
        """Pace instead of discarding (GRPO.md): groups that teach nothing or became stale are replaced by new ones."""
        job = self._run.job
        accepted = self.groups_accepted
        while (
            self._lessons
            and accepted < job.steps * job.groups_per_batch
            and accepted + len(self._train_running) < self.groups_budget
            and self._version_served_max >= job.first_version
        ):
            groups_asked = len(self._train_running) + len(self._completed)
            self._open(self._lessons.take(self.version, groups_asked), now, events)

    def _open_while(self, place: tuple[Purpose, int | None], room: int, now: int, events: list[Event]) -> None:
        asks = self._pending.get(place)
        while asks and room > 0:
            room -= self._open(asks.popleft(), now, events)

    def _open(self, ask: _Ask, now: int, events: list[Event]) -> int:
        """Asks for all members of a group, side by side; returns how many, 0 when that was done before."""
        if ask.task_id in self._finished or ask.task_id in self._groups:
            return 0
        for index in range(ask.task.group_size):
            self._request(ask, index, 0, now, events)
        return ask.task.group_size

    def _request(self, ask: _Ask, index: int, retry: int, now: int, events: list[Event]) -> None:
        request = self._requested(ask, index, retry, now)
        self.apply(request)
        self._unsettled.discard(ask.task_id)
        events.append(request)

    def _requested(self, ask: _Ask, index: int, retry: int, now: int) -> RolloutRequested:
        return RolloutRequested(
            meta=Meta(
                id=_request_id(ask.task_id, index, retry),
                run_id=self._run.run_id,
                session_id=ask.session_id,
                task_id=ask.task_id,
                group_id=ask.group_id,
                trajectory_id=derived_id("trajectory", ask.task_id, index),
                category="request",
                topic="rollouts",
                sender=_SENDER,
                receiver="rollouts",
                priority=ask.priority,
                timestamp=now,
                correlation_id=ask.task_id,
                purpose=ask.purpose,
            ),
            task=ask.task,
            index=index,
            seed=_seed(self._run.seed, ask.task, index),
            sampling=ask.sampling,
            deadline=now + int(self._settings.deadline_seconds * 1e6),
            required_version=ask.required_version,
            retry=retry,
        )


def _request_id(task_id: str, index: int, retry: int) -> str:
    return derived_id("RolloutRequested", task_id, index, retry)


def _seed(run_seed: int, task: Task, index: int) -> int:
    """The weather of a rollout: the same for the same task in every run and evaluation of one seed."""
    text = f"{run_seed}/{index}/{task.prompt}/{task.world}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
