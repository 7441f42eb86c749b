"""Evaluations of a run, computed from the tasks, trajectories and rewards of their sessions. Pure."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from msgspec import Struct

# Session ids of evaluations, as the feeder names them.
_EVALUATION = re.compile(r"eval-v(\d+)-(sampled|greedy)")
_SETTLED_MICROSECONDS = 5_000_000
"when all submitted tasks have ended, more may still be submitted; after this long without a new task, none will be"


class Evaluation(Struct, frozen=True, kw_only=True):
    """One evaluation of one version."""

    version: int
    session: str
    kind: str
    pass_at_1: float
    tasks: int
    ended: int
    complete: bool


def evaluations_of(sessions: Iterable[dict[str, Any]], released: Collection[int], now: int) -> list[Evaluation]:
    """The evaluations, by version and kind. `sessions` are rows of queries.SESSIONS, `released` versions no longer
    held."""
    evaluations: list[Evaluation] = []
    for row in sessions:
        match = _EVALUATION.fullmatch(row["session"])
        if match is None:
            continue
        version = int(match[1])
        # The feeder releases a version when all tasks of its evaluation have ended. Before that only the time tells.
        settled = version in released or row["newest_task"] < now - _SETTLED_MICROSECONDS
        evaluations.append(
            Evaluation(
                version=version,
                session=row["session"],
                kind=match[2],
                pass_at_1=row["pass_at_1"],
                tasks=row["tasks"],
                ended=row["ended"],
                complete=settled and row["ended"] >= row["tasks"],
            )
        )
    return sorted(evaluations, key=lambda evaluation: (evaluation.version, evaluation.kind))


def complete_ones(evaluations: Sequence[Evaluation], kind: str) -> list[Evaluation]:
    return [evaluation for evaluation in evaluations if evaluation.kind == kind and evaluation.complete]


def newest_pass_at_1(evaluations: Sequence[Evaluation], kind: str) -> float | None:
    complete = complete_ones(evaluations, kind)
    return complete[-1].pass_at_1 if complete else None
