"""pacing: the standing of every group, and how many training groups there may be at once.

Sampling is paced, so that few groups become too stale to train on (docs/learning.md). Accepted and running groups
together stay within a budget that grows with the versions trained. Groups that teach nothing, became stale or cannot be
completed are replaced by new ones.
"""

from collections import Counter
from typing import Literal

from msgspec import Struct

from replayground.producers.scheduling.ledger import Group, GroupOutcome, GroupRequest
from replayground.schemas.events import BatchCut
from replayground.schemas.run import JobSettings
from replayground.streams.rules.staleness import groups_allowed, is_admitted

GIVEN_UP_KEPT = 256
"""How many given-up groups are kept, the newest ones, in case an operator has the rejected message sent again and the
group is completed after all. The scheduler itself completes older ones, as refused."""

# What each standing means: standing_of and _judged below.
Standing = Literal[
    "unknown",
    "waiting",
    "closing",
    "running",
    "uncut",
    "given_up",
    "accepted",
    "stale",
    "dropped",
    "refused",
    "ended",
    "unasked",
]
JUDGED: frozenset[Standing] = frozenset(("uncut", "accepted", "stale", "dropped"))
OVER: frozenset[Standing] = frozenset(("accepted", "stale", "dropped", "refused", "ended", "unasked"))
"""Nothing more happens to such a group: it is counted and forgotten. Unasked = dropped or cancelled while it waited."""


class PacingState(Struct, frozen=True):
    over: dict[str, int]
    batches_cut: int


class Pacing:
    """Counts groups by standing. Pure."""

    def __init__(self, job: JobSettings) -> None:
        self._job = job
        self._batches_cut = 0
        self._standings: dict[str, Standing] = {}
        "standing of every group that is not over"
        self._open: Counter[tuple[str, Standing]] = Counter()
        "groups not over, by purpose and standing"
        self._over: Counter[str] = Counter()
        "groups that are over, by standing"

    # what happened

    def note_batch(self, event: BatchCut) -> None:
        # The maximum and not a count, so that a copy changes nothing.
        self._batches_cut = max(self._batches_cut, event.index + 1)

    def standing_of(self, group: Group, is_called_off: bool, is_caught_up: bool) -> Standing:
        """The standing that follows from the facts of a group."""
        ask = group.ask
        if ask is None:
            return "unknown"
        # Evaluations and demonstrations are over when all members have ended; training groups must be judged too.
        if ask.purpose != "train" and group.has_ended:
            return "ended"
        if group.is_asked and ask.purpose == "train" and group.judged is not None:
            return self._judged(group, group.judged)
        if group.is_asked:
            return "given_up" if self._is_given_up(group, ask) else "running"
        if group.has_ended:
            # Cancelled while it waited. Before everything is read, its requests may just not have been read yet.
            return "unasked" if is_caught_up else "unknown"
        return "closing" if is_called_off else "waiting"

    @staticmethod
    def _is_given_up(group: Group, ask: GroupRequest) -> bool:
        """Whether a message that the group needs was rejected, and every member has ended."""
        # As long as a member runs, the group uses its share of the budget. And a dead letter names no more than a key:
        # a forged one must not let another group run beside this one.
        return ask.purpose == "train" and group.refusal is not None and group.has_ended

    def _judged(self, group: Group, judged: GroupOutcome) -> Standing:
        """The standing of a group whose GroupCompleted was read."""
        if judged.is_refused:
            return "refused"
        if judged.is_dropped:
            return "dropped"
        if group.is_cut:
            return "accepted"
        # Found by the cutter's own rule instead of waiting for groups_stale: that comes with the next batch, which may
        # need the groups that replace the stale ones. A batch that is cut but not read yet is of later weights still,
        # so it cannot hold the group either.
        training_version = self._job.first_version + self._batches_cut
        is_stale = group.is_stale or not is_admitted(training_version, judged.oldest, self._job.staleness_max)
        return "stale" if is_stale else "uncut"

    def place(self, group_id: str, group: Group, standing: Standing) -> Standing:
        """Counts a group under its new standing; returns the one before."""
        before = self._standings.pop(group_id, "unknown")
        purpose = group.ask.purpose if group.ask is not None else ""
        self._open[purpose, before] -= before != "unknown"
        assert self._open[purpose, before] >= 0, "a group is counted under one purpose"
        if standing in OVER:
            self._over[standing] += 1
        elif standing != "unknown":
            self._standings[group_id] = standing
            self._open[purpose, standing] += 1
        return before

    def with_standing(self, standing: Standing) -> list[str]:
        """Ids of all groups with this standing; it must be one of a group that is not over."""
        return [group_id for group_id, found in self._standings.items() if found == standing]

    # how it stands

    @property
    def accepted(self) -> int:
        """Training groups that are in a batch, or wait to be cut into one."""
        return self._over["accepted"] + self._open["train", "uncut"]

    @property
    def running(self) -> int:
        """Training groups that are requested and not judged, also if all members have ended: they may yet teach."""
        return self._open["train", "running"]

    @property
    def stale(self) -> int:
        """Training groups with a result that no batch may take: too old, or not sampled by a versioned policy."""
        return self._over["stale"]

    @property
    def given_up(self) -> int:
        return self._over["refused"] + self._open["train", "given_up"]

    @property
    def asked(self) -> int:
        """All training groups that were ever requested."""
        return self.running + self.accepted + self.stale + self._over["dropped"] + self.given_up

    def budget(self, version: int) -> int:
        """Upper bound of accepted and running groups when `version` is the newest."""
        versions_trained = max(0, version - self._job.first_version)
        return groups_allowed(versions_trained, self._job.staleness_target, self._job.groups_per_batch)

    def has_room(self, version: int) -> bool:
        """Whether another group may be requested."""
        # A run without an end (steps = 0) never has enough groups; only the budget limits it.
        is_enough = self._job.steps > 0 and self.accepted >= self._job.steps * self._job.groups_per_batch
        return not is_enough and self.accepted + self.running < self.budget(version)

    def state(self) -> PacingState:
        # Open groups are counted again from the ledger when it is restored.
        return PacingState(
            over={name: count for name, count in sorted(self._over.items()) if count},
            batches_cut=self._batches_cut,
        )

    def restore(self, state: PacingState) -> None:
        self._over = Counter(state.over)
        self._batches_cut = state.batches_cut
