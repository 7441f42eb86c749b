"""scheduler: requests rollouts, as many as staleness allows, and retries those that failed by infra_error.

Plan is pure: `apply` folds events, `decide` returns what to request next. It is composed of folds that can be read one
at a time (producers/scheduling): ledger (what is known of every open task), demand (tasks that wait), members
(requests, ends and retries), pacing (standings and the budget), serving (weights), and cancellation. Events of
different topics arrive in any order, and every order gives the same state. It remembers open work and a fixed horizon;
the rest is only counted (docs/decisions/0018).
"""

import hashlib
import threading
from functools import singledispatchmethod

import msgspec
from msgspec import Struct

from replayground.producers.attempt import AttemptWriter, close_unplayed, without_world
from replayground.producers.cancellation import Cancellations, CancellationsState
from replayground.producers.config import SchedulerSettings
from replayground.producers.planner import fold_version, follow
from replayground.producers.scheduling.demand import Demand, DemandState
from replayground.producers.scheduling.ledger import (
    REFUSED,
    Group,
    GroupOutcome,
    GroupRequest,
    Ledger,
    LedgerState,
    Refusal,
    group_id_of,
)
from replayground.producers.scheduling.members import SECONDS_SAMPLED, MemberAction, Members, request_id, trajectory_id
from replayground.producers.scheduling.newest import Newest
from replayground.producers.scheduling.pacing import GIVEN_UP_KEPT, JUDGED, OVER, Pacing, PacingState, Standing
from replayground.producers.scheduling.serving import Serving, ServingState
from replayground.schemas.events import (
    Address,
    AttemptEnded,
    BatchCut,
    ControlIssued,
    Event,
    EventRejected,
    GroupCompleted,
    Meta,
    RolloutRequested,
    Task,
    TaskSubmitted,
    WeightsLoaded,
    WeightsPublished,
)
from replayground.schemas.ids import derived_id
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log

TOPICS_READ = ("tasks", "rollouts", "attempts", "groups", "batches", "weights", "serving", "control", "dead-letters")
_FOLD = "scheduler-4"
"change it whenever the same events would give another state"
_SENDER = "scheduler"
_GROUP_TOPICS = ("trajectories", "rewards", "groups")
"topics keyed by group: if one of their messages is rejected, its group cannot be completed"


def run(run: Run, settings: SchedulerSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Schedules until `stop` is set. Blocks. Raises LogUnavailable; LogBroken if its snapshot is ahead of the log."""
    log = open_log(run)
    try:
        schedule(run, settings, program_metrics, stop, log)
    finally:
        log.close()


def schedule(
    run: Run, settings: SchedulerSettings, program_metrics: ProgramMetrics, stop: threading.Event, log: Log
) -> None:
    """The program over any log."""
    plan = Plan(run, settings)
    follow(
        plan,
        run,
        log,
        TOPICS_READ,
        settings.poll_seconds,
        program_metrics,
        stop,
        lambda: _report_metrics(plan, program_metrics),
    )


def _report_metrics(plan: "Plan", program_metrics: ProgramMetrics) -> None:
    program_metrics.gauge("running", plan.rollouts_running)
    program_metrics.gauge("waiting", plan.tasks_waiting)
    program_metrics.gauge("version", plan.version)
    program_metrics.detail = ("paused; " if plan.is_paused else "") + (
        f"groups: {plan.groups_accepted} accepted, {plan.groups_running} running, {plan.groups_budget} allowed"
        + (f", {plan.groups_stale} too old to be trained on" if plan.groups_stale else "")
        + (f", {plan.groups_given_up} refused ({plan.refused_because})" if plan.groups_given_up else "")
    )


class _PlanState(Struct, frozen=True):
    """Everything that the plan remembers of the log."""

    ledger: LedgerState
    demand: DemandState
    pacing: PacingState
    serving: ServingState
    cancellations: CancellationsState
    seconds_sampled: list[int]
    is_paused: bool


class Plan:
    """What was requested, what came of it, and what to request next. Pure: time is an argument."""

    def __init__(self, run: Run, settings: SchedulerSettings) -> None:
        self._run = run
        self._settings = settings
        self._ledger = Ledger()
        self._demand = Demand(settings, run.seed)
        self._members = Members(self._ledger, settings)
        self._pacing = Pacing(run.job)
        self._serving = Serving()
        self._cancellations = Cancellations()
        self._is_calling_off = False
        "true if a cancelled member may not be closed yet"
        self._completed: set[str] = set()
        "groups that we completed, whose GroupCompleted has not come back from the log yet"
        self.is_paused = False

    # what happened

    @singledispatchmethod
    def apply(self, event: Event, address: Address | None = None) -> None:
        """Folds an event of the run; the same event twice changes nothing. Events of other classes are ignored. A
        decision of the plan itself has no address yet."""

    @apply.register
    def _(self, event: TaskSubmitted, address: Address | None = None) -> None:
        if event.meta.purpose == "replay":
            return
        ask = _ask_of(event, address, self._run.seed)
        if self._ledger.submit(event, ask, address.partition if address is not None else 0):
            self._demand.note_submitted(ask)
            # The cancellation may have been read before the task.
            self._note_cancelled(ask.task_id if ask.task_id in self._cancellations else None)
            self._place(ask.group_id)
            self._is_calling_off = self._is_calling_off or self._is_cancelled(ask)

    @apply.register
    def _(self, event: RolloutRequested, address: Address | None = None) -> None:
        group_id = event.meta.group_id or ""
        group = self._ledger.find(group_id)
        if group is not None:
            self._members.note_request(group_id, group, event)
            self._place(group_id)

    @apply.register
    def _(self, event: AttemptEnded, address: Address | None = None) -> None:
        # Before the look-up: also the end of a task that is over shows that servers work.
        self._members.note_sampled(event)
        group_id = event.meta.group_id or ""
        group = None if event.meta.purpose == "replay" else self._ledger.find(group_id)
        if group is not None:
            self._members.note_end(group_id, group, event)
            self._place(group_id)

    @apply.register
    def _(self, event: GroupCompleted, address: Address | None = None) -> None:
        group_id = event.meta.group_id or ""
        group = self._ledger.find(group_id) if event.meta.purpose == "train" else None
        # The first completion counts. All completions of a group are on one partition, so every reader agrees.
        if group is not None and group.judged is None:
            group.judged = GroupOutcome.of(event)
            self._place(group_id)

    @apply.register
    def _(self, event: BatchCut, address: Address | None = None) -> None:
        for group_id in event.groups:
            group = self._ledger.find(group_id)
            if group is not None:
                group.is_cut = True
                self._place(group_id)
        for group_id in event.groups_stale:
            group = self._ledger.find(group_id)
            if group is not None:
                group.is_stale = True
                self._place(group_id)
        self._pacing.note_batch(event)
        # The batch moved the training version on, so groups that still wait may be too old now. Those that it holds are
        # marked as cut by now.
        for group_id in self._pacing.with_standing("uncut"):
            self._place(group_id)

    @apply.register
    def _(self, event: WeightsPublished, address: Address | None = None) -> None:
        self._serving.note_published(event)
        self._demand.note_published(self._serving.version)

    @apply.register
    def _(self, event: WeightsLoaded, address: Address | None = None) -> None:
        self._serving.note_loaded(event)

    @apply.register
    def _(self, event: ControlIssued, address: Address | None = None) -> None:
        # Topic control has one partition: the last command read is the newest.
        if event.command in ("pause", "drain", "resume"):
            self.is_paused = event.command != "resume"
        if self._cancellations.note(event):
            self._is_calling_off = True
            self._note_cancelled(event.meta.task_id)

    @apply.register
    def _(self, event: EventRejected, address: Address | None = None) -> None:
        # A rejected message may be undecodable, so only its key is used.
        key = (event.original_key or b"").decode("utf-8", "replace")
        if event.origin.topic == "rollouts":
            self._members.note_refused(key, event)
        elif event.origin.topic in _GROUP_TOPICS:
            group = self._ledger.find(key)
            if group is not None and group.refusal is None:
                group.refusal = Refusal(event.meta.timestamp, f"{event.stage}: {event.reason}", event.meta.id)
                self._place(key)

    def _place(self, group_id: str) -> None:
        """Updates the standing of a group from its facts. Forgets one that is over."""
        group = self._ledger.find(group_id)
        assert group is not None
        ask = group.ask
        # Facts of it were read before its TaskSubmitted.
        if ask is None:
            return
        self._move(group_id, group, ask, self._standing_of(group, ask))

    def _standing_of(self, group: Group, ask: GroupRequest) -> Standing:
        return self._pacing.standing_of(group, self._is_cancelled(ask), self._ledger.is_caught_up)

    def _move(
        self, group_id: str, group: Group, ask: GroupRequest, standing: Standing, *, is_restored: bool = False
    ) -> None:
        # The standing before says which queue and which count the group leaves.
        before = self._pacing.place(group_id, group, standing)
        if before == "waiting" != standing:
            self._demand.remove(ask)
        if before != "waiting" == standing:
            self._demand.add(ask)
        # Once for each group, and not again after a restart: the restored pass rates contain it.
        if group.judged is not None and standing in JUDGED and before not in JUDGED and not is_restored:
            self._demand.observe(ask, group.judged)
        if standing in OVER:
            self._forget(group_id, group)
        else:
            is_open = standing in ("running", "closing")
            self._members.count(group_id, ask.purpose, ask.task.group_size - group.members_ended if is_open else 0)

    def _forget(self, group_id: str, group: Group) -> None:
        self._completed.discard(group_id)
        self._members.forget(group_id, group)
        self._ledger.forget(group_id)

    # what follows

    def decide(self, now: int) -> list[Event]:
        """What to write next; it counts as written at once. `now` is in microseconds. Call it when everything that was
        on the log has been applied. While paused nothing is requested, running rollouts continue, and cancelled ones
        are closed all the same."""
        events: list[Event] = []
        # First: the rest relies on facts without a task being gone.
        self._settle()
        self._complete_given_up(now, events)
        self._drop_overtaken()
        self._cancel(now, events)
        if not self.is_paused:
            # Retries before new work: a group that lacks one member is stuck until that has ended.
            for wanted in self._members.next(now, self._can_be_served):
                self._retry_members(wanted, now, events)
            self._demonstrate(now, events)
            self._evaluate(now, events)
            self._train(now, events)
        return events

    @property
    def version(self) -> int:
        """Newest published version."""
        return self._serving.version

    @property
    def groups_accepted(self) -> int:
        return self._pacing.accepted

    @property
    def groups_stale(self) -> int:
        return self._pacing.stale

    @property
    def groups_running(self) -> int:
        return self._pacing.running

    @property
    def groups_given_up(self) -> int:
        return self._pacing.given_up

    @property
    def refused_because(self) -> str:
        """Why the newest of the remembered given-up groups was given up."""
        refused = [self._refused(group_id) for group_id in self._pacing.with_standing("given_up")]
        newest = max(refused, key=lambda each: each[:2], default=None)
        return newest[2].refusal.reason if newest is not None and newest[2].refusal is not None else "long ago"

    @property
    def groups_budget(self) -> int:
        return self._pacing.budget(self.version)

    @property
    def rollouts_running(self) -> int:
        return self._members.running_of_all

    @property
    def tasks_waiting(self) -> int:
        return len(self._demand)

    def _note_cancelled(self, task_id: str | None) -> None:
        group = None if task_id is None else self._ledger.find(group_id_of(task_id))
        if group is not None:
            # On the group itself: Cancellations forgets the oldest of very many.
            group.is_called_off = True

    def _is_cancelled(self, ask: GroupRequest) -> bool:
        group = self._ledger.find(ask.group_id)
        if group is not None and group.is_called_off:
            return True
        # The time of submission and not of the request: what was submitted after the command runs.
        return bool(self._cancellations) and self._cancellations.covers_task(
            ask.task_id, ask.session_id, ask.submitted_at
        )

    def _cancel(self, now: int, events: list[Event]) -> None:
        """Closes every cancelled member that has not ended, so that whoever counts ends can finish."""
        # Only after news: this goes through all open groups.
        if not self._is_calling_off:
            return
        self._is_calling_off = False
        for group_id, group in self._ledger:
            if group.ask is not None and self._is_cancelled(group.ask):
                self._place(group_id)
                for index in range(group.ask.task.group_size):
                    self._close(group.ask, index, "called off", now, events)

    def _close(self, ask: GroupRequest, index: int, reason: str, now: int, events: list[Event]) -> None:
        """Writes the end of a member as cancelled, unless it has ended."""
        group = self._ledger.find(ask.group_id)
        if group is None or not self._members.close(ask.group_id, index):
            return
        request = self._request(ask, index, max(0, group.member(index).retry), now)
        # A derived attempt id: a restart that closes the member again writes the same attempt, which counts once.
        attempt = AttemptWriter(request, events.append, derived_id("cancelled", request.meta.id))
        close_unplayed(attempt, _SENDER, "cancelled", reason)

    def _settle(self) -> None:
        # Groups whose standing depends on everything having been read are placed again now.
        if self._ledger.settle():
            for group_id, _ in self._ledger:
                self._place(group_id)
        self._members.assign_refused()

    def _complete_given_up(self, now: int, events: list[Event]) -> None:
        """Completes the oldest given-up groups as refused, if there are more than GIVEN_UP_KEPT."""
        # The standing changes when our GroupCompleted comes back from the log, and not now. An operator may have the
        # real one sent at the same time; only the order of the partition decides which was first, for every reader.
        given_up = self._pacing.with_standing("given_up")
        if len(given_up) > GIVEN_UP_KEPT:
            refused = sorted((self._refused(group_id) for group_id in given_up), key=lambda each: each[:2])
            for _, group_id, group in refused[:-GIVEN_UP_KEPT]:
                if group_id not in self._completed:
                    self._completed.add(group_id)
                    events.append(self._group_refused(group_id, group, now))

    def _refused(self, group_id: str) -> tuple[int, str, Group]:
        group = self._ledger.find(group_id)
        assert group is not None
        assert group.refusal is not None
        return group.refusal.at, group_id, group

    def _drop_overtaken(self) -> None:
        """Drops tasks of a curriculum that still wait after many newer ones, cancelled or not."""
        closing = [self._ledger.find(group_id) for group_id in self._pacing.with_standing("closing")]
        asks = [group.ask for group in closing if group is not None and group.ask is not None]
        for ask in (*self._demand.waiting_too_long(), *filter(self._demand.is_overtaken, asks)):
            group = self._ledger.find(ask.group_id)
            assert group is not None
            self._move(ask.group_id, group, ask, "unasked")

    def _retry_members(self, wanted: MemberAction, now: int, events: list[Event]) -> None:
        if wanted.given_up_because is None:
            self._ask(wanted.ask, wanted.index, wanted.retry, now, events)
        else:
            self._close(wanted.ask, wanted.index, wanted.given_up_because, now, events)

    def _can_be_served(self, ask: GroupRequest) -> bool:
        # A scripted teacher, or a model of [models]: neither is behind the policy servers.
        if ask.purpose == "demonstrate":
            return True
        if ask.required_version is not None:
            return self._serving.serves(ask.required_version)
        return self._serving.version_served_max >= self._run.job.first_version

    def _demonstrate(self, now: int, events: list[Event]) -> None:
        room = self._settings.demonstrations_in_flight - self._members.running("demonstrate")
        while room > 0 and (ask := self._demand.next("demonstrate", self._can_be_served)) is not None:
            room -= self._open(ask, now, events)

    def _evaluate(self, now: int, events: list[Event]) -> None:
        """Requests evaluations, each only while a server serves the version that it judges."""
        room = self._settings.evaluations_in_flight - self._members.running("eval")
        while room > 0 and (ask := self._demand.next("eval", self._can_be_served)) is not None:
            room -= self._open(ask, now, events)

    def _train(self, now: int, events: list[Event]) -> None:
        # The cold start is not trained with GRPO: training begins when its result is served.
        if self._serving.version_served_max < self._run.job.first_version:
            return
        # _open changes the standing of the group at once, so has_room sees the budget that is left.
        while self._demand.has_training and self._pacing.has_room(self.version):
            self._open(self._demand.next_training(self.version, self._pacing.asked), now, events)

    def _open(self, ask: GroupRequest, now: int, events: list[Event]) -> int:
        """Requests all members of a group; returns how many."""
        for index in range(ask.task.group_size):
            self._ask(ask, index, 0, now, events)
        return ask.task.group_size

    def _ask(self, ask: GroupRequest, index: int, retry: int, now: int, events: list[Event]) -> None:
        request = self._request(ask, index, retry, now)
        # Applied at once and not when it comes back: the next decision must not request it again.
        self.apply(request)
        events.append(request)

    def _request(self, ask: GroupRequest, index: int, retry: int, now: int) -> RolloutRequested:
        return RolloutRequested(
            meta=Meta(
                # Derived: a request that a restart writes again has the same id.
                id=request_id(ask.task_id, index, retry),
                run_id=self._run.run_id,
                session_id=ask.session_id,
                task_id=ask.task_id,
                group_id=ask.group_id,
                trajectory_id=trajectory_id(ask.task_id, index),
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
            seed=ask.seeds[index],
            sampling=ask.sampling,
            deadline=now + int(self._settings.deadline_seconds * 1e6),
            required_version=ask.required_version,
            retry=retry,
            world_at=ask.world_at,
        )

    def _group_refused(self, group_id: str, group: Group, now: int) -> GroupCompleted:
        assert group.ask is not None
        assert group.refusal is not None
        return GroupCompleted(
            meta=Meta(
                id=derived_id("GroupCompleted", group_id, _SENDER, REFUSED),
                run_id=self._run.run_id,
                session_id=group.ask.session_id,
                task_id=group.ask.task_id,
                group_id=group_id,
                category="group",
                topic="groups",
                sender=_SENDER,
                receiver="cut",
                timestamp=now,
                causation_id=group.refusal.event_id or None,
                purpose=group.ask.purpose,
            ),
            scorer_set="",
            members=[],
            reward_mean=0.0,
            reward_deviation=0.0,
            dropped_because=REFUSED,
        )

    # what is remembered

    @property
    def code_version(self) -> str:
        """Version of the fold, with the settings that its state depends on."""
        job, settings = self._run.job, self._settings
        return fold_version(
            _FOLD,
            *(self._run.seed, job.first_version, job.staleness_max),
            *(settings.curriculum, settings.curriculum_tags, settings.curriculum_half_life_versions),
        )

    def encode(self) -> bytes:
        """The state; the same bytes for the same facts. Call it after `decide`, when the decisions are on the log."""
        # Each fold sorts what has no order of its own.
        state = _PlanState(
            ledger=self._ledger.state(),
            demand=self._demand.state(),
            pacing=self._pacing.state(),
            serving=self._serving.state(),
            cancellations=self._cancellations.state(),
            seconds_sampled=list(self._members.seconds_sampled),
            is_paused=self.is_paused,
        )
        return msgspec.msgpack.encode(state)

    def restore(self, encoded: bytes) -> None:
        """Continues from a state. Nothing may have been applied before."""
        state = msgspec.msgpack.decode(encoded, type=_PlanState)
        # Folds that standings depend on come first; the ledger last, since its groups are placed right away.
        self._serving.restore(state.serving)
        self._demand.restore(state.demand)
        self._demand.note_published(self._serving.version)
        self._pacing.restore(state.pacing)
        self._cancellations.restore(state.cancellations)
        self._members.seconds_sampled = Newest(SECONDS_SAMPLED, state.seconds_sampled)
        self.is_paused = state.is_paused
        self._ledger.restore(state.ledger)
        for group_id, group in self._ledger:
            assert group.ask is not None
            self._move(group_id, group, group.ask, self._standing_of(group, group.ask), is_restored=True)
            self._members.restore(group_id, group)
        # Members that were closed before the restart are not in the state: they are closed again, as the same attempt.
        self._is_calling_off = bool(self._cancellations)


def _ask_of(event: TaskSubmitted, address: Address | None, run_seed: int) -> GroupRequest:
    meta, task = event.meta, event.task
    # Without an address nobody could find the world again, so the task keeps it.
    kept = without_world(task) if address is not None else task
    return GroupRequest(
        task_id=meta.task_id or "",
        group_id=group_id_of(meta.task_id or ""),
        session_id=meta.session_id,
        purpose=meta.purpose or "train",
        priority=meta.priority,
        submitted_at=meta.timestamp,
        task=kept,
        world_at=None if kept is task else address,
        seeds=[_seed(run_seed, task, index) for index in range(task.group_size)],
        sampling=event.sampling,
        required_version=event.required_version,
    )


def _seed(run_seed: int, task: Task, index: int) -> int:
    """The seed of a rollout: the same for the same task and member in every run and evaluation with one run seed."""
    # From the content and not the task id, which differs between runs and sessions. 31 bits fit a signed int32.
    text = f"{run_seed}/{index}/{task.prompt}/{task.world}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
