"""A regular expression over the answer. Pure."""

from dataclasses import dataclass

from replayground.schemas.events import Task, TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.built_in import BuiltInScorer, reference_of, shown, unreadable
from replayground.streams.rules.scorers.patterns import compiled, found_in


@dataclass(frozen=True, kw_only=True)
class RegexMatch(BuiltInScorer):
    """1 when the whole answer, without white space around it, matches `pattern`, else 0; without `pattern` the reference
    is the pattern. With `anywhere` a match within the answer is enough: an agent may then list many answers. Patterns are
    those of RE2, which takes linear time."""

    name: str = "regex"
    pattern: str | None = None
    anywhere: bool = False

    @property
    def takes_reference(self) -> bool:
        return self.pattern is None

    def __post_init__(self) -> None:
        if self.pattern is not None:
            compiled(self.pattern)

    def require(self, task: Task) -> None:
        compiled(self._pattern(task))

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        if trajectory.answer is None:
            return unreadable(None, "nothing to match")
        found = found_in(self._pattern(trajectory.task), trajectory.answer.strip(), whole=not self.anywhere)
        if found is None:
            return unreadable(trajectory.answer, "no match")
        return Score(score=1.0, evidence=f"matched {shown(found)}")

    def _pattern(self, task: Task) -> str:
        return reference_of(task) if self.pattern is None else self.pattern
