"""pacing: where every group stands, and how many groups of training there may be at once.

Pace instead of discarding (docs/learning.md): accepted and running groups together stay within a budget that grows with the
versions trained; groups that teach nothing, became stale or cannot be completed are replaced by new ones.
"""

from collections import Counter
from typing import Literal

from msgspec import Struct

from producers.scheduling.ledger import Group, GroupOutcome, GroupRequest
from schemas.events import BatchCut
from schemas.run import JobSettings
from streams.rules.staleness import groups_allowed, is_admitted

GIVEN_UP_KEPT = 256
"""How many groups that a refusal gave up are kept, the newest ones, in case an operator has the refused message sent again and
the group is completed after all. The scheduler completes older ones itself, as refused."""

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
"""Nothing more can happen to such a group: it is counted and forgotten. Unasked: let go, or called off, while it waited."""


class PacingState(Struct, frozen=True):
    over: dict[str, int]
    batches_cut: int


class Pacing:
    """Counts groups by standing. Pure."""

    def __init__(self, job: JobSettings) -> None:
        self._job = job
        self._batches_cut = 0
        self._standings: dict[str, Standing] = {}
        "of every group that is not over"
        self._open: Counter[tuple[str, Standing]] = Counter()
        "groups not over, by purpose and standing"
        self._over: Counter[str] = Counter()
        "groups that are over, by standing"

    # what happened

    def note_batch(self, event: BatchCut) -> None:
        self._batches_cut = max(self._batches_cut, event.index + 1)

    def standing_of(self, group: Group, is_called_off: bool, is_caught_up: bool) -> Standing:
        """Where the facts put a group. Before everything has been read, nobody knows that a group was never asked for."""
        ask = group.ask
        if ask is None:
            return "unknown"
        if ask.purpose != "train" and group.has_ended:
            return "ended"
        if group.is_asked and ask.purpose == "train" and group.judged is not None:
            return self._judged(group, group.judged)
        if group.is_asked:
            return "given_up" if self._is_given_up(group, ask) else "running"
        if group.has_ended:
            return "unasked" if is_caught_up else "unknown"  # it was called off while it waited
        return "closing" if is_called_off else "waiting"

    @staticmethod
    def _is_given_up(group: Group, ask: GroupRequest) -> bool:
        """A message that its group needed was refused, and every member has ended. As long as one has not, the group uses its
        share of the budget whatever becomes of it; and a refused message says no more than a key, which may be anybody's."""
        return ask.purpose == "train" and group.refusal is not None and group.has_ended

    def _judged(self, group: Group, judged: GroupOutcome) -> Standing:
        """A group that no batch to come can take is stale. The cutter tells of it too, but with its next batch, and that it
        may not be able to cut without the groups that are asked for instead. A batch that is cut already and not read yet
        holds none of them, since it is of later weights still."""
        if judged.is_refused:
            return "refused"
        if judged.is_dropped:
            return "dropped"
        if group.is_cut:
            return "accepted"
        training_version = self._job.first_version + self._batches_cut
        is_stale = group.is_stale or not is_admitted(training_version, judged.oldest, self._job.staleness_max)
        return "stale" if is_stale else "uncut"

    def place(self, group_id: str, group: Group, standing: Standing) -> Standing:
        """Counts a group where it stands now; returns where it stood before."""
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
        """Ids of all groups that stand so and are not over."""
        return [group_id for group_id, found in self._standings.items() if found == standing]

    # how it stands

    @property
    def accepted(self) -> int:
        """Groups that teach, but for stale ones."""
        return self._over["accepted"] + self._open["train", "uncut"]

    @property
    def running(self) -> int:
        """Groups of training that are asked for and not judged: also when all members have ended, since they may yet teach."""
        return self._open["train", "running"]

    @property
    def stale(self) -> int:
        """Groups that taught something and were too old when they ended, or that no batch may take for another reason."""
        return self._over["stale"]

    @property
    def given_up(self) -> int:
        return self._over["refused"] + self._open["train", "given_up"]

    @property
    def asked(self) -> int:
        """Groups of training that were ever asked for."""
        return self.running + self.accepted + self.stale + self._over["dropped"] + self.given_up

    def budget(self, version: int) -> int:
        """Upper bound of accepted and running groups at the newest version."""
        versions_trained = max(0, version - self._job.first_version)
        return groups_allowed(versions_trained, self._job.staleness_target, self._job.groups_per_batch)

    def has_room(self, version: int) -> bool:
        """Whether another group may be asked for. A run that need not end (steps = 0) never has enough."""
        is_enough = self._job.steps > 0 and self.accepted >= self._job.steps * self._job.groups_per_batch
        return not is_enough and self.accepted + self.running < self.budget(version)

    def state(self) -> PacingState:
        return PacingState(
            over={name: count for name, count in sorted(self._over.items()) if count},
            batches_cut=self._batches_cut,
        )

    def restore(self, state: PacingState) -> None:
        self._over = Counter(state.over)
        self._batches_cut = state.batches_cut
