"""Partial credit over checkpoints. Pure."""

from dataclasses import dataclass
from typing import ClassVar

from msgspec import Struct

from replayground.schemas.events import Task, TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.agent_words import AgentCall, calls_of, turns_of
from replayground.streams.rules.scorers.built_in import BuiltInScorer
from replayground.streams.rules.scorers.patterns import compiled, found_in


class Checkpoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that the agent should have reached. Of `answers`, `says` and `calls`, all that are given must hold."""

    name: str
    answers: str | None = None
    "pattern that the final answer contains"
    says: str | None = None
    "pattern that one of its turns contains"
    calls: str | None = None
    "tool that it called without an error"
    arguments: str | None = None
    "with `calls`: pattern that the arguments of that call contain, as JSON without spaces between its parts"
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Checkpoints(BuiltInScorer):
    """The share of checkpoints that the agent reached, each counted by its weight. Checkpoints usually differ from task
    to task: then they stand in the tag `checkpoints.steps` of the task, as a JSON list."""

    name: str = "checkpoints"
    code_version: ClassVar[str] = "2"
    steps: tuple[Checkpoint, ...] = ()

    @property
    def takes_reference(self) -> bool:
        return False

    def __post_init__(self) -> None:
        for step in self.steps:
            for pattern in (step.answers, step.says, step.arguments):
                if pattern is not None:
                    compiled(pattern)
            if step.answers is None and step.says is None and step.calls is None:
                raise ValueError(f"the checkpoint {step.name} needs answers, says or calls")
            if step.arguments is not None and step.calls is None:
                raise ValueError(f"the checkpoint {step.name} has arguments and no calls")
            if not 0 < step.weight <= 1e6:
                raise ValueError(f"the weight {step.weight} of the checkpoint {step.name} is not above 0")
        names = [step.name for step in self.steps]
        if len(set(names)) != len(names):
            raise ValueError("two checkpoints have the same name")

    def require(self, task: Task) -> None:
        if not self.steps:
            raise ValueError(f"it has no checkpoints; a task gives them in the tag {self.name}.steps")

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        self.require(trajectory.task)
        calls, turns = calls_of(trajectory), turns_of(trajectory)
        reached = {step.name: _is_reached(step, trajectory.answer, turns, calls) for step in self.steps}
        total = sum(step.weight for step in self.steps)
        missed = [name for name, is_reached in reached.items() if not is_reached]
        return Score(
            score=sum(step.weight for step in self.steps if reached[step.name]) / total,
            parts={name: float(is_reached) for name, is_reached in reached.items()},
            evidence=f"missed {', '.join(missed)}" if missed else "all checkpoints reached",
        )


def _is_reached(step: Checkpoint, answer: str | None, turns: list[str], calls: list[AgentCall]) -> bool:
    return (
        (step.answers is None or (answer is not None and found_in(step.answers, answer) is not None))
        and (step.says is None or any(found_in(step.says, turn) is not None for turn in turns))
        and (step.calls is None or any(_is_made(step, call) for call in calls))
    )


def _is_made(step: Checkpoint, call: AgentCall) -> bool:
    # In every reading: an agent could write the call that is wanted beside the one that it makes.
    pattern = step.arguments
    matches = pattern is None or all(found_in(pattern, written) is not None for written in call.readings)
    return call.tool == step.calls and call.has_succeeded and matches
