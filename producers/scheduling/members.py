"""members: which members of open groups were requested, have ended or failed, and which to request again or give up.

What is known of a member is in the ledger. Only the times of due retries are kept here: they start anew at a restart.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from replayground.producers.config import SchedulerSettings
from replayground.producers.scheduling.ledger import Group, GroupRequest, Ledger, Member, MemberRequest
from replayground.producers.scheduling.newest import Newest
from replayground.schemas.events import RETRY_MAX, AttemptEnded, EventRejected, RolloutRequested
from replayground.schemas.ids import derived_id

SECONDS_SAMPLED = 256
"""How many of the newest seconds with a success are remembered, to recognise an outage. They are compared with the last
two failures of a member, which lie minutes back at most."""


def request_id(task_id: str, index: int, retry: int) -> str:
    return derived_id("RolloutRequested", task_id, index, retry)


def trajectory_id(task_id: str, index: int) -> str:
    return derived_id("trajectory", task_id, index)


@dataclass(frozen=True, slots=True)
class MemberAction:
    """Request a member with this retry number, or, with a reason, give it up."""

    ask: GroupRequest
    index: int
    retry: int
    given_up_because: str | None = None


class Members:
    """Pure: time is an argument."""

    def __init__(self, ledger: Ledger, settings: SchedulerSettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self.seconds_sampled: Newest[int] = Newest(SECONDS_SAMPLED)
        "the newest seconds in which a sampled rollout ended other than by infra_error"
        self._open: dict[str, int] = {}
        "members not ended, by open group"
        self._open_by_purpose: Counter[str] = Counter()
        self._unsettled: set[str] = set()
        "groups to look at: a member may be missing or may have failed"
        # Two heaps by due time: retries to make, and requests whose end is overdue.
        self._repairs: list[tuple[int, str, int]] = []
        self._repairs_due: set[tuple[str, int]] = set()
        self._overdue: list[tuple[int, str, int, int]] = []
        self._closed: set[tuple[str, int]] = set()
        "members that we closed, whose end has not come back from the log yet"
        self._refused: dict[str, dict[str, int]] = {}
        "requests that no worker could decode, by trajectory, until assign_refused finds their group"

    # what happened

    def note_request(self, group_id: str, group: Group, event: RolloutRequested) -> None:
        member = group.member(event.index)
        asked = MemberRequest(event.meta.timestamp, event.deadline)
        known = member.requests.get(event.retry)
        # A copy of a request with another time: the later one counts, in whatever order they are read.
        if known is None or (known.deadline, known.at) < (asked.deadline, asked.at):
            member.requests[event.retry] = asked
            heapq.heappush(self._overdue, (self._due(asked), group_id, event.index, event.retry))
        self._unsettled.add(group_id)

    def note_end(self, group_id: str, group: Group, event: AttemptEnded) -> None:
        member = group.member(event.index)
        if event.ended_by == "infra_error":
            request, at = event.meta.correlation_id or "", event.meta.timestamp
            # The earliest of several ends, so that the order of reading does not matter.
            member.failed[request] = min(at, member.failed.get(request, at))
            self._unsettled.add(group_id)
        else:
            member.is_ended = True

    def note_sampled(self, event: AttemptEnded) -> None:
        # Only ends with a weight version prove that a server works: demonstrations need none.
        if event.policy_version_oldest is not None and event.ended_by != "infra_error":
            self.seconds_sampled.add(event.meta.timestamp // 1_000_000)

    def note_refused(self, trajectory: str, event: EventRejected) -> None:
        """A request for this trajectory is in the dead letters."""
        # A dead letter has the key of the message only, so its group is looked up later (assign_refused).
        refused = self._refused.setdefault(trajectory, {})
        refused[event.meta.id] = min(event.meta.timestamp, refused.get(event.meta.id, event.meta.timestamp))

    def restore(self, group_id: str, group: Group) -> None:
        """Schedules a look at a group from a snapshot, as if its facts had just been read."""
        self._unsettled.add(group_id)
        for index, member in group.members.items():
            for retry, asked in member.requests.items():
                heapq.heappush(self._overdue, (self._due(asked), group_id, index, retry))

    # how many are under way

    def count(self, group_id: str, purpose: str, members: int) -> None:
        """Sets how many members of the group are requested and have not ended."""
        assert members >= 0
        self._open_by_purpose[purpose] += members - self._open.pop(group_id, 0)
        assert self._open_by_purpose[purpose] >= 0, "a group is counted under one purpose"
        if members:
            self._open[group_id] = members

    def running(self, purpose: str) -> int:
        return self._open_by_purpose[purpose]

    @property
    def running_of_all(self) -> int:
        return self._open_by_purpose.total()

    # what follows

    def next(self, now: int, can_be_served: Callable[[GroupRequest], bool]) -> Iterator[MemberAction]:
        """Members to request: those that a crash left out, and those that failed and have waited long enough. Of the
        latter some are to be given up."""
        self._find_overdue(now)
        # Taken out first: the requests that the caller makes of these actions add groups again.
        unsettled, self._unsettled = self._unsettled, set()
        # Sorted, so that decisions do not depend on the hash order of a set.
        for group_id in sorted(unsettled):
            group = self._ledger.find(group_id)
            if group is not None and group.ask is not None and group.is_asked:
                yield from self._settle(group_id, group.ask, group, now)
        yield from self._repair(now, can_be_served)

    def close(self, group_id: str, index: int) -> bool:
        """Marks a member as closed; the caller then writes its end. False when it has ended or is closed already."""
        group = self._ledger.find(group_id)
        if group is None or group.member(index).is_ended or (group_id, index) in self._closed:
            return False
        self._closed.add((group_id, index))
        return True

    def forget(self, group_id: str, group: Group) -> None:
        assert group.ask is not None
        self.count(group_id, group.ask.purpose, 0)
        self._unsettled.discard(group_id)
        self._closed.difference_update([(group_id, index) for index in group.members])
        self._repairs_due.difference_update([(group_id, index) for index in group.members])

    def assign_refused(self) -> None:
        """Finds the members of requests that no worker could decode. Call it when everything has been read."""
        # Almost always: the search below goes through every trajectory id of every open task.
        if not self._refused:
            return
        for group_id, group in self._ledger:
            # Also groups that were not requested: a scheduler that reads request and dead letter at once keeps both,
            # and its state must be the same.
            if group.ask is not None:
                for index in range(group.ask.task.group_size):
                    refused = self._refused.get(trajectory_id(group.ask.task_id, index))
                    if refused:
                        group.member(index).refused.update(refused)
                        self._unsettled.add(group_id)
        # What is left belongs to no open task: it is dropped.
        self._refused = {}

    def _find_overdue(self, now: int) -> None:
        """Marks groups with a request whose end was not seen in time: its worker died and no other took it over."""
        while self._overdue and self._overdue[0][0] <= now:
            _, group_id, index, retry = heapq.heappop(self._overdue)
            group = self._ledger.find(group_id)
            # Entries are not removed from the heap when a request ends or is retried: those are skipped here.
            if group is not None and group.member(index).retry == retry and not group.member(index).is_ended:
                self._unsettled.add(group_id)

    def _settle(self, group_id: str, ask: GroupRequest, group: Group, now: int) -> Iterator[MemberAction]:
        for index in range(ask.task.group_size):
            member, place = group.member(index), (group_id, index)
            # The scheduler died between two requests of a group: the group must be requested in full.
            if member.retry < 0 and not member.is_ended and place not in self._closed:
                yield MemberAction(ask, index, 0)
            elif self._has_failed(ask, index, member, now) and place not in self._repairs_due:
                self._repairs_due.add(place)
                # The exponent is capped: during an outage there are many more retries than retries_max.
                wait_seconds = self._settings.retry_seconds * 2 ** min(member.retry, self._settings.retries_max)
                heapq.heappush(self._repairs, (now + int(wait_seconds * 1e6), group_id, index))

    def _repair(self, now: int, can_be_served: Callable[[GroupRequest], bool]) -> Iterator[MemberAction]:
        while self._repairs and self._repairs[0][0] <= now:
            _, group_id, index = heapq.heappop(self._repairs)
            group = self._ledger.find(group_id)
            if group is None or group.ask is None:
                continue
            member = group.member(index)
            # A late end may have come while the retry waited.
            if not self._has_failed(group.ask, index, member, now):
                self._repairs_due.discard((group_id, index))
            elif not can_be_served(group.ask):
                # Nobody serves its version now. It stays due and is looked at again in a second.
                heapq.heappush(self._repairs, (now + 1_000_000, group_id, index))
            else:
                self._repairs_due.discard((group_id, index))
                yield self._next_action(group.ask, index, member, now)

    def _next_action(self, ask: GroupRequest, index: int, member: Member, now: int) -> MemberAction:
        if not self._is_hopeless(ask, index, member, now):
            return MemberAction(ask, index, member.retry + 1)
        reason = f"given up after {member.retry + 1} requests that all failed"
        return MemberAction(ask, index, member.retry, reason)

    def _has_failed(self, ask: GroupRequest, index: int, member: Member, now: int) -> bool:
        if member.is_ended or member.retry < 0 or (ask.group_id, index) in self._closed:
            return False
        return self._failed_at(ask, index, member, member.retry, now) is not None

    def _failed_at(self, ask: GroupRequest, index: int, member: Member, retry: int, now: int) -> int | None:
        """When a request failed: by infra_error, in the dead letters, or because nobody ended it in time."""
        failed_at = member.failed.get(request_id(ask.task_id, index, retry))
        if failed_at is not None:
            return failed_at
        refused = [at for at in member.refused.values() if _newest_before(member, at) == retry]
        if refused:
            return min(refused)
        # No end at all. If a later request exists, this one was given up at the latest when that was made.
        due = self._due(member.requests[retry])
        if retry + 1 in member.requests:
            return min(due, member.requests[retry + 1].at)
        return due if due <= now else None

    def _is_hopeless(self, ask: GroupRequest, index: int, member: Member, now: int) -> bool:
        """Whether to give a member up: enough of its requests failed, and other rollouts succeeded between its last two
        failures, so the fault is its own (decision 0012)."""
        if member.retry >= RETRY_MAX:
            # The schema refuses higher numbers: no worker could decode the request.
            return True
        if member.retry < self._settings.retries_max:
            return False
        # While nobody succeeds, the servers are away. A member that is given up counts as not solved, so giving it up
        # then would count the outage against the agent.
        times = (self._failed_at(ask, index, member, retry, now) for retry in member.requests)
        seconds = sorted(at // 1_000_000 for at in times if at is not None)
        first, before, last = seconds[0], seconds[-2:][0], seconds[-1]
        is_outage = not any(before < second < last for second in self.seconds_sampled)
        # Demonstrations need no server, so an outage does not excuse them.
        return not is_outage or last - first > self._settings.outage_seconds_max or ask.purpose == "demonstrate"

    def _due(self, asked: MemberRequest) -> int:
        return asked.deadline + int(self._settings.overdue_seconds * 1e6)


def _newest_before(member: Member, at: int) -> int:
    """Retry number of the newest request made by then. A dead letter does not say which request it was."""
    return max((retry for retry, asked in member.requests.items() if asked.at <= at), default=0)
