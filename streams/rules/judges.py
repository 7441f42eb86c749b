"""Scorers that ask somebody: a model with a rubric (LlmJudge), or people (HumanVerdict).

The hop `score` cannot run them, since it is pure. The program `judge` asks and writes their rewards; the group waits for
those like for any other. Pure: nothing is asked here.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from replayground.schemas.errors import BadInput
from replayground.schemas.events import HumanQuestion, JudgedBy, TrajectoryAssembled
from replayground.schemas.job import Score, Scorer
from replayground.streams.rules.reward import SCORE_MAX

# Part of a judge's version: change it when the same settings would ask or score otherwise.
CODE_VERSION = "judges-1"
_VERSION_CHARACTERS = 12


@dataclass(frozen=True, kw_only=True)
class LlmJudge:
    """A model that scores an attempt by a rubric. It sees the task, the agent's answer and the rubric, and nothing else
    unless it is shown. Several votes are averaged. Raises BadInput for settings that contradict each other.

    >>> from replayground import LlmJudge
    >>> polite = LlmJudge(name="polite", model="judge-7b", rubric="1 for a polite answer, 0 for a rude one.")
    >>> polite.judged_by, polite.pass_mark, len(polite.version)
    ('model', 1.0, 12)
    """

    name: str
    model: str
    "as the endpoint calls it"
    rubric: str
    "what earns which score, in words"
    endpoint: str = "default"
    "name of the [judge.endpoints.NAME] section of the config"
    votes: int = 1
    "how often the model is asked about one attempt; more than 1 needs a temperature above 0"
    temperature: float = 0.0
    scale: tuple[float, float] = (0.0, 1.0)
    "lowest and highest score"
    pass_mark: float | None = 1.0
    "score from which on an attempt has passed; None = this judge does not decide that"
    weight: float = 1.0
    "how much the score counts in the reward"
    show_transcript: bool = False
    "whether the model also sees what was said and done on the way to the answer"
    show_reference: bool = False
    "whether the model sees the reference answer of the task"
    answer_tokens_max: int = 512
    "longest reply of the model"
    characters_max: int = 60_000
    "of answer or transcript: what is longer is cut in the middle, and the model is told so"

    judged_by: ClassVar[JudgedBy] = "model"

    def __post_init__(self) -> None:
        _require_sound(self)
        for field in ("model", "rubric", "endpoint"):
            if not getattr(self, field).strip():
                raise BadInput(f"judge {self.name} has no {field}: give it one")
        if self.votes < 1 or self.answer_tokens_max < 1 or self.characters_max < 1:
            raise BadInput(f"judge {self.name}: votes, answer_tokens_max and characters_max must be at least 1")
        if not 0.0 <= self.temperature <= 2.0:
            raise BadInput(f"judge {self.name}: temperature must be between 0 and 2, not {self.temperature}")
        if self.votes > 1 and self.temperature == 0.0:
            raise BadInput(
                f"judge {self.name}: {self.votes} votes at temperature 0 are all the same; raise it, or ask once"
            )

    @property
    def version(self) -> str:
        """A hash of all settings: another rubric, model or scale is another scorer."""
        return _version_of(self)

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        """Excludes: a judge is asked by the program `judge`, and never about a demonstration."""
        return _not_scored_here(self.name, trajectory)


@dataclass(frozen=True, kw_only=True)
class HumanVerdict:
    """People score an attempt on the page (/verdicts) or with `replayground verdicts`. The score is the mean of their
    verdicts. Raises BadInput for settings that contradict each other.

    >>> from replayground import HumanVerdict
    >>> helpful = HumanVerdict(name="helpful", question="Would this answer help the customer?", annotators_min=2)
    >>> helpful.judged_by, helpful.scale
    ('human', (0.0, 1.0))
    """

    name: str
    question: str
    "what the annotators are asked"
    annotators_min: int = 1
    "how many different people must have judged an attempt before it has a score"
    scale: tuple[float, float] = (0.0, 1.0)
    "lowest and highest score"
    pass_mark: float | None = 1.0
    "score from which on an attempt has passed; None = it does not decide that"
    weight: float = 1.0
    "how much the score counts in the reward"

    judged_by: ClassVar[JudgedBy] = "human"

    def __post_init__(self) -> None:
        _require_sound(self)
        if not self.question.strip():
            raise BadInput(f"human verdict {self.name} has no question: say what the annotators are to judge")
        if self.annotators_min < 1:
            raise BadInput(f"human verdict {self.name}: annotators_min must be at least 1, not {self.annotators_min}")

    @property
    def version(self) -> str:
        """A hash of all settings."""
        return _version_of(self)

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        """Excludes: people are asked by `replayground verdicts`, and never about a demonstration."""
        return _not_scored_here(self.name, trajectory)


Judge = LlmJudge | HumanVerdict


def judges_of(scorers: Iterable[Scorer] | Mapping[str, Scorer]) -> dict[str, Judge]:
    """The scorers that ask somebody, by name."""
    every = scorers.values() if isinstance(scorers, Mapping) else scorers
    return {scorer.name: scorer for scorer in every if isinstance(scorer, LlmJudge | HumanVerdict)}


def questions_of(scorers: Iterable[Scorer] | Mapping[str, Scorer]) -> list[HumanQuestion]:
    """What the scorers that ask people ask, for whoever has not their code."""
    return [question_of(judge) for judge in judges_of(scorers).values() if isinstance(judge, HumanVerdict)]


def question_of(judge: HumanVerdict) -> HumanQuestion:
    low, high = judge.scale
    return HumanQuestion(
        scorer=judge.name,
        scorer_version=judge.version,
        question=judge.question,
        scale_low=low,
        scale_high=high,
        annotators_min=judge.annotators_min,
        pass_mark=judge.pass_mark,
    )


def is_asked(trajectory: TrajectoryAssembled) -> bool:
    """Whether judges are asked about an attempt. If not, the hop `score` excludes it at once."""
    # Nothing to judge in the first two; a demonstration is never compared with others, and each question costs.
    return trajectory.ended_by not in ("infra_error", "cancelled") and trajectory.meta.purpose != "demonstrate"


def is_on_scale(score: float, scale: tuple[float, float]) -> bool:
    """False for NaN, too."""
    return scale[0] <= score <= scale[1]


def _not_scored_here(name: str, trajectory: TrajectoryAssembled) -> Score:
    if trajectory.meta.purpose == "demonstrate":
        return Score(score=0.0, excluded_because="demonstrations are not judged")
    return Score(score=0.0, excluded_because=f"{name} is asked by the program judge, and not scored here")


def _require_sound(judge: Judge) -> None:
    """Raises BadInput for what both kinds of judges have in common."""
    low, high = judge.scale
    if not judge.name.strip():
        raise BadInput("a judge has no name: tasks name it in their scorers")
    if not -SCORE_MAX <= low < high <= SCORE_MAX:
        raise BadInput(f"judge {judge.name}: scale must be two numbers, the lower first, not {judge.scale}")
    # At the lower end everything would pass: a scale of 1 to 5 with the default mark is a mistake.
    if judge.pass_mark is not None and not low < judge.pass_mark <= high:
        raise BadInput(f"judge {judge.name}: pass_mark {judge.pass_mark:g} must be above {low:g} and at most {high:g}")
    if not math.isfinite(judge.weight) or abs(judge.weight) > SCORE_MAX:
        raise BadInput(f"judge {judge.name}: weight {judge.weight} is not a number up to {SCORE_MAX:g}")


def _version_of(judge: Judge) -> str:
    encoded = msgspec.json.encode([CODE_VERSION, type(judge).__name__, judge], order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:_VERSION_CHARACTERS]
