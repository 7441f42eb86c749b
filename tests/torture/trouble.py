"""Trouble that a kill of one program does not make: a broker that dies inside a transaction, programs that sleep past
their session and wake up, two holders of what is for one, and groups whose members come and go.

Each scenario runs real processes on a real broker and ends when nothing is left to be read. Then the log is judged:
nothing lost, nothing counted twice, order kept, no partition stuck.
"""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from confluent_kafka import Producer

from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.errors import LogUnavailable
from schemas.events import BatchCut, Event, EventRejected, GroupCompleted, StepTaken, WeightsPublished
from schemas.metrics import Pulse
from schemas.registry import MemoryRegistry
from schemas.run import JobSettings, Run
from streams import cut
from streams.config import CutSettings
from streams.driver import Driver
from streams.hops.flow import hops
from streams.log.connect import codec_of, open_log
from streams.log.kafka import KafkaLog, KafkaTransactor
from streams.log.memory import MemoryLog
from streams.log.protocol import Log
from tests.flow.synthetic import groups
from tests.torture.kills import events_of
from tests.torture.own_broker import OwnBroker, own_broker
from tests.torture.programs import Program, cut_program, streams_program, trainer_program
from tests.torture.stopping import await_that

GROUPS_PER_BATCH = 4
DERIVED_TOPICS = ("trajectories", "rewards", "groups")
READ_TOPICS = ("messages", "trajectories", "rewards")


def told_of_trouble(run: Run, folder: Path, quick: bool) -> str:
    """All of it, one after another, in a sentence each. Raises AssertionError when a promise is broken."""
    rounds = 1 if quick else 10
    with own_broker(folder / "own-broker", run) as (broker, run_there):
        cut_there = broker_killed_in_transactions(run_there, broker, MOMENTS * rounds, seed=1)
    assert cut_there.holds, cut_there
    cutters = rival_cutters(run, [False, True] * rounds)
    assert cutters.holds, cutters
    trainers = rival_trainers(run, [False, True] * (1 if quick else 3))
    assert trainers.holds, trainers
    acts = list(ACTS) if quick else random.Random(1).choices(ACTS, k=60)
    stormed = storm(run, folder / "storm", acts, groups_count=40 if quick else 1000, seed=1)
    assert stormed.holds, stormed
    done = ", ".join(f"{act} {count}" for act, count in sorted(Counter(acts).items()))
    return (
        f"{broker.kills} times kill -9 of the broker inside a transaction: {cut_there.batches} batches, each once and in "
        f"order; {len(cutters.ends)} times two cutters at once: the older one fenced, {cutters.cut.batches} batches in order, "
        f"{cutters.cut.groups_twice} groups cut twice; {len(trainers.ends)} times two trainers at once: the older one fenced, "
        f"{trainers.batches} steps, each once; workers of the streams that come and go ({done}): {stormed.messages:,} "
        f"messages, {stormed.lost} facts lost, {stormed.foreign} foreign, {stormed.repeated} repeated and known by their ids, "
        f"{stormed.rejected} refused, {stormed.lag} left unread"
    )


def troubled_run(run: Run, name: str, **job: Any) -> Run:
    """A run of its own for a scenario, on the same log."""
    settings = JobSettings(groups_per_batch=GROUPS_PER_BATCH, staleness_max=10**6, steps=10**6, **job)
    return msgspec.structs.replace(run, run_id=f"{name}-{time.time_ns():x}", job=settings)


# A broker that dies inside transactions of the cutter


Moment = Literal["produced", "sent_offsets", "committing", "committed"]
MOMENTS: tuple[Moment, ...] = ("produced", "sent_offsets", "committing", "committed")


@dataclass(frozen=True)
class Cut:
    """What the cutters made of the groups."""

    groups: int
    batches: int
    in_order: bool
    groups_twice: int
    groups_missing: int
    lag: int

    @property
    def holds(self) -> bool:
        whole = self.batches == self.groups // GROUPS_PER_BATCH
        return whole and self.in_order and self.groups_twice == self.groups_missing == self.lag == 0


def broker_killed_in_transactions(run: Run, broker: OwnBroker, moments: Sequence[Moment], seed: int) -> Cut:
    """One cutter; the broker is killed at one moment of each transaction after another."""
    run = troubled_run(run, "transactions")
    written = completed_groups(run.run_id, GROUPS_PER_BATCH * (len(moments) + 2))
    trouble = _Trouble(broker, list(moments), random.Random(seed))
    log = _TroubledLog(run.bootstrap_servers, codec_of(run), trouble)
    try:
        _append(log, written)
        with _cutting(run, log):
            return _cut_of(run, log, written)
    finally:
        log.close()


class _Trouble:
    """Knows at which moments the broker is to die."""

    def __init__(self, broker: OwnBroker, moments: list[Moment], chance: random.Random) -> None:
        self._broker = broker
        self._moments = moments
        self._chance = chance

    def is_due(self, moment: Moment) -> bool:
        return bool(self._moments) and self._moments[0] == moment

    def strike(self) -> None:
        self._moments.pop(0)
        self._broker.kill_and_start_again()

    @contextmanager
    def striking_meanwhile(self) -> Iterator[None]:
        """Strikes while the block runs, a little later than it began."""
        timer = threading.Timer(self._chance.uniform(0.0, 0.01), self.strike)
        timer.start()
        yield
        timer.join()


class _TroubledLog(KafkaLog):
    def __init__(self, bootstrap_servers: str, codec: Codec, trouble: _Trouble) -> None:
        super().__init__(bootstrap_servers, codec)
        self._trouble = trouble

    def transactor(self, name: str) -> KafkaTransactor:
        return _TroubledTransactor(self._bootstrap_servers, self.codec, name, self._trouble)


class _TroubledTransactor(KafkaTransactor):
    def __init__(self, bootstrap_servers: str, codec: Codec, name: str, trouble: _Trouble) -> None:
        self._trouble = trouble
        super().__init__(bootstrap_servers, codec, name)

    def _initialised(self) -> Producer:
        return cast(Producer, _TroubledProducer(super()._initialised(), self._trouble))


class _TroubledProducer:
    """A real producer whose broker dies between two of its calls, or during one."""

    def __init__(self, producer: Producer, trouble: _Trouble) -> None:
        self._producer = producer
        self._trouble = trouble

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def send_offsets_to_transaction(self, *arguments: Any) -> None:
        if self._trouble.is_due("produced"):
            self._producer.flush()
            self._trouble.strike()
        self._producer.send_offsets_to_transaction(*arguments)
        if self._trouble.is_due("sent_offsets"):
            self._trouble.strike()

    def commit_transaction(self) -> None:
        if self._trouble.is_due("committing"):
            with self._trouble.striking_meanwhile():
                self._producer.commit_transaction()
            return
        self._producer.commit_transaction()
        if self._trouble.is_due("committed"):
            self._trouble.strike()


@contextmanager
def _cutting(run: Run, log: KafkaLog) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=cut.cut, args=(run, CutSettings(), Pulse(), stop, log))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def completed_groups(run_id: str, count: int) -> list[GroupCompleted]:
    """Groups that teach something, as the streams would write them."""
    quiet = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for rollout in groups(2 * count + 10, run_id=run_id):
        for message in rollout:
            quiet.append(message)
    Driver(quiet, hops((), "standardised"), run_id).run_until_caught_up()
    found = events_of(quiet, "groups", run_id)
    return [g for g in found if isinstance(g, GroupCompleted) and g.dropped_because is None][:count]


def _cut_of(run: Run, log: Log, written: Sequence[Event]) -> Cut:
    """Waits until every group is committed, and judges the batches."""
    await_that(lambda: _lag(log, f"cut-{run.run_id}", ["groups"]) == 0, "every group is in a batch")
    batches = [event for event in events_of(log, "batches", run.run_id) if isinstance(event, BatchCut)]
    found = Counter(group for batch in batches for group in batch.groups)
    return Cut(
        groups=len(written),
        batches=len(batches),
        in_order=[batch.index for batch in batches] == list(range(len(batches))),
        groups_twice=found.total() - len(found),
        groups_missing=len({group.meta.group_id for group in written} - found.keys()),
        lag=_lag(log, f"cut-{run.run_id}", ["groups"]),
    )


# Two cutters, two trainers


@dataclass(frozen=True)
class Rivals:
    """What became of programs of which there may be one."""

    ends: list[str]
    "what each of the older ones died of"
    cut: Cut

    @property
    def holds(self) -> bool:
        return self.cut.holds and all(end.startswith("Fenced:") for end in self.ends)


def rival_cutters(run: Run, rounds: Sequence[bool]) -> Rivals:
    """In each round a further cutter is started beside the one that works, under load; where the round says so, the older
    one is stopped before and wakes up after batches were cut without it. The older one has to end, the other goes on."""
    run = troubled_run(run, "cutters")
    log = open_log(run)
    written = completed_groups(run.run_id, GROUPS_PER_BATCH * 50 * len(rounds))
    holder = cut_program(run)
    programs, ends = [holder], []
    try:
        with _flowing(run, written, seconds=12.0 * len(rounds)):
            for asleep in rounds:
                _await_batches(log, run, more=1)
                newer = _rival(holder, asleep, lambda: cut_program(run), lambda: _await_batches(log, run, more=2))
                programs.append(newer)
                ends.append(holder.ended())
                holder = newer
        return Rivals(ends, _cut_of(run, log, written))
    finally:
        _kill(programs)
        log.close()


def _rival(holder: Program, asleep: bool, start: Callable[[], Program], await_work: Callable[[], None]) -> Program:
    if asleep:
        holder.send(signal.SIGSTOP)
    newer = start()
    await_work()
    holder.send(signal.SIGCONT)
    return newer


def _await_batches(log: Log, run: Run, more: int) -> None:
    wanted = len(events_of(log, "batches", run.run_id)) + more
    await_that(lambda: len(events_of(log, "batches", run.run_id)) >= wanted, "batches are cut")


@dataclass(frozen=True)
class Trained:
    """What two trainers at once made of the batches."""

    ends: list[str]
    batches: int
    versions: list[int]
    steps: list[int]

    @property
    def holds(self) -> bool:
        once = self.versions == self.steps == list(range(self.batches + 1))
        return once and all(end.startswith("Fenced:") for end in self.ends)


def rival_trainers(run: Run, rounds: Sequence[bool]) -> Trained:
    """As rival_cutters: batches come until the older trainer has ended, and one more for the newer."""
    from tests.torture.trainable import Batches  # torch takes seconds to import

    run = troubled_run(run, "trainers", demonstrations=0)
    log = open_log(run)
    batches = Batches(run, log)
    holder = trainer_program(run)
    programs, ends = [holder], []

    def step() -> None:
        batches.append_next()
        await_that(lambda: len(events_of(log, "weights", run.run_id)) > batches.count, "a step is taken")

    try:
        step()
        for asleep in rounds:
            newer = _rival(holder, asleep, lambda: trainer_program(run), step)
            programs.append(newer)
            while holder.is_alive:
                step()
            ends.append(holder.ended())
            holder = newer
        step()
        weights, steps = events_of(log, "weights", run.run_id), events_of(log, "steps", run.run_id)
        return Trained(
            ends=ends,
            batches=batches.count,
            versions=[event.version for event in weights if isinstance(event, WeightsPublished)],
            steps=[event.new_version for event in steps if isinstance(event, StepTaken)],
        )
    finally:
        _kill(programs)
        log.close()


# Workers of one Faust app that come and go


Act = Literal["join", "leave", "kill", "sleep"]
ACTS: tuple[Act, ...] = ("join", "leave", "kill", "sleep")
WORKERS_MAX = 3


@dataclass(frozen=True)
class Stormed:
    """What the workers made of the messages."""

    acts: list[Act]
    messages: int
    lost: int
    foreign: int
    repeated: int
    rejected: int
    lag: int
    ends: Counter[str]
    "of workers that were told to leave, or ended by themselves"

    @property
    def holds(self) -> bool:
        return self.lost == self.foreign == self.rejected == self.lag == 0 and set(self.ends) <= {"exit code 0"}


def storm(
    run: Run, folder: Path, acts: Sequence[Act], groups_count: int, seed: int, seek_seconds: float = 0.0
) -> Stormed:
    """Workers join, leave, are killed and sleep past their session while messages flow."""
    run = troubled_run(run, "storm")
    chance = random.Random(seed)
    messages = [event for rollout in groups(groups_count, run_id=run.run_id) for event in rollout]
    field = _Field(run, folder, chance, seek_seconds)
    try:
        with _flowing(run, messages, seconds=8.0 * len(acts)):
            for act in acts:
                time.sleep(chance.uniform(1.0, 4.0))
                field.do(act)
        field.replace_the_fallen()
        return _stormed(run, messages, list(acts), field)
    finally:
        _kill(field.workers)


class _Field:
    """The workers of one app. One that ends by itself is started again under its name, as a supervisor would."""

    def __init__(self, run: Run, folder: Path, chance: random.Random, seek_seconds: float) -> None:
        self._run = run
        self._folder = folder
        self._chance = chance
        self._seek_seconds = seek_seconds
        self._by_name: dict[str, Program] = {}
        self.ends: Counter[str] = Counter()
        self.do("join")
        self.do("join")

    @property
    def workers(self) -> list[Program]:
        return list(self._by_name.values())

    def do(self, act: Act) -> None:
        self.replace_the_fallen()
        if act == "join" and len(self._by_name) < WORKERS_MAX:
            names = {f"streams-{number}" for number in range(WORKERS_MAX)}
            self._start(self._chance.choice(sorted(names - self._by_name.keys())))
        if act == "join":
            return
        name = self._chance.choice(sorted(self._by_name))
        worker = self._by_name[name]
        if act == "sleep":
            worker.stop_past_session()
        elif act == "kill":
            worker.kill()
            self._start(name)
        else:
            del self._by_name[name]
            worker.send(signal.SIGTERM)
            self.ends[worker.ended()] += 1
            if not self._by_name:
                self._start(name)

    def replace_the_fallen(self) -> None:
        for name, worker in list(self._by_name.items()):
            if not worker.is_alive:
                self.ends[worker.ended()] += 1
                self._start(name)

    def leave(self) -> None:
        """Everybody drains."""
        for worker in self.workers:
            worker.send(signal.SIGTERM)
        for worker in self.workers:
            self.ends[worker.ended()] += 1

    def _start(self, name: str) -> None:
        run = msgspec.structs.replace(self._run, worker=name)
        self._by_name[name] = streams_program(run, self._folder, self._seek_seconds)


def _stormed(run: Run, messages: Sequence[Event], acts: list[Act], field: _Field) -> Stormed:
    quiet = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    _append(quiet, messages)
    Driver(quiet, hops((), "standardised"), run.run_id).run_until_caught_up()
    log = open_log(run)
    try:
        await_that(lambda: _lag(log, f"streams-{run.run_id}", READ_TOPICS) == 0, "everything is taken and committed")
        field.leave()
        lost = foreign = repeated = 0
        for topic in DERIVED_TOPICS:
            found = Counter(event.meta.id for event in events_of(log, topic, run.run_id))
            wanted = {event.meta.id for event in events_of(quiet, topic, run.run_id)}
            lost += len(wanted - found.keys())
            foreign += len(found.keys() - wanted)
            repeated += found.total() - len(found)
        rejected = sum(isinstance(event, EventRejected) for event in events_of(log, "dead-letters", run.run_id))
        lag = _lag(log, f"streams-{run.run_id}", READ_TOPICS)
        return Stormed(acts, len(messages), lost, foreign, repeated, rejected, lag, field.ends)
    finally:
        log.close()


# What all of them need


@contextmanager
def _flowing(run: Run, events: Sequence[Event], seconds: float) -> Iterator[None]:
    """Appends the events evenly while the block runs, and what is left at once when it ends."""
    log = open_log(run)
    hurry = threading.Event()

    def flow() -> None:
        for event in events:
            log.append(event)
            hurry.wait(seconds / len(events))
        log.flush()

    thread = threading.Thread(target=flow)
    thread.start()
    try:
        yield
    finally:
        hurry.set()
        thread.join()
        log.close()


def _append(log: Log, events: Sequence[Event]) -> None:
    for event in events:
        log.append(event)
    log.flush()


def _lag(log: Log, group: str, topics: Sequence[str]) -> int:
    """Messages that the group has not committed; -1 while there is nobody to ask."""
    try:
        return sum(standing.lag for standing in log.standing(group, topics).values())
    except LogUnavailable:
        return -1


def _kill(programs: Sequence[Program]) -> None:
    for program in programs:
        program.kill()
