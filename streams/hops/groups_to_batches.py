"""cut: groups that teach something become batches of a fixed number of groups, in total order.

A group with a member older than allowed is dropped, and the next batch says so. The whole state is read back from the
batches already cut: which groups they hold, and how far the groups topic was consumed.
"""

from msgspec import Struct

from schemas.events import Address, BatchCut, BatchMember, Event, GroupCompleted, GroupMember, Meta, Position
from schemas.ids import derived_id
from streams.hops.hop import Outcome
from streams.hops.rewards_to_groups import GROUPED_PURPOSES
from streams.rules.staleness import admitted

CODE_VERSION = "cut-1"


class Cutting(Struct):
    """What was cut so far, and what waits for the next batch."""

    index_next: int = 0
    waiting: list[GroupCompleted] = []
    seen: set[str] = set()
    groups_stale: list[str] = []
    groups_dropped: dict[str, int] = {}
    positions: dict[tuple[str, int], int] = {}


class CutGroups:
    """See streams.hops.hop.Hop. One state per run: every group of the run belongs to the same cutter."""

    name = "cut"
    reads = "groups"
    state_class = Cutting

    def __init__(
        self, run_id: str, groups_per_batch: int, staleness_max: int, first_version: int, batches_max: int | None = None
    ) -> None:
        self._run_id = run_id
        self._groups_per_batch = groups_per_batch
        self._staleness_max = staleness_max
        self._first_version = first_version
        self._batches_max = batches_max

    def key(self, event: Event) -> str | None:
        wanted = event.meta.run_id == self._run_id and event.meta.purpose in GROUPED_PURPOSES
        return self._run_id if wanted else None

    def restored(self, state: Cutting | None, batch: BatchCut) -> Cutting:
        """The state after a batch that is already on the log."""
        state = state or Cutting()
        return Cutting(
            index_next=batch.index + 1,
            seen=state.seen | set(batch.groups) | set(batch.groups_stale),
            positions={(position.topic, position.partition): position.offset for position in batch.positions},
        )

    def step(self, state: Cutting | None, event: Event, address: Address) -> Outcome:
        """Changes the state it is given: the set of groups seen grows with the run and is not copied at every group."""
        state = state or Cutting()
        if not isinstance(event, GroupCompleted) or event.meta.group_id is None:
            return Outcome(state, refused="batches are cut from groups")
        if self._batches_max is not None and state.index_next >= self._batches_max:
            return Outcome(state)
        state.positions[address.topic, address.partition] = address.offset + 1
        if event.meta.group_id not in state.seen:
            state.seen.add(event.meta.group_id)
            self._admit(state, event, event.meta.group_id)
        if len(state.waiting) < self._groups_per_batch:
            return Outcome(state)
        batch = self._batch(state, event)
        return Outcome(Cutting(index_next=state.index_next + 1, seen=state.seen, positions=state.positions), (batch,))

    def _admit(self, state: Cutting, group: GroupCompleted, group_id: str) -> None:
        if group.dropped_because is not None:
            state.groups_dropped[group.dropped_because] = state.groups_dropped.get(group.dropped_because, 0) + 1
            return
        version = self._first_version + state.index_next
        if all(admitted(version, m.policy_version_oldest, self._staleness_max) for m in _trained(group)):
            state.waiting.append(group)
        else:
            state.groups_stale.append(group_id)

    def _batch(self, state: Cutting, last: GroupCompleted) -> BatchCut:
        groups = sorted(state.waiting, key=lambda group: group.meta.group_id or "")
        members = [_batch_member(group, member) for group in groups for member in _trained(group)]
        trained = [member for group in groups for member in _trained(group)]
        return BatchCut(
            meta=self._meta(state.index_next, groups, last),
            index=state.index_next,
            base_version=self._first_version + state.index_next,
            members=members,
            groups=[group.meta.group_id or "" for group in groups],
            tokens_sampled=sum(member.tokens_sampled for member in trained),
            policy_floor=min(member.policy_version_oldest or 0 for member in trained),
            groups_stale=state.groups_stale,
            groups_dropped=state.groups_dropped,
            positions=[
                Position(topic=t, partition=p, offset=offset) for (t, p), offset in sorted(state.positions.items())
            ],
        )

    def _meta(self, index: int, groups: list[GroupCompleted], last: GroupCompleted) -> Meta:
        return Meta(
            id=derived_id("BatchCut", self._run_id, index, CODE_VERSION, *(group.meta.id for group in groups)),
            run_id=self._run_id,
            session_id=last.meta.session_id,
            category="batch",
            topic="batches",
            sender="cut",
            receiver="trainer",
            timestamp=max(group.meta.timestamp for group in groups),
            causation_id=last.meta.id,
            purpose=last.meta.purpose,
        )


def _trained(group: GroupCompleted) -> list[GroupMember]:
    """Members that a batch takes: judged, and with something the policy said."""
    return [member for member in group.members if member.valid and member.tokens_sampled > 0]


def _batch_member(group: GroupCompleted, member: GroupMember) -> BatchMember:
    return BatchMember(
        trajectory_id=member.trajectory_id,
        group_id=group.meta.group_id or "",
        trajectory=member.trajectory,
        reward=member.reward,
        advantage=member.advantage,
    )
