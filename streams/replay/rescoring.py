"""Judges the trajectories of other runs again: one partition of the log at a time, exactly once.

    trajectories of the sources ─► score ─► group ─► RewardAssigned, GroupCompleted + snapshot ─► one transaction

All members of a group are on one partition, so partitions are independent and processes share them out. The hops are
those of the live flow. What is written and how far was read are one transaction: a replay that is killed continues
where it was, and writes nothing twice.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import Struct

from replayground.schemas.events import Address, Event, Position, Purpose, RewardAssigned, TrajectoryAssembled
from replayground.schemas.ids import now_microseconds
from replayground.schemas.job import Scorer
from replayground.schemas.run import Run
from replayground.streams.hops.rewards_to_groups import GroupRewards, GroupState
from replayground.streams.hops.trajectories_to_rewards import ScoreTrajectories
from replayground.streams.log.protocol import Delivery, Log, Reader, Transactor
from replayground.streams.log.snapshots import snapshot, snapshot_to_continue
from replayground.streams.replay.patience import while_log_is_away
from replayground.streams.replay.selection import TOPIC, PartitionSelection
from replayground.streams.rules.advantage import AdvantageKind
from replayground.streams.rules.scoring import versions_of

STATE_VERSION = "rescoring-1"
"of PartitionState: a replay with a snapshot of another version is not gone on with"
ATTEMPTS_REMEMBERED = 2048
"""How many attempts of a partition are remembered. The stage that assembles trajectories may write one again after it was
killed; it repeats what it wrote since its last commit, which are fewer."""
GROUPS_REMEMBERED = 2048
"""How many completed groups of a partition are remembered. An attempt of a worker that was taken for dead comes minutes
after another one has filled its member: with enough of them a group would be completed twice."""
_WRITTEN = ("rewards", "groups", "snapshots")
_POLL_EVENTS = 50
"few enough to stay in the processor's cache between decoding and judging: 15 % faster than with 200"
_REPORT_SECONDS = 0.1
_READ_AHEAD = 3000
"trajectories before the end of a partition from which on those of the next one are fetched"
_POLL_SECONDS = 0.2
_COLLECTED_AT = 10_000
"new objects between two garbage collections"
# In insertion order, which follows from the log: `attempts` must stay in the order in which they came.
_encode = msgspec.msgpack.Encoder().encode


class Counts(Struct):
    """What was done to one partition."""

    trajectories: int = 0
    "judged"
    repeats: int = 0
    "trajectories that are on the log twice"
    undecodable: int = 0
    excluded: int = 0
    "rewards that do not count"
    groups: int = 0
    groups_dropped: int = 0
    "groups without a learning signal"


class PartitionState(Struct):
    """How far one partition was read, and what is incomplete."""

    offset: int = 0
    "the next one to read"
    groups: dict[str, GroupState] = {}
    "those that have not got all their members"
    attempts: dict[str, None] = {}
    "the newest ones, in the order in which they came"
    completed: dict[str, None] = {}
    "the newest groups that have all their members, in the order in which they were completed"
    counts: Counts = msgspec.field(default_factory=Counts)


@dataclass(frozen=True)
class Judges:
    """Who judges a replay, and what it reads."""

    run_id: str
    "of the replay"
    sources: frozenset[str]
    scorers: Mapping[str, Scorer]
    names: tuple[str, ...] = ()
    "scorers that judge every trajectory; none = those that its task names"
    advantage: AdvantageKind = "centred"


class Rescoring:
    """The fold over one partition. Pure: the same trajectories give the same events, byte for byte."""

    def __init__(self, judges: Judges, selection: PartitionSelection | None = None) -> None:
        """Without a selection, all trajectories of the sources are judged."""
        self._judges = judges
        self._selection = selection
        self._score = ScoreTrajectories(judges.scorers)
        self._group = GroupRewards(judges.advantage, versions=versions_of(judges.scorers))

    def take(self, state: PartitionState, event: Event, address: Address) -> list[Event]:
        """The rewards of a trajectory, and its group if it is complete now. Changes the state."""
        if not isinstance(event, TrajectoryAssembled) or event.meta.run_id not in self._judges.sources:
            return []
        size = event.task.group_size if self._selection is None else self._selection.group_size(address.offset)
        if size is None:
            return []
        if self._is_repeat(state, event):
            state.counts.repeats += 1
            return []
        state.counts.trajectories += 1
        events: list[Event] = []
        for reward in self._score.step(None, self._as_replayed(event, size), address).events:
            assert isinstance(reward, RewardAssigned)
            state.counts.excluded += reward.verdict == "excluded"
            events += (reward, *self._grouped(state, reward, address))
        return events

    def _is_repeat(self, state: PartitionState, event: TrajectoryAssembled) -> bool:
        attempt_id = event.meta.attempt_id or event.meta.id
        if attempt_id in state.attempts:
            return True
        _remember(state.attempts, attempt_id, ATTEMPTS_REMEMBERED)
        return False

    def _as_replayed(self, event: TrajectoryAssembled, group_size: int) -> TrajectoryAssembled:
        """The trajectory as one of this run, judged by its scorers."""
        purpose: Purpose | None = "replay" if event.meta.purpose == "train" else event.meta.purpose
        task = event.task
        if self._judges.names or task.group_size != group_size:
            names = list(self._judges.names) or task.scorers
            task = msgspec.structs.replace(task, scorers=names, group_size=group_size)
        meta = msgspec.structs.replace(event.meta, run_id=self._judges.run_id, purpose=purpose)
        return msgspec.structs.replace(event, meta=meta, task=task)

    def _grouped(self, state: PartitionState, reward: RewardAssigned, address: Address) -> Sequence[Event]:
        key = self._group.key(reward)
        if key is None or key in state.completed:
            return ()
        outcome = self._group.step(state.groups.get(key), reward, address)
        assert outcome.refused is None, outcome.refused
        if outcome.events:
            state.groups.pop(key, None)
            _remember(state.completed, key, GROUPS_REMEMBERED)
            state.counts.groups += 1
            state.counts.groups_dropped += any(getattr(event, "dropped_because", None) for event in outcome.events)
        elif outcome.state is not None:
            state.groups[key] = outcome.state
        return outcome.events


def _remember(newest: dict[str, None], name: str, count: int) -> None:
    newest[name] = None
    if len(newest) > count:
        del newest[next(iter(newest))]


type Report = Callable[[int, PartitionState], None]
"called with the partition and its state, now and then"


@dataclass(frozen=True)
class PartitionRange:
    """What of one partition is judged."""

    sources: frozenset[str]
    start: Position
    end: Callable[[], int | None]
    "the offset at which it ends; None = not known yet, so go on"
    trajectories_per_commit: int = 2000


def rescore_partition(
    run: Run, log: Log, fold: Rescoring, wanted: PartitionRange, report: Report, stop: threading.Event
) -> PartitionState | None:
    """Judges one partition. Returns the last state, or None when `stop` was set. Waits while the log is unavailable.
    Raises Fenced, LogBroken, and BadInput for a replay that another release began."""
    states = list(rescore_partitions(run, log, [(fold, wanted)], report, stop))
    return states[0] if states else None


def rescore_partitions(
    run: Run, log: Log, parts: Sequence[tuple[Rescoring, PartitionRange]], report: Report, stop: threading.Event
) -> Iterator[PartitionState]:
    """Judges partitions one after another; each next item judges one and is its last state. Ends when `stop` was set.
    Waits and raises as rescore_partition.

    Judging is done by the calling thread. Another one opens the next partition meanwhile: that takes as long as judging
    thousands of trajectories, nearly all of it waiting for the brokers."""
    openings = [_Opening(run, log, fold, wanted) for fold, wanted in parts]
    collected_at, *older = gc.get_threshold()
    # A poll makes thousands of objects that live until they are judged: each look at them in between is for nothing.
    gc.set_threshold(max(collected_at, _COLLECTED_AT), *older)
    try:
        for number, opening in enumerate(openings):
            ahead = openings[number + 1 : number + 2]

            def report_and_open(
                partition: int,
                state: PartitionState,
                next_ones: list[_Opening] = ahead,
                wanted: PartitionRange = opening.wanted,
            ) -> None:
                report(partition, state)
                end = wanted.end()
                for one in next_ones:
                    one.begin()
                    if end is not None and end - state.offset <= _READ_AHEAD:
                        one.begin_reading()

            work = partial(_rescored, log, opening, report_and_open, stop)
            state = while_log_is_away(work, stop, partition=opening.wanted.start.partition)
            if state is None:
                return
            yield state
    finally:
        gc.set_threshold(collected_at, *older)
        for opening in openings:
            opening.close()


def _rescored(log: Log, opening: "_Opening", report: Report, stop: threading.Event) -> PartitionState | None:
    """One try to judge a partition, until its end or the first failure."""
    opening.begin()
    # Meanwhile, or the first event would wait for the registry.
    log.codec.register(_WRITTEN)
    opened = opening.take()
    try:
        return _PartitionWork(opened, opening.fold, opening.wanted, report, stop).go()
    finally:
        opened.close()


@dataclass(frozen=True)
class _Opened:
    """A partition that is ready to be judged, from its newest snapshot on."""

    run: Run
    transactor: Transactor
    state: PartitionState
    reader: Reader

    def close(self) -> None:
        self.reader.close()
        self.transactor.close()


class _Opening:
    """Opens a partition in a thread."""

    def __init__(self, run: Run, log: Log, fold: Rescoring, wanted: PartitionRange) -> None:
        self._log, self.fold, self.wanted = log, fold, wanted
        self._run = msgspec.structs.replace(run, program=f"replay-{wanted.start.partition}")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="open")
        self._begun: Future[_Opened] | None = None
        self._may_read = threading.Event()

    def begin(self) -> None:
        """Opens it, if that has not begun."""
        if self._begun is None:
            self._begun = self._thread.submit(self._open)

    def begin_reading(self) -> None:
        """Goes on to its trajectories. Until then nothing of them is fetched, or two partitions would be in memory."""
        self._may_read.set()

    def take(self) -> _Opened:
        """What was opened since `begin`. Raises what opening raises."""
        assert self._begun is not None
        self.begin_reading()
        begun, self._begun = self._begun, None
        return begun.result()

    def close(self) -> None:
        """Closes what was opened and never taken."""
        self.begin_reading()
        self._thread.shutdown()
        if self._begun is not None and self._begun.exception() is None:
            self._begun.result().close()

    def _open(self) -> _Opened:
        partition = self.wanted.start.partition
        # The transactional id before the snapshot: from here on no older process can write what this state lacks.
        transactor = self._log.transactor(f"replay-{self._run.run_id}-{partition}")
        try:
            taken = snapshot_to_continue(self._log, self._run, STATE_VERSION)
            state = PartitionState(self.wanted.start.offset)
            if taken is not None:
                state = msgspec.msgpack.decode(taken.state, type=PartitionState)
            self._may_read.wait()
            start, runs = [_position(partition, state)], self.wanted.sources
            reader = self._log.reader([TOPIC], start=start, run_id=runs, partitions=[partition])
        except BaseException:
            transactor.close()
            raise
        return _Opened(self._run, transactor, state, reader)


class _PartitionWork:
    """One partition, from where it was opened until the end or the first failure.

    What was judged is committed while the next trajectories are judged: one commit at a time, each waited for before the
    next one begins."""

    def __init__(
        self, opened: _Opened, fold: Rescoring, wanted: PartitionRange, report: Report, stop: threading.Event
    ) -> None:
        self._opened, self._fold, self._wanted, self._report, self._stop = opened, fold, wanted, report, stop
        self._partition = wanted.start.partition
        self._state = opened.state
        self._uncommitted = 0
        self._reported_at = float("-inf")
        self._await_commit: Callable[[], None] | None = None

    def go(self) -> PartitionState | None:
        """The last state, when the end was reached; None when `stop` was set. Everything that was read is committed."""
        reader = self._opened.reader
        while not self._stop.is_set():
            deliveries = reader.poll(_POLL_EVENTS, _POLL_SECONDS)
            for delivery in deliveries:
                self._take(delivery)
            end = self._wanted.end()
            # Only after an empty poll: the broker is asked. The last offsets may hold markers of transactions.
            is_over = end is not None and (self._state.offset >= end or (not deliveries and reader.caught_up()))
            # While sources are followed, what was judged is written as soon as they pause.
            is_idle = is_over or (end is None and not deliveries)
            if self._uncommitted >= self._wanted.trajectories_per_commit or (is_idle and self._uncommitted):
                self._commit()
            if is_idle:
                self._wait_for_commit()
            if is_over or time.monotonic() >= self._reported_at + _REPORT_SECONDS:
                self._report(self._partition, self._state)
                self._reported_at = time.monotonic()
            if is_over:
                return self._state
        self._commit()
        self._wait_for_commit()
        return None

    def _take(self, delivery: Delivery) -> None:
        end = self._wanted.end()
        if end is not None and delivery.address.offset >= end:
            return
        self._state.offset = delivery.address.offset + 1
        self._uncommitted += 1
        if delivery.event is not None:
            self._opened.transactor.hold(self._fold.take(self._state, delivery.event, delivery.address))
        elif delivery.undecodable is not None:
            # A dead letter already: the live stage that scores has rejected it.
            self._state.counts.undecodable += 1

    def _commit(self) -> None:
        self._wait_for_commit()
        positions = [_position(self._partition, self._state)]
        taken = snapshot(self._opened.run, STATE_VERSION, positions, _encode(self._state), now_microseconds())
        self._opened.transactor.hold([taken])
        self._await_commit = self._opened.transactor.start_commit()
        self._uncommitted = 0

    def _wait_for_commit(self) -> None:
        waiting, self._await_commit = self._await_commit, None
        if waiting is not None:
            waiting()


def _position(partition: int, state: PartitionState) -> Position:
    return Position(topic=TOPIC, partition=partition, offset=state.offset)
