"""Penalties for long attempts, by sampled tokens. Pure."""

from dataclasses import dataclass

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.built_in import BuiltInScorer


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(BuiltInScorer):
    """The soft overlong punishment of DAPO: 0 up to `tokens_max` - `tokens_buffer` sampled tokens, then falling in a
    straight line to -1 at `tokens_max`, and -1 beyond. It does not decide whether an attempt passed."""

    name: str = "overlong"
    pass_mark: float | None = None
    tokens_max: int
    tokens_buffer: int

    @property
    def takes_reference(self) -> bool:
        return False

    def __post_init__(self) -> None:
        if not 0 < self.tokens_buffer <= self.tokens_max:
            raise ValueError(
                f"tokens_buffer is {self.tokens_buffer}: it is above 0 and at most tokens_max, {self.tokens_max}"
            )

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        over = trajectory.tokens_sampled - (self.tokens_max - self.tokens_buffer)
        # + 0.0: a short attempt has 0, not -0.
        score = -min(max(over / self.tokens_buffer, 0.0), 1.0) + 0.0
        return Score(score=score, evidence=f"{trajectory.tokens_sampled} tokens of at most {self.tokens_max}")


@dataclass(frozen=True, kw_only=True)
class LengthPenalty(BuiltInScorer):
    """Minus `cost_per_thousand` for every thousand sampled tokens beyond `tokens_free`, down to -`cost_max`. It does not
    decide whether an attempt passed."""

    name: str = "length"
    pass_mark: float | None = None
    cost_per_thousand: float
    tokens_free: int = 0
    cost_max: float = 1.0

    @property
    def takes_reference(self) -> bool:
        return False

    def __post_init__(self) -> None:
        for name in ("cost_per_thousand", "tokens_free", "cost_max"):
            if not 0 <= getattr(self, name) <= 1e9:
                raise ValueError(f"{name} is {getattr(self, name)}: it is a number from 0 on")

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        over = max(trajectory.tokens_sampled - self.tokens_free, 0)
        score = -min(over / 1000 * self.cost_per_thousand, self.cost_max) + 0.0
        return Score(score=score, evidence=f"{over} tokens beyond {self.tokens_free}")
