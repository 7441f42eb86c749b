"""Feeder and scheduler over the log in memory, under a seeded scheduler that kills and restarts them, and an oracle.

    feeder ─► tasks ─► scheduler ─► rollouts ─► Rest: rollouts, streams, cutter, trainer, servers, operator ─► attempts, groups, …

Rest never dies. It plays requests in random order, fails some, loses some, puts some into the dead letters, refuses groups,
repeats facts, cuts batches, publishes versions, cancels and pauses. The planners are killed before and after any append and
flush, so around every snapshot; some snapshots are lost, and some lives fold by another code version. Refused groups may be
completed after all, however late, and dead letters are forged with the keys of groups that wait, run or have ended.

The oracle folds the whole log without any snapshot, in another order, and compares states byte by byte.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from replayground.producers import scheduler, stockroom, tasks
from replayground.producers.config import FeederSettings, SchedulerSettings
from replayground.producers.planner import Planner, PlannerLoop
from replayground.producers.scheduler import Plan
from replayground.producers.scheduling.ledger import group_id_of
from replayground.producers.scheduling.members import trajectory_id
from replayground.producers.submission import submit
from replayground.producers.tasks import Feed
from replayground.schemas.events import (
    Address,
    AttemptEnded,
    BatchCut,
    ControlIssued,
    EndedBy,
    Event,
    EventRejected,
    GroupCompleted,
    GroupMember,
    Meta,
    Position,
    Probe,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    Sampling,
    TaskSubmitted,
    WeightsLoaded,
    WeightsPublished,
)
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.streams.log.memory import MemoryLog, MemoryReader
from replayground.streams.log.protocol import Delivery
from replayground.streams.rules.staleness import is_admitted
from tests.simulation.simulator import RememberingCodec
from tests.simulation.troubled_log import Fate, Killed, TroubledLog

RUN_ID = "planned"
SECOND = 1_000_000
SCHEDULER_TOPICS = scheduler.TOPICS_READ
FEEDER_TOPICS = tasks.TOPICS_READ
GROUPS_PER_BATCH = 2
TASKS_REPEATED_FROM = 16
"how many tasks back one may be written again"
SCHEDULING = SchedulerSettings(
    demonstrations_in_flight=3,
    evaluations_in_flight=3,
    retries_max=2,
    retry_seconds=0.5,
    deadline_seconds=50.0,
    overdue_seconds=10.0,
)
FEEDING = FeederSettings(
    evaluation_tasks=3, evaluation_tasks_between=2, evaluation_every=2, train_backlog=3, tasks_per_lesson=1
)
_CODEC = RememberingCodec()
_LINES = [b'{"prompt": "6*7?", "reference": "42", "toolset": ["python"]}', b'{"prompt": "1?", "purpose": "eval"}']


def a_run(steps: int, program: str) -> Run:
    job = JobSettings(
        demonstrations=4,
        steps=steps,
        groups_per_batch=GROUPS_PER_BATCH,
        group_size=2,
        staleness_target=1,
        staleness_max=0,
    )
    return Run(run_id=RUN_ID, seed=0, job=job, log=LogSettings(), blobs_url="memory://", program=program)


class PortionReader(MemoryReader):
    """Delivers a few messages of one partition at a time, so that topics are read in any order."""

    def __init__(
        self,
        log: MemoryLog,
        topics: Sequence[str],
        chance: random.Random,
        start: Sequence[Position] = (),
        run_id: str | frozenset[str] | None = None,
    ) -> None:
        super().__init__(log, topics, None, start, run_id)
        self._chance = chance

    def poll(self, events_max: int, timeout_seconds: float) -> list[Delivery]:
        waiting = [place for place, end in self._log.ends(self._next).items() if self._next[place] < end]
        if not waiting:
            return []
        place = self._chance.choice(waiting)
        portion = min(events_max, self._chance.choice((1, 3, 10, 1000)))
        return self._deliveries(self._log.fetch({place: self._next[place]}, portion, 0.0))


class PlannersLog(TroubledLog):
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
        return PortionReader(self.beneath, topics, self.fate.chance, start, run_id)


class OtherPlan(Plan):
    """The same fold under another name: a release before or after."""

    @property
    def code_version(self) -> str:
        return "other/" + super().code_version


class OtherFeed(Feed):
    @property
    def code_version(self) -> str:
        return "other/" + super().code_version


@dataclass
class Life:
    """One life of a planner."""

    planner: Plan | Feed
    log: TroubledLog
    following: PlannerLoop
    was_restored: bool


@dataclass
class Field:
    """One simulated run."""

    seed: int
    steps: int = 4
    scheduling: SchedulerSettings = SCHEDULING
    feeding: FeederSettings = FEEDING
    log: MemoryLog = field(init=False)
    fate: Fate = field(init=False)
    now: int = 10**9
    restored: int = 0
    "lives that began with a snapshot"

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.log = MemoryLog(_CODEC)
        self.fate = Fate(chance, kill_share=chance.choice((0.0, 0.002, 0.01, 0.05)), kills_max=40)
        self.lives: dict[str, Life | None] = {"feeder": None, "scheduler": None}
        self.rest = Rest(self.log, self.fate, a_run(self.steps, "rest"))

    # lives

    def born(self, program: str) -> Life:
        log = PlannersLog(self.log, self.fate)
        self.lose_snapshots()
        planner = self.planner(program, is_other=self.fate.happens(0.1))
        topics = FEEDER_TOPICS if program == "feeder" else SCHEDULER_TOPICS
        snapshots = self.fate.chance.choice((1, 5, 20, 100))
        untouched = _restored_from(planner)
        following = PlannerLoop(planner, a_run(self.steps, program), log, topics, snapshots)
        self.restored += bool(untouched)
        return Life(planner, log, following, bool(untouched))

    def planner(self, program: str, is_other: bool = False) -> Plan | Feed:
        run = a_run(self.steps, program)
        if program == "feeder":
            return (OtherFeed if is_other else Feed)(run, self.feeding, stockroom.tasks)
        return (OtherPlan if is_other else Plan)(run, self.scheduling)

    def lose_snapshots(self) -> None:
        if self.fate.happens(0.05):
            self.log._partitions["snapshots", 0].clear()

    def advance(self, program: str) -> None:
        """A little work of a planner, or its death."""
        try:
            life = self.lives[program] or self.born(program)
            self.lives[program] = life
            life.following.read(0.0)
            if life.following.is_caught_up():
                life.following.decide(self.now)
                self.check_budget(life.planner)
            if self.fate.happens(0.02):  # a clean stop
                life.following.take_snapshot(self.now)
                self.lives[program] = None
        except Killed:
            life_then = self.lives[program]
            if life_then is not None:
                life_then.log.die()
            self.lives[program] = None

    def check_budget(self, planner: Plan | Feed) -> None:
        if isinstance(planner, Plan):
            # a group that was given up and is completed after all was replaced in between; both are 0 in an honest field
            allowed = planner.groups_budget + self.rest.groups_late + self.rest.letters_forged
            assert planner.groups_accepted + planner.groups_running <= allowed, "beyond the budget"
            assert planner.rollouts_running >= 0
            assert planner.tasks_waiting >= 0

    # the run

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            self.now += self.fate.chance.choice((0, 1000, SECOND // 2, 5 * SECOND))
            step = self.fate.chance.choice(("feeder", "scheduler", "rest", "rest", "rest"))
            if step == "rest":
                self.rest.advance(self.now)
            else:
                self.advance(step)
            if not self.rest.is_honest and self.fate.happens(0.03):
                self.forge()
            if self.fate.happens(0.002):
                self.check_states()

    def forge(self) -> None:
        """A dead letter of nobody's message, with the key of a group or member that the scheduler knows."""
        life = self.lives["scheduler"]
        known = (
            sorted(group_id for group_id, _ in life.planner._ledger) if life and isinstance(life.planner, Plan) else []
        )
        if known:
            self.rest.forge(self.fate.chance.choice(known), self.now)

    def finish(self) -> None:
        """Peace: everything that is open comes to its end."""
        self.fate.at_peace = True
        self.rest.resume(self.now)
        quiet = 0
        while quiet < 40:
            before = self.ends()
            self.now += 20 * SECOND
            for program in ("feeder", "scheduler"):
                self.catch_up(program)
            self.rest.finish(self.now)
            quiet = quiet + 1 if self.ends() == before else 0
            assert self.now < 10**9 + 10**6 * SECOND, "it never ends"

    def ends(self) -> dict[tuple[str, int], int]:
        places = [place for place in self.log._partitions if place[0] != "snapshots"]
        return self.log.ends(places)

    def catch_up(self, program: str) -> Life:
        """Reads everything and decides, until nothing follows."""
        life = self.lives[program] or self.born(program)
        self.lives[program] = life
        for _ in range(1000):
            while not life.following.reader.caught_up():
                life.following.read(0.0)
            if (
                life.following.is_caught_up()
                and life.following.decide(self.now) == 0
                and life.following.reader.caught_up()
            ):
                return life
        raise AssertionError("it decides for ever")

    # the oracle

    def check_states(self) -> None:
        """Live, restored and folded from the whole log: the same bytes."""
        at_peace, self.fate.at_peace = self.fate.at_peace, True
        for program in ("feeder", "scheduler"):
            life = self.catch_up(program)
            found = life.planner.encode()
            folded = self.folded(program)
            assert found == folded.encode(), f"{program}: {_difference(found, folded.encode())}"
            again = self.born(program)
            while not again.following.reader.caught_up():
                again.following.read(0.0)
            again.planner.decide(self.now)
            assert again.planner.encode() == found, f"{program}: {_difference(found, again.planner.encode())}"
        self.fate.at_peace = at_peace

    def folded(self, program: str) -> Plan | Feed:
        """From the whole log, in an order of its own."""
        planner = self.planner(program)
        topics = FEEDER_TOPICS if program == "feeder" else SCHEDULER_TOPICS
        reader = PortionReader(self.log, topics, random.Random(self.now))
        while not reader.caught_up():
            for delivery in reader.poll(1000, 0.0):
                if delivery.event is not None and delivery.event.meta.run_id == RUN_ID:
                    planner.apply(delivery.event, delivery.address)
        asked = [event for event in planner.decide(self.now) if isinstance(event, (RolloutRequested, TaskSubmitted))]
        assert asked == [], f"{program}: a restart without a snapshot asks for {len(asked)} more"
        return planner

    def check(self) -> None:
        """After `finish`."""
        self.check_states()
        life = self.lives["scheduler"]
        assert life is not None
        plan = life.planner
        assert isinstance(plan, Plan)
        events = self.all_events()
        requests = [event for event in events if isinstance(event, RolloutRequested)]
        repeated = [name for name, times in Counter(request.meta.id for request in requests).items() if times > 1]
        assert not repeated, f"{len(repeated)} requests were made twice"
        made = [event.meta.id for event in events if isinstance(event, TaskSubmitted)]
        own = Counter(made) - Counter(self.rest.tasks_repeated)
        assert max(own.values(), default=0) <= 1, "a task was submitted twice"
        assert plan.rollouts_running == 0, "members are open for ever"
        assert plan.groups_running == 0, "groups are open for ever"
        asked = {request.meta.group_id for request in requests if request.meta.purpose == "train"}
        assert plan._pacing.asked == len(asked)
        assert plan.groups_given_up == len(self.rest.refused & asked)
        assert self.rest.completed_as_refused <= self.rest.refused
        assert plan.groups_accepted == len(self.rest.live - self.rest.stale)
        if self.steps:
            feed = self.lives["feeder"]
            assert feed is not None
            assert isinstance(feed.planner, Feed)
            assert feed.planner.phase == "done", feed.planner.phase

    def all_events(self) -> list[Event]:
        topics = {topic for topic, _ in self.log._partitions if topic != "snapshots"}
        found = self.log.reader(sorted(topics)).poll(10**7, 0.0)
        return [delivery.event for delivery in found if delivery.event is not None]


def _restored_from(planner: Planner) -> list[bytes]:
    """Is filled when the planner is restored."""
    states: list[bytes] = []
    restore = planner.restore

    def noted(encoded: bytes) -> None:
        states.append(encoded)
        restore(encoded)

    planner.restore = noted  # type: ignore[method-assign]
    return states


def _difference(one: bytes, other: bytes) -> str:
    """Where two states differ."""
    found = list(_differences("", *(msgspec.msgpack.decode(each, strict=False) for each in (one, other))))
    return "; ".join(found[:5])


def _differences(path: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, list) and isinstance(other, list) and all(_is_named(each) for each in (*one, *other)):
        one, other = dict(one), dict(other)
    if isinstance(one, dict) and isinstance(other, dict):
        for name in (*one, *(name for name in other if name not in one)):
            yield from _differences(f"{path}.{name}", one.get(name), other.get(name))
    elif one != other:
        yield f"{path}: {str(one)[:300]} | {str(other)[:300]}"


def _is_named(each: Any) -> bool:
    return isinstance(each, list) and len(each) == 2 and isinstance(each[0], str)


class Rest:
    """Everything that planners meet on the log."""

    def __init__(self, log: MemoryLog, fate: Fate, run: Run) -> None:
        self._log = log
        self._fate = fate
        self._run = run
        self.is_honest = fate.chance.random() < 0.25
        "nothing is forged, and nothing that was refused comes after all: then the budget is never exceeded"
        self._reader = log.reader(["tasks", "rollouts", "messages", "groups", "control"])
        self._requests: list[RolloutRequested] = []
        self._started: dict[str, RolloutStarted] = {}
        self._ended: dict[str, set[int]] = {}
        self._purposes: dict[str, str] = {}
        self._judged: set[str] = set()
        self._cancelled: set[str] = set()
        self._written: list[Event] = []
        self._tasks: list[TaskSubmitted] = []
        self.tasks_repeated: list[str] = []
        self._uncut: dict[str, int] = {}
        self.live: set[str] = set()
        self.stale: set[str] = set()
        self.refused: set[str] = set()
        self.completed_as_refused: set[str] = set()
        "by the scheduler, before anybody else completed them"
        self._completed_late: dict[str, tuple[Meta, int]] = {}
        self.letters_forged = 0
        self.groups_late = 0
        self._held: set[int] = set()
        self._served: int | None = None
        self._batches = 0
        self._version = -1
        self._rejects = 0
        self._is_paused = False
        self._has_submitted = False

    def advance(self, now: int) -> None:
        self._read(now)
        chance = self._fate.chance
        if self._requests and chance.random() < 0.8:
            self._play(self._requests.pop(chance.randrange(len(self._requests))), now)
        if self._fate.happens(0.1) and self._written:
            self._log.append(chance.choice(self._written))  # the streams repeat a fact, from however long ago
        if self._fate.happens(0.03) and self._tasks:
            task = chance.choice(self._tasks[-TASKS_REPEATED_FROM:])
            self._log.append(task)
            self.tasks_repeated.append(task.meta.id)
        if self._completed_late and self._fate.happens(0.05):
            self._complete_late(chance.choice(sorted(self._completed_late)), now)
        self._train(now)
        self._serve(now)
        self._operate(now)

    def finish(self, now: int) -> None:
        """All that is asked for ends."""
        self._read(now)
        while self._requests:
            self._play(self._requests.pop(), now)
        self._train(now)
        self._serve(now)

    def resume(self, now: int) -> None:
        if self._is_paused:
            self._is_paused = False
            self._log.append(self._control("resume", now))

    def _read(self, now: int) -> None:
        for delivery in self._reader.poll(10**6, 0.0):
            match delivery.event:
                case TaskSubmitted() as task:
                    self._tasks.append(task)
                case RolloutRequested() as request:
                    self._requests.append(request)
                case RolloutStarted() as started:
                    self._started[started.meta.attempt_id or ""] = started
                case RolloutEnded() as ended:
                    started = self._started[ended.meta.attempt_id or ""]
                    self._end(started.meta, started.index, started.task.group_size, ended.ended_by, now)
                case GroupCompleted(dropped_because="refused") as completed:
                    self._note_completed_as_refused(completed.meta.group_id or "")
                case ControlIssued(command="hold", version=int(version)):
                    self._held.add(version)
                case ControlIssued(command="release", version=int(version)):
                    self._held.discard(version)

    # rollouts and streams

    def _play(self, request: RolloutRequested, now: int) -> None:
        fate = self._fate
        if fate.happens(0.05):
            return  # its worker died, and nobody took it over
        if fate.happens(0.05):
            self._reject("rollouts", request.meta.trajectory_id or "", now)
            return
        ended_by: EndedBy = "infra_error" if fate.happens(0.2) else "answered"
        self._end(request.meta, request.index, request.task.group_size, ended_by, now)

    def _end(self, asked: Meta, index: int, group_size: int, ended_by: EndedBy, now: int) -> None:
        group_id = asked.group_id or ""
        is_sampled = ended_by == "answered" and asked.purpose != "demonstrate"
        changes: dict[str, Any] = {"topic": "attempts", "timestamp": now}
        if asked.topic == "rollouts":
            changes["correlation_id"] = asked.id
        self._purposes[group_id] = asked.purpose or ""
        self._write(
            AttemptEnded(
                meta=msgspec.structs.replace(asked, **changes),
                index=index,
                group_size=group_size,
                ended_by=ended_by,
                reason=None,
                tokens_sampled=int(is_sampled),
                policy_version_oldest=self._sampled_version(asked) if is_sampled else None,
            )
        )
        if ended_by == "infra_error":
            return
        ended = self._ended.setdefault(group_id, set())
        ended.add(index)
        if ended_by == "cancelled":
            self._cancelled.add(group_id)
        if asked.purpose == "train" and len(ended) == group_size and group_id not in self._judged | self.refused:
            self._judge(asked, group_size, now)

    def _sampled_version(self, asked: Meta) -> int:
        return max(0, self._version - (1 if self._fate.happens(0.3) else 0))

    def _judge(self, asked: Meta, group_size: int, now: int) -> None:
        group_id = asked.group_id or ""
        if self._fate.happens(0.1):
            self.refused.add(group_id)
            if not self.is_honest and self._fate.happens(0.5):
                self._completed_late[group_id] = (asked, group_size)
            self._reject(self._fate.chance.choice(("trajectories", "rewards", "groups")), group_id, now)
            return
        self._complete(asked, group_size, now)

    def _complete_late(self, group_id: str, now: int) -> None:
        """An operator has a refused message sent again. Where the scheduler has completed the group, the cutter knows it."""
        self.groups_late += 1
        asked, group_size = self._completed_late.pop(group_id)
        self._complete(asked, group_size, now, counts=group_id not in self.completed_as_refused)
        if group_id not in self.completed_as_refused:
            self.refused.discard(group_id)

    def _note_completed_as_refused(self, group_id: str) -> None:
        if group_id in self.refused:
            self.completed_as_refused.add(group_id)

    def _complete(self, asked: Meta, group_size: int, now: int, *, counts: bool = True) -> None:
        group_id = asked.group_id or ""
        self._judged.add(group_id)
        is_dropped = self._fate.happens(0.3) or group_id in self._cancelled
        version = self._sampled_version(asked)
        members = [
            GroupMember(
                index=index,
                trajectory_id=f"{group_id}-{index}",
                attempt_id="a",
                trajectory=Address("trajectories", 0, 0),
                reward=float(index),
                advantage=0.0,
                valid=True,
                tokens_sampled=1,
                policy_version_oldest=version,
            )
            for index in range(group_size)
        ]
        self._write(
            GroupCompleted(
                meta=msgspec.structs.replace(asked, topic="groups", timestamp=now),
                scorer_set="",
                members=members,
                reward_mean=0.5,
                reward_deviation=0.5,
                dropped_because="zero_variance" if is_dropped else None,
            )
        )
        if counts and not is_dropped:
            self.live.add(group_id)
            self._uncut[group_id] = version

    def forge(self, group_id: str, now: int) -> None:
        self.letters_forged += 1
        run_id = self._fate.chance.choice((RUN_ID, RUN_ID, RUN_ID, "another"))
        topic = self._fate.chance.choice(("trajectories", "rewards", "groups", "messages", "rollouts", "tasks"))
        task_id = next(
            (task.meta.task_id for task in self._tasks if group_id_of(task.meta.task_id or "") == group_id), ""
        )
        key = trajectory_id(task_id or "", 0) if topic == "rollouts" else group_id
        self._reject(topic, key, now, run_id)

    def _reject(self, topic: str, key: str, now: int, run_id: str = RUN_ID) -> None:
        self._rejects += 1
        meta = self._meta(f"reject-{self._rejects}", "dead-letters", now)
        rejected = EventRejected(
            meta=msgspec.structs.replace(meta, run_id=run_id),
            original=b"",
            original_key=key.encode(),
            origin=Address(topic, 0, self._rejects),
            stage="stage",
            reason="refused",
        )
        self._log.append(rejected)
        self._written.append(rejected)

    # cutter, trainer, servers

    def _train(self, now: int) -> None:
        first = self._run.job.first_version
        if self._version < 0:
            self._publish(0, now)
        if self._version < first:
            if sum(purpose == "demonstrate" for purpose in self._purposes.values()) >= self._run.job.demonstrations:
                self._publish(first, now)
            return
        stale = [
            group_id
            for group_id, version in self._uncut.items()
            if not is_admitted(first + self._batches, version, self._run.job.staleness_max)
        ]
        fresh = [group_id for group_id in self._uncut if group_id not in stale]
        self.stale.update(stale)
        steps = self._run.job.steps
        is_enough = self._batches >= steps if steps else self._fate.at_peace  # a run that need not end is stopped
        if len(fresh) < GROUPS_PER_BATCH or is_enough:
            return
        taken = fresh[:GROUPS_PER_BATCH]
        self._write(
            BatchCut(
                meta=self._meta(f"batch-{self._batches}", "batches", now),
                index=self._batches,
                base_version=first + self._batches,
                members=[],
                groups=taken,
                tokens_sampled=0,
                policy_floor=0,
                groups_stale=stale,
                groups_dropped={},
                positions=[],
            ),
            may_repeat=False,
        )
        for group_id in (*taken, *stale):
            del self._uncut[group_id]
        self._batches += 1
        self._publish(first + self._batches, now)

    def _publish(self, version: int, now: int) -> None:
        self._version = version
        self._log.append(
            WeightsPublished(
                meta=self._meta(f"weights-{version}", "weights", now),
                version=version,
                base_version=None,
                kind="full",
                files=[],
                checkpoint=[],
                batches=[],
                probe=Probe(tokens=b"", logprobs=b""),
            )
        )
        self._load("newest", version, now)

    def _serve(self, now: int) -> None:
        """One server holds the lowest version that an evaluation wants."""
        wanted = min(self._held, default=None)
        if wanted is not None and wanted != self._served:
            self._load("held", wanted, now)
            self._served = wanted

    def _load(self, server: str, version: int, now: int) -> None:
        self._log.append(
            WeightsLoaded(
                meta=self._meta(f"{server}-{version}-{now}", "serving", now),
                server=server,
                version=version,
                digest="",
                probe_gap=None,
                seconds=0.0,
                refusal=None,
            )
        )

    # the operator

    def _operate(self, now: int) -> None:
        if self._fate.happens(0.005):
            self._is_paused = not self._is_paused
            self._log.append(self._control("pause" if self._is_paused else "resume", now))
        if self._fate.happens(0.005) and self._tasks:
            task = self._fate.chance.choice(self._tasks[-10:])
            if task.meta.purpose == "train":
                self._log.append(self._control("cancel", now, task.meta.task_id))
        if not self._has_submitted and self._fate.happens(0.02):
            self._has_submitted = True
            submit(_LINES, self._run, self._log, sampling=Sampling(), now=now)

    def _control(
        self, command: Literal["pause", "resume", "cancel"], now: int, task_id: str | None = None
    ) -> ControlIssued:
        meta = msgspec.structs.replace(self._meta(f"{command}-{now}", "control", now), task_id=task_id)
        return ControlIssued(meta=meta, command=command, version=None, requested_by="", reason="")

    def _write(self, event: Event, may_repeat: bool = True) -> None:
        self._log.append(event)
        if may_repeat:
            self._written.append(event)

    def _meta(self, name: str, topic: str, now: int) -> Meta:
        return Meta(id=name, run_id=RUN_ID, category=topic, topic=topic, sender="rest", timestamp=now)


def simulate(seed: int, rounds: int = 1500, **options: Any) -> Field:
    """One run with everything that may go wrong, brought to its end and checked. Raises AssertionError."""
    field = Field(seed, **options)
    try:
        field.play(rounds)
        field.finish()
        field.check()
    except AssertionError as error:
        error.add_note(f"seed {seed}: simulate({seed}, {rounds}, **{options})")
        raise
    return field
