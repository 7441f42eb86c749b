"""demand: the tasks that wait to be requested, and which comes next: the oldest, or by curriculum.

The curriculum draws a family of tasks (streams.rules.curriculum) and takes its oldest task. Its knowledge is a fold of
the log, in any order. Each draw depends on that, the seed of the run and the number of groups requested before, so a
restarted scheduler draws the same.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from fractions import Fraction

from msgspec import Struct

from replayground.producers.config import SchedulerSettings
from replayground.producers.scheduling.ledger import GroupOutcome, GroupRequest
from replayground.producers.scheduling.newest import Newest
from replayground.producers.tasks import TRAINING
from replayground.schemas.events import Purpose
from replayground.streams.rules.curriculum import PassRateBand, PassRates, draw_family, family_of

TRAINING_TASKS_WAITING_MAX = 1024
"""With a curriculum, a training task of the feeder is dropped when it still waits after so many newer ones. Otherwise
families that are never drawn would keep all their tasks for ever. Tasks that somebody submitted are never dropped, and
drop none: the feeder makes new tasks only when those it made have ended."""

type QueueKey = tuple[Purpose, int | None]
"Purpose and required version of an evaluation or a demonstration."


class DemandState(Struct, frozen=True):
    newest: list[tuple[int, str]]
    rates: dict[str, dict[int, tuple[str, int]]]
    rates_oldest: float | None = None
    "versions before this one are not observed any more"


class Demand:
    """The group requests that wait. Pure."""

    def __init__(self, settings: SchedulerSettings, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._queues: dict[QueueKey, _Queue] = {}
        self._families: dict[str, _Queue] = {}
        "training tasks by family; all in one family when there is no curriculum"
        self._newest: Newest[tuple[int, str]] = Newest(TRAINING_TASKS_WAITING_MAX)
        self._rates = PassRates(settings.curriculum_half_life_versions)
        self._band = PassRateBand(
            low=settings.curriculum_low, high=settings.curriculum_high, outside=settings.curriculum_outside
        )

    def __len__(self) -> int:
        return sum(map(len, (*self._queues.values(), *self._families.values())))

    @property
    def has_training(self) -> bool:
        return bool(self._families)

    def note_submitted(self, ask: GroupRequest) -> None:
        """Call it once for every task, whether it waits or not."""
        # Also tasks that were requested already: the floor must not depend on the order of reading.
        if _is_from_feeder(ask) and self._has_curriculum:
            self._newest.add(ask.order)

    def add(self, ask: GroupRequest) -> None:
        if ask.purpose == "train":
            self._families.setdefault(self._family_of(ask), _Queue()).add(ask)
        else:
            self._queues.setdefault(_queue_key(ask), _Queue()).add(ask)

    def remove(self, ask: GroupRequest) -> None:
        """It does not wait any longer. It must be one that waits."""
        if ask.purpose == "train":
            _remove(self._families, self._family_of(ask), ask)
        else:
            _remove(self._queues, _queue_key(ask), ask)

    def is_overtaken(self, ask: GroupRequest) -> bool:
        """Whether a training task that was not requested has waited too long."""
        floor = self._newest.floor
        return floor is not None and _is_from_feeder(ask) and ask.order < floor

    def waiting_too_long(self) -> list[GroupRequest]:
        """Training tasks that have waited too long. They stay in the queue until `remove`."""
        floor = self._newest.floor
        if floor is None:
            return []
        return [ask for queue in self._families.values() for ask in queue.before(floor) if _is_from_feeder(ask)]

    def next(self, purpose: Purpose, can_be_served: Callable[[GroupRequest], bool]) -> GroupRequest | None:
        """The oldest group request that can be served now, of the lowest required version first. Not for training."""
        # Only the first of each queue: all of a queue need the same version, so either all can be served or none.
        keys = sorted((place for place in self._queues if place[0] == purpose), key=lambda place: place[1] or -1)
        firsts = (self._queues[place].first for place in keys)
        return next((ask for ask in firsts if can_be_served(ask)), None)

    def next_training(self, version: int, groups_asked: int) -> GroupRequest:
        """The next training task; there must be one. `version` is the newest weight version, `groups_asked` the number
        of the draw."""
        worths = {family: self._rates.worth(family, version, self._band) for family in self._families}
        # With one family (no curriculum) the draw has one outcome: the oldest task.
        return self._families[draw_family(worths, self._seed, groups_asked)].first

    def observe(self, ask: GroupRequest, judged: GroupOutcome) -> None:
        """Updates the pass rates with the result of a training task. Call it once for each."""
        if self._has_curriculum and judged.version is not None:
            self._rates.observe(self._family_of(ask), judged.version, judged.pass_rate, judged.members)

    def note_published(self, version: int) -> None:
        self._rates.forget_before(version)

    def state(self) -> DemandState:
        """What cannot be found again from the ledger."""
        seen = self._rates.seen
        return DemandState(
            newest=list(self._newest),
            rates={
                # Exact fractions as text: floats would make the sum depend on the order of reading.
                family: {at: (str(rewards), count) for at, (rewards, count) in sorted(by_version.items())}
                for family, by_version in sorted(seen.items())
            },
            rates_oldest=self._rates.oldest,
        )

    def restore(self, state: DemandState) -> None:
        self._newest = Newest(TRAINING_TASKS_WAITING_MAX, state.newest)
        self._rates.restore(
            {
                family: {at: (Fraction(rewards), count) for at, (rewards, count) in by_version.items()}
                for family, by_version in state.rates.items()
            },
            state.rates_oldest,
        )

    @property
    def _has_curriculum(self) -> bool:
        return self._settings.curriculum != "off"

    def _family_of(self, ask: GroupRequest) -> str:
        return family_of(ask.task.tags, tuple(self._settings.curriculum_tags)) if self._has_curriculum else ""


class _Queue:
    """Group requests in the order of submission, in whatever order they were added."""

    def __init__(self) -> None:
        self._orders: list[tuple[int, str]] = []
        self._asks: dict[str, GroupRequest] = {}

    def __len__(self) -> int:
        return len(self._orders)

    @property
    def first(self) -> GroupRequest:
        return self._asks[self._orders[0][1]]

    def add(self, ask: GroupRequest) -> None:
        insort(self._orders, ask.order)
        self._asks[ask.task_id] = ask

    def remove(self, ask: GroupRequest) -> None:
        # The orders are sorted, so the position is found without a scan of all that waits.
        place = bisect_left(self._orders, ask.order)
        assert self._orders[place] == ask.order, "the neighbour of a task that does not wait would be removed"
        del self._orders[place]
        del self._asks[ask.task_id]

    def before(self, order: tuple[int, str]) -> list[GroupRequest]:
        return [self._asks[task_id] for _, task_id in self._orders[: bisect_left(self._orders, order)]]


def _is_from_feeder(ask: GroupRequest) -> bool:
    """Whether it is a training task of the feeder, which draws tasks in advance, perhaps more than are played."""
    return ask.purpose == "train" and ask.session_id == TRAINING


def _queue_key(ask: GroupRequest) -> QueueKey:
    return ask.purpose, ask.required_version


def _remove[Key](queues: dict[Key, _Queue], key: Key, ask: GroupRequest) -> None:
    queues[key].remove(ask)
    # An empty queue must go: has_training asks for queues, and families are drawn among them.
    if not queues[key]:
        del queues[key]
