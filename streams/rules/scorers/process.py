"""Constraints on how the agent worked: tools required and forbidden, their order, a budget of calls. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.agent_words import AgentCall, calls_of
from replayground.streams.rules.scorers.built_in import BuiltInScorer


@dataclass(frozen=True, kw_only=True)
class ProcessConstraints(BuiltInScorer):
    """1 when all constraints hold, else 0. `required` tools must be called without an error, `forbidden` ones not even
    tried; the calls that succeeded contain `order` in this order, with others between; there are at most `calls_max`
    calls and `errors_max` calls that fail."""

    name: str = "process"
    code_version: ClassVar[str] = "2"
    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    calls_max: int | None = None
    errors_max: int | None = None

    @property
    def takes_reference(self) -> bool:
        return False

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        held = dict(self._constraints(calls_of(trajectory)))
        broken = [name for name, holds in held.items() if not holds]
        return Score(
            score=float(not broken),
            parts={name: float(holds) for name, holds in held.items()},
            evidence=f"broken: {', '.join(broken)}" if broken else "all constraints hold",
        )

    def _constraints(self, calls: list[AgentCall]) -> Iterator[tuple[str, bool]]:
        tried, succeeded = {call.tool for call in calls}, [call.tool for call in calls if call.has_succeeded]
        for tool in self.required:
            yield f"requires {tool}", tool in succeeded
        for tool in self.forbidden:
            yield f"forbids {tool}", tool not in tried
        if self.order:
            yield f"order {' → '.join(self.order)}", _is_subsequence(self.order, succeeded)
        if self.calls_max is not None:
            yield f"at most {self.calls_max} calls", len(calls) <= self.calls_max
        if self.errors_max is not None:
            yield f"at most {self.errors_max} errors", len(calls) - len(succeeded) <= self.errors_max


def _is_subsequence(wanted: tuple[str, ...], found: list[str]) -> bool:
    rest = iter(found)
    # `in` consumes the iterator up to the match, so the next one is looked for behind it.
    return all(tool in rest for tool in wanted)
