"""Scorers for a replay: by name, or from a Python file that the user names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replayground.schemas.errors import BadInput
from replayground.schemas.job import Scorer, load_job, load_module
from replayground.streams.bounded_scoring import bounded
from replayground.streams.rules.scoring import BUILT_IN, needs_of, problem_of, scorers_by_name


@dataclass(frozen=True)
class ChosenScorers:
    """The scorers that judge a replay, and where they come from."""

    names: tuple[str, ...]
    "empty = those that each task names"
    file: Path | None


def parse_scorers(given: Sequence[str]) -> ChosenScorers:
    """Reads NAME, FILE.py and FILE.py:NAME as the command line gives them. Raises BadInput."""
    names: list[str] = []
    files: list[Path] = []
    for text in given:
        path, _, name = text.partition(":")
        if not path.endswith(".py"):
            names.append(text)
            continue
        files.append(Path(path).absolute())
        names.append(name or _only_name(Path(path)))
    if len(set(files)) > 1:
        raise BadInput("scorers of one replay come from one file: put them together, or name those of the job")
    # Named twice, a scorer would judge twice, in a scorer set of its own.
    return ChosenScorers(tuple(dict.fromkeys(names)), files[0] if files else None)


def scorers_in(path: Path) -> dict[str, Scorer]:
    """The scorers that a Python file defines, by name; its code is run. Raises BadInput."""
    module = load_module(str(path))
    values = [*vars(module).values(), *getattr(module, "SCORERS", ())]
    found: dict[str, Scorer] = {}
    for value in values:
        if not _is_scorer(value):
            continue
        if found.setdefault(value.name, value) is not value:
            raise BadInput(f"{path} defines two scorers called {value.name}: rename one")
        # Now, not in the process that judges.
        if (problem := problem_of(value)) is not None:
            raise BadInput(f"the scorer {value.name} of {path} cannot be used: {problem}")
    if not found:
        raise BadInput(f"{path} defines no scorer: decorate a function with @replayground.scorer")
    return found


def judges_of(module: str, file: Path | None) -> Mapping[str, Scorer]:
    """All scorers that a replay may use: those of the file if there is one, else those of the job, and built-in ones.
    Raises BadInput."""
    if file is None:
        return scorers_by_name(load_job(module).scorers)
    built_in: dict[str, Scorer] = {scorer.name: scorer for scorer in BUILT_IN}
    return built_in | scorers_in(file)


def bounded_by_name(scorers: Mapping[str, Scorer], seconds: float) -> dict[str, Scorer]:
    """The same scorers with a time limit for each trajectory."""
    return {scorer.name: scorer for scorer in bounded(tuple(scorers.values()), seconds)}


def require_known(names: Sequence[str], scorers: Mapping[str, Scorer]) -> None:
    """Raises BadInput for a name without a scorer."""
    for name in names:
        if name not in scorers:
            raise BadInput(f"there is no scorer {name}: there are {', '.join(sorted(scorers))}")


def require_replayable(scorers: Sequence[Scorer], is_forced: bool) -> None:
    """Raises BadInput for a scorer that a replay cannot give what it needs."""
    for scorer in scorers:
        if hasattr(scorer, "judged_by"):
            raise BadInput(
                f"scorer {scorer.name} asks a {scorer.judged_by}, which a replay does not: name other scorers"
            )
        needs = needs_of(scorer)
        if needs == "sandbox":
            raise BadInput(
                f"scorer {scorer.name} needs the live sandbox, which is gone: give the world a check, whose result is "
                "stored with each attempt (docs/scorers.md)"
            )
        if needs is None and not is_forced:
            raise BadInput(
                f'scorer {scorer.name} does not say what it needs: write @scorer(needs="trajectory") if the trajectory '
                "is all that it looks at, or give --force"
            )


def _only_name(path: Path) -> str:
    names = list(scorers_in(path))
    if len(names) > 1:
        raise BadInput(f"{path} defines {len(names)} scorers ({', '.join(names)}): name one, as {path}:{names[0]}")
    return names[0]


def _is_scorer(value: object) -> bool:
    if isinstance(value, type):
        return False
    return isinstance(getattr(value, "name", None), str) and callable(getattr(value, "score", None))
