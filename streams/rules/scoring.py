"""The built-in scorer, and the rule that decides what is scored and what is excluded."""

from collections.abc import Iterable, Mapping

from replayground.schemas.errors import BadInput
from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Score, Scorer
from replayground.streams.rules.reward import PASS_MARK, SCORE_MAX, passes


class ExactMatch:
    """1 when the answer equals the reference, after stripping white space around both; else 0."""

    name = "exact_match"
    version = "1"

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        reference = trajectory.task.reference
        if reference is None:
            return Score(score=0.0, excluded_because="the task has no reference answer")
        answer = (trajectory.answer or "").strip()
        # No answer never matches, not even an empty reference.
        matches = trajectory.answer is not None and answer == reference.strip()
        return Score(score=float(matches), evidence=f"answered {answer!r}")


BUILT_IN: tuple[Scorer, ...] = (ExactMatch(),)


def scorers_by_name(own: Iterable[Scorer]) -> Mapping[str, Scorer]:
    """Built-in scorers and those of the job. Raises BadInput when two have the same name."""
    scorers: dict[str, Scorer] = {scorer.name: scorer for scorer in BUILT_IN}
    for scorer in own:
        if scorer.name in scorers:
            raise BadInput(f"two scorers are called {scorer.name}: rename the one of the job")
        scorers[scorer.name] = scorer
    return scorers


_REASON_CHARACTERS_MAX = 500


def weight_of(scorer: Scorer) -> float:
    """How much its score counts in the reward. Raises TypeError, ValueError for what is no number."""
    weight = float(getattr(scorer, "weight", 1.0))
    if not abs(weight) <= SCORE_MAX:
        raise ValueError(f"weight {weight} is not a number between -{SCORE_MAX:g} and {SCORE_MAX:g}")
    return weight


def decision_of(scorer: Scorer, score: Score) -> bool | None:
    """Whether the attempt passed by this scorer: what the score itself says, else the scorer's pass mark."""
    if score.excluded_because is not None:
        return None
    mark: float | None = getattr(scorer, "pass_mark", PASS_MARK)
    return passes(score.score, mark) if score.passed is None else score.passed


def versions_of(scorers: Mapping[str, Scorer]) -> dict[str, str]:
    return {name: str(scorer.version) for name, scorer in sorted(scorers.items())}


def score_trajectory(trajectory: TrajectoryAssembled, name: str, scorers: Mapping[str, Scorer]) -> Score:
    """Scores a trajectory with the scorer of this name. Never raises: what cannot be scored is excluded with the
    reason, since its group waits for a reward. Not covered: a scorer that never returns."""
    # An infrastructure error is no fault of the agent, and a cancelled member has nothing to score.
    if trajectory.ended_by in ("infra_error", "cancelled"):
        return Score(score=0.0, excluded_because=trajectory.ended_by, evidence=trajectory.reason or "")
    if name not in scorers:
        known = ", ".join(sorted(scorers))
        return _exclude(f"no scorer is called {name}; there are {known}")
    try:
        return checked(scorers[name].score(trajectory))
    # The job's code can raise anything; sys.exit in a scorer must not end the program.
    except (Exception, SystemExit) as error:
        return _exclude(f"scorer failed: {_describe_error(error)}")


def checked(score: object) -> Score:
    """The score with plain types and finite numbers, fit for the log. Raises TypeError, ValueError."""
    if not isinstance(score, Score):
        raise TypeError(f"it returned {type(score).__name__} instead of Score")
    # Converted to plain types: a numpy number, for instance, cannot be encoded.
    plain = Score(
        score=float(score.score),
        parts={str(name): float(value) for name, value in score.parts.items()},
        evidence=str(score.evidence),
        excluded_because=None if score.excluded_because is None else str(score.excluded_because),
        passed=None if score.passed is None else bool(score.passed),
    )
    for value in (plain.score, *plain.parts.values()):
        # Not `>`: a comparison with NaN is False.
        if not abs(value) <= SCORE_MAX:
            raise ValueError(f"{value} is not a number between -{SCORE_MAX:g} and {SCORE_MAX:g}")
    for text in (plain.evidence, plain.excluded_because or "", *plain.parts):
        # Raises for a lone surrogate, which Avro could not write as UTF-8.
        text.encode()
    return plain


def _exclude(reason: str) -> Score:
    return Score(score=0.0, excluded_because=reason.encode("utf-8", "backslashreplace").decode())


def _describe_error(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS_MAX]
    except Exception:  # __str__ of a user's exception can raise too
        return type(error).__name__
