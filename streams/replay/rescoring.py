"""Judges the trajectories of other runs again: one partition of the log at a time, exactly once.

    trajectories of the sources ─► score ─► group ─► RewardAssigned, GroupCompleted + snapshot ─► one transaction

All members of a group are on one partition, so partitions are independent and processes share them out. The hops are
those of the live flow. What is written and how far was read are one transaction: a replay that is killed continues
where it was, and writes nothing twice.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from replayground.schemas.events import Address, Event, Position, Purpose, RewardAssigned, TrajectoryAssembled
from replayground.schemas.ids import now_microseconds
from replayground.schemas.job import Scorer
from replayground.schemas.run import Run
from replayground.streams.hops.rewards_to_groups import GroupRewards, GroupState
from replayground.streams.hops.trajectories_to_rewards import ScoreTrajectories
from replayground.streams.log.protocol import Delivery, Log, Reader
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
_POLL_EVENTS = 1000
_POLL_SECONDS = 0.2
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
        names = list(self._judges.names) or event.task.scorers
        return msgspec.structs.replace(
            event,
            meta=msgspec.structs.replace(event.meta, run_id=self._judges.run_id, purpose=purpose),
            task=msgspec.structs.replace(event.task, scorers=names, group_size=group_size),
        )

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
    trajectories_per_commit: int = 1000


def rescore_partition(
    run: Run, log: Log, fold: Rescoring, wanted: PartitionRange, report: Report, stop: threading.Event
) -> PartitionState | None:
    """Judges one partition. Returns the last state, or None when `stop` was set. Waits while the log is unavailable.
    Raises Fenced, LogBroken, and BadInput for a replay that another release began."""
    return while_log_is_away(
        lambda: _PartitionWork(run, log, fold, wanted, report, stop).go(), stop, partition=wanted.start.partition
    )


class _PartitionWork:
    """One partition, from the newest snapshot on, until the end or the first failure."""

    def __init__(
        self, run: Run, log: Log, fold: Rescoring, wanted: PartitionRange, report: Report, stop: threading.Event
    ) -> None:
        self._log, self._fold, self._wanted, self._report, self._stop = log, fold, wanted, report, stop
        self._partition = wanted.start.partition
        self._run = msgspec.structs.replace(run, program=f"replay-{self._partition}")
        # The transactional id before the snapshot: from here on no older process can write what this state lacks.
        self._transactor = log.transactor(f"replay-{run.run_id}-{self._partition}")
        taken = snapshot_to_continue(log, self._run, STATE_VERSION)
        self._state = PartitionState(wanted.start.offset)
        if taken is not None:
            self._state = msgspec.msgpack.decode(taken.state, type=PartitionState)
        self._events: list[Event] = []
        self._uncommitted = 0

    def go(self) -> PartitionState | None:
        try:
            start, runs = [self._position()], self._wanted.sources
            reader = self._log.reader([TOPIC], start=start, run_id=runs, partitions=[self._partition])
            try:
                return self._state if self._read(reader) else None
            finally:
                reader.close()
        finally:
            self._transactor.close()

    def _read(self, reader: Reader) -> bool:
        """True when the end was reached, False when `stop` was set. Everything that was read is committed."""
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
            self._report(self._partition, self._state)
            if is_over:
                return True
        self._commit()
        return False

    def _take(self, delivery: Delivery) -> None:
        end = self._wanted.end()
        if end is not None and delivery.address.offset >= end:
            return
        self._state.offset = delivery.address.offset + 1
        self._uncommitted += 1
        if delivery.event is not None:
            self._events += self._fold.take(self._state, delivery.event, delivery.address)
        elif delivery.undecodable is not None:
            # A dead letter already: the live stage that scores has rejected it.
            self._state.counts.undecodable += 1

    def _commit(self) -> None:
        taken = snapshot(self._run, STATE_VERSION, [self._position()], _encode(self._state), now_microseconds())
        self._transactor.commit([*self._events, taken], None)
        self._events = []
        self._uncommitted = 0

    def _position(self) -> Position:
        return Position(topic=TOPIC, partition=self._partition, offset=self._state.offset)
