"""Penalties for risky calls. Pure."""

from dataclasses import dataclass
from typing import ClassVar

from msgspec import Struct

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.agent_words import AgentCall, calls_of
from replayground.streams.rules.scorers.built_in import BuiltInScorer, shown
from replayground.streams.rules.scorers.patterns import compiled, found_in


class Risk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that costs, whether or not it succeeds."""

    name: str
    tool: str | None = None
    "None = any tool"
    arguments: str | None = None
    "pattern that the arguments contain, as JSON without spaces between its parts; None = any"
    cost: float = 1.0
    "of each such call"


@dataclass(frozen=True, kw_only=True)
class RiskPenalty(BuiltInScorer):
    """Minus the cost of every call that one of `risks` matches, down to -`cost_max`; 0 without such a call. It does not
    decide whether an attempt passed."""

    name: str = "risk"
    code_version: ClassVar[str] = "2"
    pass_mark: float | None = None
    risks: tuple[Risk, ...] = ()
    cost_max: float = 1.0

    @property
    def takes_reference(self) -> bool:
        return False

    def __post_init__(self) -> None:
        for risk in self.risks:
            if risk.arguments is not None:
                compiled(risk.arguments)
            if not 0 <= risk.cost <= 1e6:
                raise ValueError(f"the cost {risk.cost} of the risk {risk.name} is not a number from 0 on")
        if not 0 <= self.cost_max <= 1e6:
            raise ValueError(f"cost_max is {self.cost_max}: it is a number from 0 on")

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        calls = calls_of(trajectory)
        taken = [(risk, call) for risk in self.risks for call in calls if _matches(risk, call)]
        costs = {risk.name: 0.0 for risk in self.risks}
        for risk, _ in taken:
            costs[risk.name] -= risk.cost
        told = [f"{risk.name}: {call.tool} {shown(call.arguments)}" for risk, call in taken]
        return Score(
            # + 0.0: without any risk it is 0, not -0.
            score=-min(sum(risk.cost for risk, _ in taken), self.cost_max) + 0.0,
            parts={name: cost + 0.0 for name, cost in costs.items()},
            evidence="; ".join(told[:_TOLD_MAX]) or "no risky call",
        )


_TOLD_MAX = 10


def _matches(risk: Risk, call: AgentCall) -> bool:
    if risk.tool is not None and risk.tool != call.tool:
        return False
    pattern = risk.arguments
    return pattern is None or any(found_in(pattern, written) is not None for written in call.readings)
