"""cut: puts a fixed number of groups into each batch, in total order.

A group without a learning signal is passed over, and a group with a member older than allowed is stale; the next batch
names both. The state after a batch can be read back from the batches: they say which groups they hold or passed over,
and how far the groups topic was consumed. A group is remembered until it is too old to be admitted; from then on the
staleness rule refuses a repeat. Of the groups that were not taken since the last batch, the newest of each partition
are remembered and the others only counted (decision 0017).

Partitions are read in any order. A batch and the state depend only on which groups were read, and the positions say
that. So batches can be cut again from the groups on the log, byte for byte (`cut_again`, decision 0016).
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from copy import copy

from msgspec import Struct

from replayground.schemas.events import (
    Address,
    BatchCut,
    BatchMember,
    Event,
    GroupCompleted,
    GroupMember,
    Meta,
    Position,
)
from replayground.schemas.ids import derived_id
from replayground.streams.hops.hop import Outcome
from replayground.streams.hops.rewards_to_groups import GROUPED_PURPOSES
from replayground.streams.rules.staleness import is_admitted, oldest_version, trained_members

# Part of the id of a batch: change it when the same groups would give another batch.
CODE_VERSION = "cut-3"
STATE_VERSION = "cutting-2"
"of CutState: a snapshot of another version is ignored"
NOT_TAKEN_REMEMBERED = 256
"""How many groups that were not taken are remembered of each partition until the next batch, which names them. A repeat
of an older one is counted again; it is in no batch, so nothing is trained on twice. The limit is per partition, since a
group has one partition, with a fixed order: what is forgotten does not depend on the order of reading. The stage before
(rewards_to_groups) remembers as many, and repeats only what it completed in the seconds between two commits."""


class NotTaken(Struct, frozen=True, array_like=True):
    """A group that the next batch names without holding it."""

    group_id: str
    is_stale: bool
    "false: it has no learning signal (dropped, or nothing was sampled)"


class CutState(Struct):
    """What was cut so far, and what waits for the next batch. Independent of the order in which partitions are read."""

    index_next: int = 0
    waiting: list[GroupCompleted] = []
    "sorted by group id"
    seen: dict[str, int | None] = {}
    "groups, with the policy_ceiling of the batch that names them; None before that, or when the batch has none"
    not_taken: dict[str, list[NotTaken]] = {}
    "the newest ones since the last batch, by topic/partition, in offset order"
    stale: int = 0
    "number of stale groups since the last batch, with those that are no longer remembered"
    groups_dropped: dict[str, int] = {}
    ceiling: int | None = None
    "policy_ceiling of the next batch so far"
    positions: dict[str, int] = {}
    "topic/partition and the next offset"
    floor: int | None = None
    "lowest ceiling in `seen`: while a group of it could be admitted, nothing can be forgotten"


class CutGroups:
    """See streams.hops.hop.Hop. One state per run: every group of the run belongs to the same cutter."""

    name = "cut"
    reads = "groups"
    state_class = CutState
    keys_remembered = 1

    def __init__(
        self,
        run_id: str,
        groups_per_batch: int,
        staleness_max: int,
        first_version: int,
        batches_max: int | None = None,
        not_taken_remembered: int = NOT_TAKEN_REMEMBERED,
    ) -> None:
        self._run_id = run_id
        self._groups_per_batch = groups_per_batch
        self._staleness_max = staleness_max
        self._first_version = first_version
        self._batches_max = batches_max
        self._not_taken_remembered = not_taken_remembered

    def is_closed(self, state: CutState) -> bool:
        # A run has one state, which is needed until its end.
        return False

    def key(self, event: Event) -> str | None:
        wanted = event.meta.run_id == self._run_id and event.meta.purpose in GROUPED_PURPOSES
        return self._run_id if wanted else None

    def apply_batch(self, state: CutState | None, batch: BatchCut) -> CutState:
        """The state after a batch that is already on the log. Changes the given state."""
        state = state or CutState()
        # The state is from before the batch and may remember groups that the cutter had forgotten by then. What the
        # batch names is what counts.
        for group_id in (*map(_group_id, state.waiting), *_names(state.not_taken)):
            del state.seen[group_id]
        return self._next_state(state, batch)

    def positions(self, state: CutState) -> list[Position]:
        """Up to where the groups topic is folded into the state."""
        return [_position(place, offset) for place, offset in sorted(state.positions.items())]

    def step(self, state: CutState | None, event: Event, address: Address) -> Outcome:
        """Changes the collections of the given state, which the caller must not use again."""
        # A shallow copy: copying the collections for every group would be too slow.
        state = CutState() if state is None else copy(state)
        if not isinstance(event, GroupCompleted) or event.meta.group_id is None:
            return Outcome(state, refused="not a GroupCompleted with a group_id")
        # The run has all its batches: groups that arrive later are read and ignored.
        if self._batches_max is not None and state.index_next >= self._batches_max:
            return Outcome(state)
        self._take(state, event, event.meta.group_id, address)
        assert len(state.waiting) <= self._groups_per_batch, "a batch is cut as soon as enough groups wait"
        if len(state.waiting) < self._groups_per_batch:
            return Outcome(state)
        batch = self._batch(state)
        return Outcome(self._next_state(state, batch), (batch,))

    def cut_again(
        self, groups: Iterable[tuple[Address, GroupCompleted]], batches: Iterable[BatchCut]
    ) -> Iterator[BatchCut]:
        """The batches that follow from the groups of the run. `groups` are in the order of each partition. Of the
        `batches` on the log only the positions are used: they say which groups each was cut from."""
        waiting: dict[tuple[str, int], deque[tuple[Address, GroupCompleted]]] = {}
        for address, group in groups:
            waiting.setdefault((address.topic, address.partition), deque()).append((address, group))
        state = CutState()
        for batch in batches:
            for position in batch.positions:
                window = waiting.get((position.topic, position.partition), deque())
                while window and window[0][0].offset < position.offset:
                    address, group = window.popleft()
                    self._take(state, group, group.meta.group_id or "", address)
            again = self._batch(state)
            yield again
            state = self._next_state(state, again)

    def _take(self, state: CutState, group: GroupCompleted, group_id: str, address: Address) -> None:
        place = f"{address.topic}/{address.partition}"
        if address.offset < state.positions.get(place, 0):
            return  # a repeat
        state.positions[place] = address.offset + 1
        # The group hop may write a group again under a new offset: it counts once.
        if group_id not in state.seen:
            state.seen[group_id] = None
            self._admit(state, group, group_id, place)

    def _next_state(self, state: CutState, batch: BatchCut) -> CutState:
        """The state once this batch is on the log: groups it names are seen; those that are too old are forgotten."""
        assert batch.index == state.index_next, "batches are numbered without a gap"
        ceiling, seen, floor = batch.policy_ceiling, state.seen, state.floor
        for group_id in (*batch.groups, *batch.groups_stale, *batch.groups_passed):
            seen[group_id] = ceiling
        if ceiling is not None:
            floor = ceiling if floor is None else min(floor, ceiling)
        # The scan of all groups is needed only when the oldest of them can be forgotten.
        if floor is not None and not self._is_admitted(batch.index + 1, floor):
            seen = {name: of for name, of in seen.items() if of is None or self._is_admitted(batch.index + 1, of)}
            floor = min((of for of in seen.values() if of is not None), default=None)
        positions = {f"{position.topic}/{position.partition}": position.offset for position in batch.positions}
        return CutState(index_next=batch.index + 1, seen=seen, positions=positions, floor=floor)

    def _is_admitted(self, index: int, version: int | None) -> bool:
        return is_admitted(self._first_version + index, version, self._staleness_max)

    def _admit(self, state: CutState, group: GroupCompleted, group_id: str, place: str) -> None:
        oldest = oldest_version(group)
        # Dropped groups count too: the ceiling decides when each group that the batch names can be forgotten.
        if oldest is not None:
            state.ceiling = oldest if state.ceiling is None else max(state.ceiling, oldest)
        dropped = group.dropped_because or (None if trained_members(group) else "nothing_sampled")
        if dropped is None and self._is_admitted(state.index_next, oldest):
            # Sorted, so that the batch does not depend on the order in which partitions were read.
            insort(state.waiting, group, key=_group_id)
            return
        if dropped is None:
            state.stale += 1
        else:
            state.groups_dropped[dropped] = state.groups_dropped.get(dropped, 0) + 1
        self._remember(state, place, NotTaken(group_id, is_stale=dropped is None))

    def _remember(self, state: CutState, place: str, group: NotTaken) -> None:
        newest = state.not_taken.setdefault(place, [])
        newest.append(group)
        # Forgotten, not uncounted: groups_dropped and stale keep their numbers.
        if len(newest) > self._not_taken_remembered:
            del state.seen[newest.pop(0).group_id]

    def _batch(self, state: CutState) -> BatchCut:
        """The batch of all groups that wait. All lists are sorted: equal groups give equal bytes."""
        groups = state.waiting
        not_taken = [group for newest in state.not_taken.values() for group in newest]
        stale = sorted(group.group_id for group in not_taken if group.is_stale)
        members = [_batch_member(group, member) for group in groups for member in trained_members(group)]
        trained = [member for group in groups for member in trained_members(group)]
        return BatchCut(
            meta=self._meta(state.index_next, groups),
            index=state.index_next,
            base_version=self._first_version + state.index_next,
            members=members,
            groups=[_group_id(group) for group in groups],
            tokens_sampled=sum(member.tokens_sampled for member in trained),
            policy_floor=min(member.policy_version_oldest or 0 for member in trained),
            groups_stale=stale,
            groups_stale_unnamed=state.stale - len(stale),
            groups_dropped=dict(sorted(state.groups_dropped.items())),
            groups_passed=sorted(group.group_id for group in not_taken if not group.is_stale),
            policy_ceiling=state.ceiling,
            positions=self.positions(state),
            scorer_sets=sorted({group.scorer_set for group in groups}),
        )

    def _meta(self, index: int, groups: list[GroupCompleted]) -> Meta:
        # Of the newest group by event time, not of the last one read: replay must give the same bytes.
        newest = max(groups, key=lambda group: (group.meta.timestamp, group.meta.id))
        return Meta(
            id=derived_id("BatchCut", self._run_id, index, CODE_VERSION, *(group.meta.id for group in groups)),
            run_id=self._run_id,
            session_id=newest.meta.session_id,
            category="batch",
            topic="batches",
            sender="cut",
            receiver="trainer",
            timestamp=newest.meta.timestamp,
            causation_id=newest.meta.id,
            purpose=newest.meta.purpose,
        )


def _names(not_taken: dict[str, list[NotTaken]]) -> Iterator[str]:
    return (group.group_id for newest in not_taken.values() for group in newest)


def _group_id(group: GroupCompleted) -> str:
    return group.meta.group_id or ""


def _position(place: str, offset: int) -> Position:
    topic, _, partition = place.rpartition("/")
    return Position(topic=topic, partition=int(partition), offset=offset)


def _batch_member(group: GroupCompleted, member: GroupMember) -> BatchMember:
    return BatchMember(
        trajectory_id=member.trajectory_id,
        group_id=group.meta.group_id or "",
        trajectory=member.trajectory,
        reward=member.reward,
        advantage=member.advantage,
        passed=member.passed,
    )
