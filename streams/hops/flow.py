"""The hops in the order of the flow: one list for the Faust app, the driver and the tests."""

from collections.abc import Iterable

from replayground.schemas.job import Scorer
from replayground.streams.hops import messages_to_trajectories, rewards_to_groups
from replayground.streams.hops.hop import Hop
from replayground.streams.hops.messages_to_trajectories import AssembleTrajectories
from replayground.streams.hops.rewards_to_groups import GroupRewards
from replayground.streams.hops.trajectories_to_rewards import ScoreTrajectories
from replayground.streams.rules.advantage import AdvantageKind
from replayground.streams.rules.scoring import scorers_by_name, versions_of


def hops(
    own_scorers: Iterable[Scorer],
    advantage: AdvantageKind,
    trajectories_remembered: int = messages_to_trajectories.KEYS_REMEMBERED,
    groups_remembered: int = rewards_to_groups.KEYS_REMEMBERED,
) -> tuple[Hop, ...]:
    """The hops of a job. `…_remembered`: how many of the newest keys of each partition are kept after they are closed
    (streams.horizon). Raises BadInput when two scorers have the same name."""
    scorers = scorers_by_name(own_scorers)
    # The cutter is not among them: it is a program of its own, for its transactions (streams.cut).
    return (
        AssembleTrajectories(trajectories_remembered),
        ScoreTrajectories(scorers),
        GroupRewards(advantage, groups_remembered, versions_of(scorers)),
    )
