"""Comparison as in the GAIA benchmark: the kind of the reference decides how the answer is read. Pure."""

import re
import string
from dataclasses import dataclass
from typing import ClassVar

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.built_in import BuiltInScorer, reference_of, shown, unreadable
from replayground.streams.rules.scorers.numbers import number_of

_SEPARATOR = re.compile("[,;]")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True)
class GaiaMatch(BuiltInScorer):
    """1 when the answer means the reference, else 0. A reference that is a number is compared as a number, without
    currency, percent sign and thousands separators; one with commas or semicolons as a list of numbers and texts, in
    order; any other as text without case, white space, punctuation."""

    name: str = "gaia"
    code_version: ClassVar[str] = "2"

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        reference, answer = reference_of(trajectory.task), trajectory.answer
        if answer is None:
            return unreadable(None, "nothing to compare")
        if (number := number_of(reference)) is not None:
            return _verdict(number_of(answer) == number, "number", answer)
        if _SEPARATOR.search(reference):
            return _verdict(_items(answer) == _items(reference), "list", answer)
        return _verdict(_plain(answer) == _plain(reference), "text", answer)


def _verdict(is_right: bool, kind: str, answer: str) -> Score:
    return Score(score=float(is_right), evidence=f"answered {shown(answer)}, compared as {kind}")


def _items(text: str) -> list[float | str]:
    """Items of a list: numbers by value, texts without case and white space. Their punctuation counts."""
    items = [item.strip() for item in _SEPARATOR.split(text)]
    return [number if (number := number_of(item)) is not None else "".join(item.split()).casefold() for item in items]


def _plain(text: str) -> str:
    # Of "?!" nothing would be left, and any other punctuation would equal it.
    return "".join(text.split()).casefold().translate(_PUNCTUATION) or text.strip()
