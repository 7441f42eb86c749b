"""Scorers that need nothing but the trajectory, and the rule that says what is scored at all."""

from collections.abc import Iterable, Mapping

from schemas.errors import BadInput
from schemas.events import TrajectoryAssembled
from schemas.job import Score, Scorer


class ExactMatch:
    """1 when the answer is the reference, character for character, after white space around both is stripped; else 0."""

    name = "exact_match"
    version = "1"

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        reference = trajectory.task.reference
        if reference is None:
            return Score(score=0.0, excluded_because="the task has no reference answer")
        answer = (trajectory.answer or "").strip()
        matches = trajectory.answer is not None and answer == reference.strip()
        return Score(score=float(matches), evidence=f"answered {answer!r}")


BUILT_IN: tuple[Scorer, ...] = (ExactMatch(),)


def scorers_by_name(own: Iterable[Scorer]) -> Mapping[str, Scorer]:
    """All scorers a job can name; one's own may not take a built-in name."""
    scorers: dict[str, Scorer] = {scorer.name: scorer for scorer in BUILT_IN}
    for scorer in own:
        if scorer.name in scorers:
            raise BadInput(f"two scorers are called {scorer.name}: give the job's own one another name")
        scorers[scorer.name] = scorer
    return scorers


SCORE_MAX = 1e9
"greatest score either way: sums and squares of such scores are finite, so the advantages of a group are"
_REASON_CHARACTERS_MAX = 500


def score_trajectory(trajectory: TrajectoryAssembled, name: str, scorers: Mapping[str, Scorer]) -> Score:
    """The judgement of the scorer of this name. Total: whatever cannot be judged is excluded with the reason, or its group
    would wait for a reward for ever.

    An infrastructure error is nobody's fault and a cancelled member has nothing to judge: both are excluded.
    Not covered: a scorer that never returns."""
    if trajectory.ended_by in ("infra_error", "cancelled"):
        return Score(score=0.0, excluded_because=trajectory.ended_by, evidence=trajectory.reason or "")
    if name not in scorers:
        known = ", ".join(sorted(scorers))
        return _exclude(f"no scorer is called {name}; there are {known}")
    try:
        return checked(scorers[name].score(trajectory))
    except (Exception, SystemExit) as error:
        return _exclude(f"scorer failed: {_describe_error(error)}")


def checked(score: object) -> Score:
    """A score that can be written to the log and counted with. Raises TypeError, ValueError."""
    if not isinstance(score, Score):
        raise TypeError(f"it returned {type(score).__name__} instead of Score")
    plain = Score(
        score=float(score.score),
        parts={str(name): float(value) for name, value in score.parts.items()},
        evidence=str(score.evidence),
        excluded_because=None if score.excluded_because is None else str(score.excluded_because),
    )
    for value in (plain.score, *plain.parts.values()):
        if not abs(value) <= SCORE_MAX:  # true of NaN too
            raise ValueError(f"{value} is not a number between -{SCORE_MAX:g} and {SCORE_MAX:g}")
    for text in (plain.evidence, plain.excluded_because or "", *plain.parts):
        text.encode()  # a lone surrogate cannot be written as UTF-8
    return plain


def _exclude(reason: str) -> Score:
    return Score(score=0.0, excluded_because=reason.encode("utf-8", "backslashreplace").decode())


def _describe_error(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS_MAX]
    except Exception:  # an exception of somebody's own may not even be printable
        return type(error).__name__
