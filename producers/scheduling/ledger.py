"""ledger: what the log says of every task that is not over. The other folds read it and write their part of it.

Events of different topics arrive in any order while a planner catches up, so facts of a task may be read before the task.
They are kept until everything has been read (`settle`); whatever then belongs to no known task is about one that was over
before: a repeat, which is dropped. From then on facts of unknown tasks are dropped at once. Why this counts every fact
once: docs/decisions/0018.
"""

import hashlib
from collections.abc import Iterator

import msgspec
from msgspec import Struct, field

from schemas.events import Address, GroupCompleted, Purpose, Sampling, Task, TaskSubmitted
from schemas.ids import derived_id
from streams.rules.staleness import oldest_version

RECENT_TASKS = 256
"""How many tasks back, on its partition, a second copy of a TaskSubmitted is recognised although the task is over. The feeder
writes at most 500 tasks between two acknowledgements, about 125 to each of four partitions, so a copy that it makes after a
crash is never further away."""


REFUSED = "refused"
"why the scheduler completes a group that a refusal left open for ever"


class GroupRequest(Struct, frozen=True, kw_only=True):
    """What every member of a group is requested with."""

    task_id: str
    group_id: str
    session_id: str | None
    purpose: Purpose
    priority: int
    submitted_at: int
    task: Task
    "without its world, where that stands at world_at"
    world_at: Address | None
    seeds: list[int]
    "of each member; they follow from the world, which is not kept"
    sampling: Sampling
    required_version: int | None

    @property
    def order(self) -> tuple[int, str]:
        """The order in which tasks were submitted, the same whatever partition is read first."""
        return self.submitted_at, self.task_id


class MemberRequest(Struct, frozen=True, array_like=True):
    """One request for a member."""

    at: int
    deadline: int


class Member(Struct, omit_defaults=True):
    """One place of a group."""

    requests: dict[int, MemberRequest] = field(default_factory=dict)
    "by retry"
    failed: dict[str, int] = field(default_factory=dict)
    "ids of requests that ended by infra_error, and when"
    refused: dict[str, int] = field(default_factory=dict)
    "requests that no worker could read: ids of the rejects, and when"
    is_ended: bool = False

    @property
    def retry(self) -> int:
        """Of the newest request; -1 = not asked for yet."""
        return max(self.requests, default=-1)


class GroupOutcome(Struct, frozen=True, array_like=True):
    """What GroupCompleted says, as far as planning depends on it."""

    is_dropped: bool
    oldest: int | None
    "oldest weights behind what a batch would take; None = no batch takes it"
    version: int | None
    "oldest weights behind its valid members"
    reward_mean: float
    members: int
    "valid ones"
    is_refused: bool = False
    "the scheduler gave it up for good"

    @classmethod
    def of(cls, event: GroupCompleted) -> "GroupOutcome":
        valid = [member for member in event.members if member.valid]
        versions = [member.policy_version_oldest for member in valid if member.policy_version_oldest is not None]
        return cls(
            is_dropped=event.dropped_because is not None,
            oldest=oldest_version(event),
            version=min(versions, default=None),
            reward_mean=float(event.reward_mean),
            members=len(valid),
            is_refused=event.dropped_because == REFUSED,
        )


class Refusal(Struct, frozen=True, array_like=True):
    """A stage refused what its group needed: it can never be completed, unless an operator has the message sent again."""

    at: int
    reason: str
    event_id: str = ""
    "of the dead letter"


class Group(Struct, omit_defaults=True):
    """All that is known of one task."""

    ask: GroupRequest | None = None
    "None while only facts that follow from the task were read"
    members: dict[int, Member] = field(default_factory=dict)
    judged: GroupOutcome | None = None
    is_cut: bool = False
    "a batch holds it"
    is_stale: bool = False
    "the cutter dropped it as too old"
    refusal: Refusal | None = None
    is_called_off: bool = False
    "this very task was cancelled, however many others were since"

    @property
    def is_asked(self) -> bool:
        return any(member.requests for member in self.members.values())

    @property
    def members_ended(self) -> int:
        return sum(member.is_ended for member in self.members.values())

    @property
    def has_ended(self) -> bool:
        """Whether every member has, judged or not."""
        return self.ask is not None and self.members_ended >= self.ask.task.group_size

    def member(self, index: int) -> Member:
        return self.members.setdefault(index, Member())


class LedgerState(Struct, frozen=True):
    groups: list[tuple[str, Group]]
    recent: dict[int, list[bytes]]


class Ledger:
    """Groups by id. Pure."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._recent: dict[int, dict[bytes, None]] = {}
        "by partition of the topic of tasks, in its order"
        self.is_caught_up = False

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def __iter__(self) -> Iterator[tuple[str, Group]]:
        return iter(list(self._groups.items()))

    def submit(self, event: TaskSubmitted, ask: GroupRequest, partition: int) -> bool:
        """Takes note of a task; False for a second copy of it."""
        recent = self._recent.setdefault(partition, {})
        name = hashlib.blake2b(ask.task_id.encode(), digest_size=8).digest()
        group = self._groups.get(ask.group_id)
        if name in recent or (group is not None and group.ask is not None):
            return False
        recent[name] = None
        if len(recent) > RECENT_TASKS:
            del recent[next(iter(recent))]
        assert len(recent) <= RECENT_TASKS
        self._groups.setdefault(ask.group_id, Group()).ask = ask
        return True

    def find(self, group_id: str) -> Group | None:
        """The group that a fact is about. None when it is over, so that the fact is a repeat."""
        if self.is_caught_up:
            return self._groups.get(group_id)
        return self._groups.setdefault(group_id, Group())

    def settle(self) -> bool:
        """Everything that was on the log has been read: facts of tasks that were over before are let go. True the first time."""
        is_first = not self.is_caught_up
        if is_first:
            self.is_caught_up = True
            self._groups = {name: group for name, group in self._groups.items() if group.ask is not None}
        return is_first

    def forget(self, group_id: str) -> None:
        del self._groups[group_id]

    def state(self) -> LedgerState:
        """Call it after `settle`."""
        assert self.is_caught_up, "a state taken before the end of the log would be restored as complete"
        return LedgerState(
            groups=[(group_id, _sorted(group)) for group_id, group in sorted(self._groups.items())],
            recent={partition: list(names) for partition, names in sorted(self._recent.items())},
        )

    def restore(self, state: LedgerState) -> None:
        self._groups = dict(state.groups)
        self._recent = {partition: dict.fromkeys(names) for partition, names in state.recent.items()}
        self.is_caught_up = False


def _sorted(group: Group) -> Group:
    """The same in whatever order its facts were read. A member that was only looked at says nothing."""
    members = {
        index: Member(
            requests=dict(sorted(member.requests.items())),
            failed=dict(sorted(member.failed.items())),
            refused=dict(sorted(member.refused.items())),
            is_ended=member.is_ended,
        )
        for index, member in sorted(group.members.items())
        if member != Member()
    }
    return msgspec.structs.replace(group, members=members)


def group_id_of(task_id: str) -> str:
    return derived_id("group", task_id)
