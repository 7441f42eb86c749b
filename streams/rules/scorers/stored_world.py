"""What an attempt did to its world: changed rows, files, the end of commands such as tests. Pure.

The worker looked at the sandboxes while they lived (sandboxes.worlds.checks) and stored what it found with the attempt.
So these scorers give the same score whenever they are asked.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from replayground.schemas.events import FindingKind, Task, TrajectoryAssembled, WorldFinding
from replayground.schemas.job import Needs, Score
from replayground.streams.rules.scorers.built_in import BuiltInScorer, reference_of, shown
from replayground.streams.rules.scorers.f1 import overlap
from replayground.streams.rules.scorers.json_match import scalar

type Rows = list[list[Any]]
type Changes = dict[str, dict[str, Rows]]
"""added and removed rows by table"""

_TOLD_MAX = 10
_CUT_OFF = ("deadline", "infra_error", "cancelled")


@dataclass(frozen=True, kw_only=True)
class SqlWorld(BuiltInScorer):
    """1 when the rows that the tables of the world have lost and gained are those of `changes`, else 0: what else was
    changed counts as wrong. `changes`, else the reference, is JSON: {"orders": {"added": [[7, "pen"]], "removed": []}}.
    With `partial` the score is the F1 of the changed rows. Rows come in any order; 1 and 1.0 are the same. The world
    needs a check of the kind tables, named by `check` if there are several."""

    name: str = "sql_world"
    changes: str | None = None
    check: str = ""
    partial: bool = False

    needs: ClassVar[Needs] = "stored_world"

    @property
    def takes_reference(self) -> bool:
        return self.changes is None

    def __post_init__(self) -> None:
        if self.changes is not None:
            _read_changes(self.changes)

    def require(self, task: Task) -> None:
        _read_changes(self._wanted(task))

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        expected = list(_changed_rows(_read_changes(self._wanted(trajectory.task))))
        findings = [found for found in _findings(trajectory, ("tables",)) if self.check in ("", found.name)]
        if trajectory.ended_by in _CUT_OFF:
            return _cut_off(trajectory)
        if len(findings) != 1:
            raise ValueError(f"its world has {len(findings)} such checks: name one in {self.name}.check")
        if findings[0].problem is not None:
            return Score(score=0.0, evidence=f"the tables: {findings[0].problem}")
        found = list(_changed_rows(_read_changes(findings[0].content)))
        common = overlap(found, expected)
        equal = float(common.f1 == 1.0)
        parts = {"equal": equal, "precision": common.precision, "recall": common.recall, "f1": common.f1}
        return Score(score=common.f1 if self.partial else equal, parts=parts, evidence=_difference(found, expected))

    def _wanted(self, task: Task) -> str:
        return reference_of(task) if self.changes is None else self.changes


@dataclass(frozen=True, kw_only=True)
class WorldChecks(BuiltInScorer):
    """1 when all checks of files and commands hold, else 0; with `partial`, the share that holds. A command holds when it
    ended with exit code 0, a file when it is there; and each when its output or content equals that of `expected`, by the
    name of the check, without white space around it. `only` names the checks that count; empty = all."""

    name: str = "checks"
    expected: dict[str, str] | None = None
    only: tuple[str, ...] = ()
    partial: bool = False

    needs: ClassVar[Needs] = "stored_world"

    @property
    def takes_reference(self) -> bool:
        return False

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        findings = {found.name: found for found in _findings(trajectory, ("file", "command"))}
        if trajectory.ended_by in _CUT_OFF:
            return _cut_off(trajectory)
        names = self.only or tuple(findings)
        missing = [name for name in (*names, *(self.expected or {})) if name not in findings]
        if missing or not names:
            raise ValueError(
                f"its world has no check {missing[0]!r}" if missing else "its world checks no file or command"
            )
        problems = {name: self._problem(findings[name]) for name in names}
        broken = [f"{name}: {problem}" for name, problem in problems.items() if problem is not None]
        share = 1 - len(broken) / len(names)
        return Score(
            score=share if self.partial else float(not broken),
            parts={name: float(problem is None) for name, problem in problems.items()},
            evidence="; ".join(broken[:_TOLD_MAX]) or f"{len(names)} checks hold",
        )

    def _problem(self, found: WorldFinding) -> str | None:
        """Why a check does not hold; None when it does."""
        if found.problem is not None:
            return found.problem
        if found.kind == "command" and found.exit_code != 0:
            return f"exit code {found.exit_code}, {shown(found.content[-_END_CHARACTERS:])}"
        wanted = (self.expected or {}).get(found.name)
        if wanted is not None and found.content.strip() != wanted.strip():
            return f"it holds {shown(found.content)}"
        return None


_END_CHARACTERS = 150


def _findings(trajectory: TrajectoryAssembled, kinds: tuple[FindingKind, ...]) -> list[WorldFinding]:
    """Raises ValueError when none are stored, although the attempt came to its end."""
    found = [finding for finding in trajectory.findings if finding.kind in kinds]
    if not found and trajectory.ended_by not in _CUT_OFF:
        raise ValueError("nothing is stored of its world: it has no such checks, or was played before they were there")
    return found


def _cut_off(trajectory: TrajectoryAssembled) -> Score:
    # 0, not excluded: an agent must not be able to leave its group by taking too long.
    return Score(score=0.0, evidence=f"ended by {trajectory.ended_by}, before anything could be looked at")


def _read_changes(text: str) -> Changes:
    """Raises ValueError."""
    try:
        changes = msgspec.json.decode(text, type=dict[str, dict[str, list[list[Any]]]])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ValueError(f"the changes of the tables cannot be read: {error}") from error
    for table, kinds in changes.items():
        if wrong := sorted(kinds.keys() - {"added", "removed"}):
            raise ValueError(f"the changes of {table} are added or removed rows, not {wrong[0]!r}")
    return changes


def _changed_rows(changes: Changes) -> Iterator[Hashable]:
    for table, kinds in changes.items():
        for kind, rows in kinds.items():
            for row in rows:
                yield table, kind, tuple(map(scalar, row))


def _difference(found: list[Hashable], expected: list[Hashable]) -> str:
    missing, surplus = [row for row in expected if row not in found], [row for row in found if row not in expected]
    told = [f"missing {_row(row)}" for row in missing] + [f"surplus {_row(row)}" for row in surplus]
    return "; ".join(told[:_TOLD_MAX]) or f"{len(found)} rows changed, as expected"


def _row(row: Any) -> str:
    table, kind, cells = row
    return f"{kind} {table}({', '.join(cells)})"[:_END_CHARACTERS]
