"""Training tasks that wait for the scheduler, and which is taken up next: the oldest, or by curriculum. Pure.

The curriculum chooses a family (streams.rules.curriculum) and takes the oldest task of it. What it knows is a fold of the
log, in any order; each choice follows from that, the seed of the run and the number of groups asked for before.
"""

from collections import deque
from dataclasses import dataclass, field

from producers.config import SchedulerSettings
from schemas.events import GroupCompleted, Task
from streams.rules.curriculum import Band, PassRates, drawn, family_of

_WAITING_PER_FAMILY_MAX = 1024
"A family that is never chosen lets go of its oldest tasks, or a run of days would hold them all."


@dataclass(frozen=True, slots=True)
class _Judged:
    version: int
    reward_mean: float
    members: int


@dataclass(slots=True)
class Lessons[Ask]:
    """Asks that wait, by family; one family for all when there is no curriculum."""

    settings: SchedulerSettings
    seed: int
    _waiting: dict[str, deque[Ask]] = field(default_factory=dict)
    _rates: PassRates = field(init=False)
    _band: Band = field(init=False)
    _family: dict[str, str] = field(default_factory=dict)
    "of every group that was asked for and is not judged yet"
    _judged: dict[str, _Judged] = field(default_factory=dict)
    "groups whose judgement was read before their requests"

    def __post_init__(self) -> None:
        self._rates = PassRates(self.settings.curriculum_half_life_versions)
        self._band = Band(
            low=self.settings.curriculum_low,
            high=self.settings.curriculum_high,
            outside=self.settings.curriculum_outside,
        )

    def __len__(self) -> int:
        return sum(len(asks) for asks in self._waiting.values())

    def add(self, ask: Ask, task: Task) -> None:
        family = self._family_of(task)
        bound = None if self._is_off else _WAITING_PER_FAMILY_MAX
        self._waiting.setdefault(family, deque(maxlen=bound)).append(ask)

    def take(self, version: int, groups_asked: int) -> Ask:
        """The next ask; there must be one. `version` is the newest, `groups_asked` numbers the draw."""
        worths = {
            family: self._rates.worth(family, version, self._band) for family, asks in self._waiting.items() if asks
        }
        return self._waiting[drawn(worths, self.seed, groups_asked)].popleft()

    def remove(self, asks: list[Ask]) -> None:
        gone = {id(ask) for ask in asks}
        for family, waiting in self._waiting.items():
            self._waiting[family] = deque((ask for ask in waiting if id(ask) not in gone), waiting.maxlen)

    def waiting(self) -> list[Ask]:
        return [ask for asks in self._waiting.values() for ask in asks]

    def asked(self, group_id: str, task: Task, is_completed: bool) -> None:
        """A member of the group was asked for."""
        if self._is_off:
            return
        judged = self._judged.pop(group_id, None)
        if judged is not None:
            self._observe(self._family_of(task), judged)
        elif not is_completed:
            self._family[group_id] = self._family_of(task)

    def completed(self, group_id: str, event: GroupCompleted) -> None:
        """Call it once a group."""
        valid = [member for member in event.members if member.valid]
        versions = [member.policy_version_oldest for member in valid if member.policy_version_oldest is not None]
        family = self._family.pop(group_id, None)
        if self._is_off or not versions:
            return
        judged = _Judged(min(versions), event.reward_mean, len(valid))
        if family is None:
            self._judged[group_id] = judged
        else:
            self._observe(family, judged)

    def published(self, version: int) -> None:
        self._rates.forget_before(version)

    @property
    def _is_off(self) -> bool:
        return self.settings.curriculum == "off"

    def _family_of(self, task: Task) -> str:
        return "" if self._is_off else family_of(task.tags, tuple(self.settings.curriculum_tags))

    def _observe(self, family: str, judged: _Judged) -> None:
        self._rates.observe(family, judged.version, judged.reward_mean, judged.members)
