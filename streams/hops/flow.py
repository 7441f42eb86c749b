"""The hops in the order of the flow: one list that the Faust app, the driver and the tests read."""

from collections.abc import Iterable

from schemas.job import Scorer
from streams.hops import messages_to_trajectories, rewards_to_groups
from streams.hops.hop import Hop
from streams.hops.messages_to_trajectories import AssembleTrajectories
from streams.hops.rewards_to_groups import GroupRewards
from streams.hops.trajectories_to_rewards import ScoreTrajectories
from streams.rules.advantage import AdvantageKind
from streams.rules.scoring import scorers_by_name


def hops(
    own_scorers: Iterable[Scorer],
    advantage: AdvantageKind,
    trajectories_remembered: int = messages_to_trajectories.KEYS_REMEMBERED,
    groups_remembered: int = rewards_to_groups.KEYS_REMEMBERED,
) -> tuple[Hop, ...]:
    """Of each partition, so many of the newest trajectories and groups are remembered after they have ended."""
    return (
        AssembleTrajectories(trajectories_remembered),
        ScoreTrajectories(scorers_by_name(own_scorers)),
        GroupRewards(advantage, groups_remembered),
    )
