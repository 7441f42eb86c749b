"""ledger: a record of every task that is not over. The other folds read it and write their part of it.

While a planner catches up, events of different topics arrive in any order, so facts of a task may be read before the
task. They are kept until everything has been read (`settle`). Facts that then belong to no known task are copies that
belong to a task that is over, and are dropped; from then on facts of unknown tasks are dropped at once. Why this counts
every fact once: docs/decisions/0018.
"""

import hashlib
from collections.abc import Iterator

import msgspec
from msgspec import Struct, field

from replayground.schemas.events import Address, GroupCompleted, Purpose, Sampling, Task, TaskSubmitted
from replayground.schemas.ids import derived_id
from replayground.streams.rules.reward import pass_rate
from replayground.streams.rules.staleness import oldest_version

RECENT_TASKS = 256
"""How many tasks back, on its partition, a second copy of a TaskSubmitted is recognised after the task is over. The
feeder writes at most 500 tasks between two acknowledgements, about 125 to each of four partitions, so a copy that it
makes after a crash is not further away."""


REFUSED = "refused"
"dropped_because of a group that the scheduler itself completes, because a dead letter keeps it open for ever"


class GroupRequest(Struct, frozen=True, kw_only=True):
    """What every member of a group is requested with."""

    task_id: str
    group_id: str
    session_id: str | None
    purpose: Purpose
    priority: int
    submitted_at: int
    task: Task
    "without its world, if world_at says where that is"
    world_at: Address | None
    seeds: list[int]
    "of each member; computed at submission, because they depend on the world, which is not kept"
    sampling: Sampling
    required_version: int | None

    @property
    def order(self) -> tuple[int, str]:
        """Sorts tasks by submission, the same whichever partition is read first."""
        # The id breaks ties between tasks of the same microsecond.
        return self.submitted_at, self.task_id


class MemberRequest(Struct, frozen=True, array_like=True):
    """One request for a member. Times are event times in microseconds."""

    at: int
    deadline: int


class Member(Struct, omit_defaults=True):
    """One place of a group."""

    requests: dict[int, MemberRequest] = field(default_factory=dict)
    "by retry number"
    failed: dict[str, int] = field(default_factory=dict)
    "ids of requests that ended by infra_error, with the time of the first such end"
    refused: dict[str, int] = field(default_factory=dict)
    "requests that no worker could decode: ids of the dead letters, with their time"
    is_ended: bool = False

    @property
    def retry(self) -> int:
        """Retry number of the newest request; -1 = not requested yet."""
        return max(self.requests, default=-1)


class GroupOutcome(Struct, frozen=True, array_like=True):
    """The part of a GroupCompleted that planning depends on."""

    is_dropped: bool
    oldest: int | None
    "oldest weight version among the members that a batch would take; None = no batch takes the group"
    version: int | None
    "oldest weight version among its valid members"
    pass_rate: float
    "share of its valid members that passed"
    members: int
    "number of valid members"
    is_refused: bool = False
    "completed by the scheduler, as refused"

    @classmethod
    def of(cls, event: GroupCompleted) -> "GroupOutcome":
        valid = [member for member in event.members if member.valid]
        versions = [member.policy_version_oldest for member in valid if member.policy_version_oldest is not None]
        return cls(
            is_dropped=event.dropped_because is not None,
            oldest=oldest_version(event),
            version=min(versions, default=None),
            pass_rate=pass_rate(valid),
            members=len(valid),
            is_refused=event.dropped_because == REFUSED,
        )


class Refusal(Struct, frozen=True, array_like=True):
    """A stage rejected a message of the group, which cannot be completed unless an operator has that sent again."""

    at: int
    reason: str
    event_id: str = ""
    "of the dead letter"


class Group(Struct, omit_defaults=True):
    """All that is known of one task."""

    ask: GroupRequest | None = None
    "None while its TaskSubmitted was not read"
    members: dict[int, Member] = field(default_factory=dict)
    judged: GroupOutcome | None = None
    is_cut: bool = False
    "a batch holds it"
    is_stale: bool = False
    "a batch names it as stale"
    refusal: Refusal | None = None
    is_called_off: bool = False
    "this task was cancelled by its id; kept here, because Cancellations forgets old ones"

    @property
    def is_asked(self) -> bool:
        return any(member.requests for member in self.members.values())

    @property
    def members_ended(self) -> int:
        return sum(member.is_ended for member in self.members.values())

    @property
    def has_ended(self) -> bool:
        """Whether every member has ended."""
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
        "newest tasks by partition of topic tasks, as short hashes in the order of the partition"
        self.is_caught_up = False

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def __iter__(self) -> Iterator[tuple[str, Group]]:
        # A copy: callers forget groups while they iterate.
        return iter(list(self._groups.items()))

    def submit(self, event: TaskSubmitted, ask: GroupRequest, partition: int) -> bool:
        """Takes note of a task. False for a second copy of it."""
        # By partition: its order is the same for every reader, so live and restored ledgers forget the same tasks.
        recent = self._recent.setdefault(partition, {})
        name = hashlib.blake2b(ask.task_id.encode(), digest_size=8).digest()
        group = self._groups.get(ask.group_id)
        if name in recent or (group is not None and group.ask is not None):
            return False
        recent[name] = None
        # A dict keeps the order of insertion: the first key is the oldest.
        if len(recent) > RECENT_TASKS:
            del recent[next(iter(recent))]
        assert len(recent) <= RECENT_TASKS
        self._groups.setdefault(ask.group_id, Group()).ask = ask
        return True

    def find(self, group_id: str) -> Group | None:
        """The group that a fact belongs to. None when the task is over: then the fact is a copy."""
        if self.is_caught_up:
            return self._groups.get(group_id)
        # Its TaskSubmitted may still come: the topics are read side by side.
        return self._groups.setdefault(group_id, Group())

    def settle(self) -> bool:
        """Drops facts without a task. Call it when everything on the log has been read. True the first time."""
        is_first = not self.is_caught_up
        if is_first:
            self.is_caught_up = True
            # Every other fact follows from a task. If the task is not known by now, it was over before.
            self._groups = {name: group for name, group in self._groups.items() if group.ask is not None}
        return is_first

    def forget(self, group_id: str) -> None:
        del self._groups[group_id]

    def state(self) -> LedgerState:
        """The state, in an order that does not depend on that of reading. Call it after `settle`."""
        assert self.is_caught_up, "a state taken before the end of the log would be restored as complete"
        return LedgerState(
            groups=[(group_id, _sorted(group)) for group_id, group in sorted(self._groups.items())],
            recent={partition: list(names) for partition, names in sorted(self._recent.items())},
        )

    def restore(self, state: LedgerState) -> None:
        self._groups = dict(state.groups)
        self._recent = {partition: dict.fromkeys(names) for partition, names in state.recent.items()}
        # What came after the snapshot is read now, again in any order.
        self.is_caught_up = False


def _sorted(group: Group) -> Group:
    """The group in an order that does not depend on that of reading."""
    # Group.member makes an empty Member when it is only looked at: those are left out.
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
