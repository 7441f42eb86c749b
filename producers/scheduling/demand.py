"""demand: tasks that wait to be requested, and which comes next: the oldest, or by curriculum.

The curriculum chooses a family (streams.rules.curriculum) and takes the oldest task of it. What it knows is a fold of the
log, in any order; each choice follows from that, the seed of the run and the number of groups asked for before.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from fractions import Fraction

from msgspec import Struct

from producers.config import SchedulerSettings
from producers.scheduling.ledger import GroupOutcome, GroupRequest
from producers.scheduling.newest import Newest
from producers.tasks import TRAINING
from schemas.events import Purpose
from streams.rules.curriculum import PassRateBand, PassRates, draw_family, family_of

TRAINING_TASKS_WAITING_MAX = 1024
"""With a curriculum, a training task of the feeder is let go when it still waits after so many newer ones: families that are
never chosen would otherwise hold all of their tasks for ever. Tasks that somebody submitted are never let go, and push none
out: the feeder makes new tasks only when those it made have ended."""

type QueueKey = tuple[Purpose, int | None]
"Purpose and required version of an evaluation or a demonstration."


class DemandState(Struct, frozen=True):
    newest: list[tuple[int, str]]
    rates: dict[str, dict[int, tuple[str, int]]]


class Demand:
    """Group requests that wait. Pure."""

    def __init__(self, settings: SchedulerSettings, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._queues: dict[QueueKey, _Queue] = {}
        self._families: dict[str, _Queue] = {}
        "training tasks; one family for all when there is no curriculum"
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
        if _is_from_feeder(ask) and self._has_curriculum:
            self._newest.add(ask.order)

    def add(self, ask: GroupRequest) -> None:
        if ask.purpose == "train":
            self._families.setdefault(self._family_of(ask), _Queue()).add(ask)
        else:
            self._queues.setdefault(_queue_key(ask), _Queue()).add(ask)

    def remove(self, ask: GroupRequest) -> None:
        """It waits no longer."""
        if ask.purpose == "train":
            _remove(self._families, self._family_of(ask), ask)
        else:
            _remove(self._queues, _queue_key(ask), ask)

    def is_overtaken(self, ask: GroupRequest) -> bool:
        """Whether a training task that was not asked for has waited too long."""
        floor = self._newest.floor
        return floor is not None and _is_from_feeder(ask) and ask.order < floor

    def waiting_too_long(self) -> list[GroupRequest]:
        """They still wait until they are removed."""
        floor = self._newest.floor
        if floor is None:
            return []
        return [ask for queue in self._families.values() for ask in queue.before(floor) if _is_from_feeder(ask)]

    def next(self, purpose: Purpose, can_be_served: Callable[[GroupRequest], bool]) -> GroupRequest | None:
        """The oldest group request that can be served now, of the lowest required version first; not for training."""
        keys = sorted((place for place in self._queues if place[0] == purpose), key=lambda place: place[1] or -1)
        firsts = (self._queues[place].first for place in keys)
        return next((ask for ask in firsts if can_be_served(ask)), None)

    def next_training(self, version: int, groups_asked: int) -> GroupRequest:
        """The next training task; there must be one. `version` is the newest, `groups_asked` numbers the draw."""
        worths = {family: self._rates.worth(family, version, self._band) for family in self._families}
        return self._families[draw_family(worths, self._seed, groups_asked)].first

    def observe(self, ask: GroupRequest, judged: GroupOutcome) -> None:
        """What came of a training task. Call it once for each."""
        if self._has_curriculum and judged.version is not None:
            self._rates.observe(self._family_of(ask), judged.version, judged.reward_mean, judged.members)

    def note_published(self, version: int) -> None:
        self._rates.forget_before(version)

    def state(self) -> DemandState:
        """What the ledger does not tell."""
        seen = self._rates.seen
        return DemandState(
            newest=list(self._newest),
            rates={
                family: {at: (str(rewards), count) for at, (rewards, count) in sorted(by_version.items())}
                for family, by_version in sorted(seen.items())
            },
        )

    def restore(self, state: DemandState) -> None:
        self._newest = Newest(TRAINING_TASKS_WAITING_MAX, state.newest)
        self._rates.restore(
            {
                family: {at: (Fraction(rewards), count) for at, (rewards, count) in by_version.items()}
                for family, by_version in state.rates.items()
            }
        )

    @property
    def _has_curriculum(self) -> bool:
        return self._settings.curriculum != "off"

    def _family_of(self, ask: GroupRequest) -> str:
        return family_of(ask.task.tags, tuple(self._settings.curriculum_tags)) if self._has_curriculum else ""


class _Queue:
    """Group requests in the order of their submission."""

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
        place = bisect_left(self._orders, ask.order)
        assert self._orders[place] == ask.order, "the neighbour of a task that does not wait would be removed"
        del self._orders[place]
        del self._asks[ask.task_id]

    def before(self, order: tuple[int, str]) -> list[GroupRequest]:
        return [self._asks[task_id] for _, task_id in self._orders[: bisect_left(self._orders, order)]]


def _is_from_feeder(ask: GroupRequest) -> bool:
    """Whether the feeder drew the task, in advance and perhaps more of them than are played."""
    return ask.purpose == "train" and ask.session_id == TRAINING


def _queue_key(ask: GroupRequest) -> QueueKey:
    return ask.purpose, ask.required_version


def _remove[Key](queues: dict[Key, _Queue], key: Key, ask: GroupRequest) -> None:
    queues[key].remove(ask)
    if not queues[key]:
        del queues[key]
