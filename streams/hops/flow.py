"""The hops in the order of the flow: one list that the Faust app, the driver and the tests read."""

from collections.abc import Iterable

from schemas.job import Scorer
from streams.hops.hop import Hop
from streams.hops.messages_to_trajectories import Assemble
from streams.hops.rewards_to_groups import GroupRewards
from streams.hops.trajectories_to_rewards import ScoreTrajectories
from streams.rules.advantage import AdvantageKind
from streams.rules.scoring import scorers_by_name


def hops(own_scorers: Iterable[Scorer], advantage: AdvantageKind) -> tuple[Hop, ...]:
    return (Assemble(), ScoreTrajectories(scorers_by_name(own_scorers)), GroupRewards(advantage))
