"""Comparison of JSON by value. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from replayground.schemas.events import Task, TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.built_in import BuiltInScorer, reference_of, unreadable
from replayground.streams.rules.scorers.f1 import overlap
from replayground.streams.rules.scorers.fenced import without_fence

# RecursionError: brackets nested too deep. UnicodeError: half of a surrogate pair.
_NOT_JSON = (msgspec.DecodeError, RecursionError, UnicodeError)
_EXACT_INTEGER_MAX = 2**53
"integers up to here are exact as a float"


@dataclass(frozen=True, kw_only=True)
class JsonMatch(BuiltInScorer):
    """1 when the answer is JSON that equals the reference by value, else 0: layout, order of keys, and 1 or 1.0 do not
    matter. With `partial` the score is the F1 of the values at the same places."""

    name: str = "json"
    partial: bool = False

    def require(self, task: Task) -> None:
        _decoded(reference_of(task), "its reference")

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        places: dict[tuple[int, str | int], int] = {}
        expected = list(_leaves(_decoded(reference_of(trajectory.task), "its reference"), places))
        try:
            answered = list(_leaves(_decoded(without_fence(trajectory.answer or ""), "the answer"), places))
        except ValueError as error:
            return unreadable(trajectory.answer, str(error))
        common = overlap(answered, expected)
        equal = float(common.f1 == 1.0)
        evidence = f"{len(answered)} values answered, {len(expected)} expected, F1 {common.f1:.3f}"
        parts = {"equal": equal, "precision": common.precision, "recall": common.recall, "f1": common.f1}
        return Score(score=common.f1 if self.partial else equal, parts=parts, evidence=evidence)


def _decoded(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except _NOT_JSON as error:
        raise ValueError(f"{what} is not JSON: {error}") from error


def _leaves(value: Any, places: dict[tuple[int, str | int], int]) -> Iterator[tuple[int, str]]:
    """Every value that holds no other, with its place. `places` numbers the places, in both documents alike."""
    # Numbered, not spelled out: a place may be a thousand levels deep, and a document has many of them.
    rest: list[tuple[int, Any]] = [(0, value)]
    while rest:
        place, found = rest.pop()
        inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
        if isinstance(found, dict | list) and found:
            rest += [(places.setdefault((place, key), len(places) + 1), child) for key, child in inner]
        else:
            yield place, scalar(found)


def scalar(value: Any) -> str:
    """A value as text, by which it is compared. 1 and 1.0 are the same, 1 and true and "1" are not."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _EXACT_INTEGER_MAX:
        value = float(value)
    # -0.0 and 0.0 are equal.
    return repr(value + 0.0 if isinstance(value, float) else value)
