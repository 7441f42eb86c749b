"""Which scorers there are, what they say of themselves, and the rule that decides what is scored and what is excluded."""

from collections.abc import Iterable, Mapping
from typing import get_args

from msgspec.structs import replace

from replayground.schemas.code_digest import digest_of_object
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Task, TrajectoryAssembled
from replayground.schemas.job import Needs, Score, Scorer
from replayground.streams.rules.reward import PASS_MARK, SCORE_MAX, passes
from replayground.streams.rules.scorers.built_in import BuiltInScorer
from replayground.streams.rules.scorers.exact import ExactMatch
from replayground.streams.rules.scorers.gaia import GaiaMatch
from replayground.streams.rules.scorers.json_match import JsonMatch
from replayground.streams.rules.scorers.numeric import NumericTolerance
from replayground.streams.rules.scorers.regex import RegexMatch
from replayground.streams.rules.scorers.stored_world import SqlWorld, WorldChecks
from replayground.streams.rules.scorers.table import TableMatch

BUILT_IN: tuple[Scorer, ...] = (
    ExactMatch(),
    GaiaMatch(),
    NumericTolerance(),
    RegexMatch(),
    JsonMatch(),
    TableMatch(),
    SqlWorld(),
    WorldChecks(),
)
"those that a task can name without any settings"
_OURS = frozenset(type(scorer) for scorer in BUILT_IN)
"classes of scorers that change nothing of what they are given"


def scorers_by_name(own: Iterable[Scorer]) -> Mapping[str, Scorer]:
    """Built-in scorers and those of the job. A job may have a built-in scorer with settings of its own in place of the
    one without. Raises BadInput when two others have the same name, or when one has a wrong attribute."""
    built_in: dict[str, Scorer] = {scorer.name: scorer for scorer in BUILT_IN}
    scorers: dict[str, Scorer] = {}
    for scorer in own:
        is_replaced = type(built_in.get(scorer.name)) is type(scorer)
        if scorer.name in scorers or (scorer.name in built_in and not is_replaced):
            raise BadInput(f"two scorers are called {scorer.name}: rename the one of the job")
        # Now, not when the first trajectory is scored: that would end the program.
        if (problem := problem_of(scorer)) is not None:
            raise BadInput(f"the scorer {scorer.name} cannot be used: {problem}")
        scorers[scorer.name] = scorer
    return built_in | scorers


_REASON_CHARACTERS_MAX = 500


def weight_of(scorer: Scorer) -> float:
    """How much its score counts in the reward. Raises TypeError, ValueError for what is no number."""
    return _number("weight", getattr(scorer, "weight", 1.0))


def pass_mark_of(scorer: Scorer) -> float | None:
    """The score from which on an attempt has passed; None when it does not decide that. Raises like weight_of."""
    mark = getattr(scorer, "pass_mark", PASS_MARK)
    return None if mark is None else _number("pass_mark", mark)


def _number(name: str, value: object) -> float:
    if type(value) is float and abs(value) <= SCORE_MAX:  # as nearly always, and asked with every reward
        return value
    # bool is a number to Python; here it is a mistake. A numpy number is none of these classes, and has __float__.
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} {value!r} is not a number")
    number = float(value)
    # Not `>`: a comparison with NaN is False.
    if not abs(number) <= SCORE_MAX:
        raise ValueError(f"{name} {number} is not a number between -{SCORE_MAX:g} and {SCORE_MAX:g}")
    return number


def decision_of(scorer: Scorer, score: Score) -> bool | None:
    """Whether the attempt passed by this scorer: what the score itself says, else the scorer's pass mark."""
    if score.excluded_because is not None:
        return None
    return passes(score.score, pass_mark_of(scorer)) if score.passed is None else score.passed


def version_of(scorer: Scorer) -> str:
    """The version that it declares, else a digest of its code and attributes."""
    declared = getattr(scorer, "version", None)
    return digest_of_object(scorer) if declared is None else str(declared)


def versions_of(scorers: Mapping[str, Scorer]) -> dict[str, str]:
    """The version of each scorer, by name. Raises BadInput for one that a scorer set cannot hold."""
    versions = {name: version_of(scorer) for name, scorer in sorted(scorers.items())}
    for name, version in versions.items():
        if "+" in version:
            raise BadInput(f"the version {version!r} of the scorer {name} has a +: declare one without")
    return versions


def needs_of(scorer: Scorer) -> Needs | None:
    """What it looks at; None when it does not say. Raises ValueError."""
    needs: Needs | None = getattr(scorer, "needs", None)
    if needs is not None and needs not in get_args(Needs):
        raise ValueError(f"needs {needs!r} is unknown: it is one of {', '.join(get_args(Needs))}")
    return needs


def problem_of(scorer: Scorer) -> str | None:
    """What is wrong with the attributes of a scorer; None when nothing is."""
    try:
        _require_name(scorer.name)
        weight_of(scorer)
        pass_mark_of(scorer)
        needs_of(scorer)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _require_name(name: object) -> None:
    # A scorer set is written NAME:VERSION+NAME:VERSION, and two sets must never be written alike.
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or set(name) & set("+:"):
        raise ValueError(f"its name {name!r} is not a word without + and :")


def problem_with_task(scorer: Scorer, task: Task) -> str | None:
    """Why a built-in scorer could not score any attempt at this task, such as a reference that it cannot read; None when
    it can, and for scorers of the job, which may do what they like."""
    return scorer.problem(task) if isinstance(scorer, BuiltInScorer) else None


def score_trajectory(trajectory: TrajectoryAssembled, name: str, scorers: Mapping[str, Scorer]) -> Score:
    """Scores a trajectory with the scorer of this name. Never raises: what cannot be scored is excluded with the
    reason, since its group waits for a reward. A scorer that never returns is for the program to interrupt
    (streams.bounded_scoring)."""
    # An infrastructure error is no fault of the agent, and a cancelled member has nothing to score.
    if trajectory.ended_by in ("infra_error", "cancelled"):
        return Score(score=0.0, excluded_because=trajectory.ended_by, evidence=trajectory.reason or "")
    if name not in scorers:
        known = ", ".join(sorted(scorers))
        return _exclude(f"no scorer is called {name}; there are {known}")
    try:
        scorer = scorers[name]
        # Copying costs as much as judging does.
        if type(scorer) not in _OURS:
            return checked(scorer.score(unshared(trajectory)))
        score = scorer.score(trajectory)
        return score if _is_plain(score) else checked(score)
    # The job's code can raise anything; sys.exit in a scorer must not end the program.
    except (Exception, SystemExit) as error:
        return _exclude(f"scorer failed: {_describe_error(error)}")


def unshared(trajectory: TrajectoryAssembled) -> TrajectoryAssembled:
    """The trajectory with lists and dicts of its own: a scorer that changes them, which may still run after its time is
    up, must not change what other scorers see or what is written."""
    task, meta = trajectory.task, trajectory.meta
    return replace(
        trajectory,
        meta=replace(meta, headers=dict(meta.headers)),
        task=replace(task, toolset=list(task.toolset), scorers=list(task.scorers), tags=dict(task.tags)),
        segments=list(trajectory.segments),
        transcript=list(trajectory.transcript),
        contexts=list(trajectory.contexts),
        findings=list(trajectory.findings),
    )


def checked(score: object) -> Score:
    """The score with plain types and finite numbers, fit for the log. Raises TypeError, ValueError."""
    if not isinstance(score, Score):
        raise TypeError(f"it returned {type(score).__name__} instead of Score")
    # Converted to plain types: a numpy number, for instance, cannot be encoded.
    plain = Score(
        score=_figure(score.score),
        parts={str(name): _figure(value) for name, value in score.parts.items()},
        evidence=str(score.evidence),
        excluded_because=None if score.excluded_because is None else _reason(score.excluded_because),
        passed=None if score.passed is None else _decision(score.passed),
    )
    for value in (plain.score, *plain.parts.values()):
        # Not `>`: a comparison with NaN is False.
        if not abs(value) <= SCORE_MAX:
            raise ValueError(f"{value} is not a number between -{SCORE_MAX:g} and {SCORE_MAX:g}")
    for text in (plain.evidence, plain.excluded_because or "", *plain.parts):
        # Raises for a lone surrogate, which Avro could not write as UTF-8.
        text.encode()
    return plain


def _is_plain(score: Score) -> bool:
    """Whether `checked` would give an equal score; of one of our scorers, which keep nothing that they return."""
    return (
        type(score.score) is float
        and abs(score.score) <= SCORE_MAX
        and not score.parts
        and type(score.evidence) is str
        and score.evidence.isascii()
        and score.excluded_because is None
        and score.passed is None
    )


def _figure(value: object) -> float:
    # "1" is a number to float(), and here a mistake.
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{value!r} is not a number")
    return float(value)  # type: ignore[arg-type]


def _decision(value: object) -> bool:
    # Not bool(): "False" is true. A numpy bool equals 0 or 1.
    if value not in (0, 1):
        raise TypeError(f"passed is {value!r}: it is True, False or None")
    return bool(value)


def _reason(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"excluded_because is {value!r}: it is a reason, or None")
    return value


def _exclude(reason: str) -> Score:
    return Score(score=0.0, excluded_because=reason.encode("utf-8", "backslashreplace").decode())


def _describe_error(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS_MAX]
    except Exception:  # __str__ of a user's exception can raise too
        return type(error).__name__
