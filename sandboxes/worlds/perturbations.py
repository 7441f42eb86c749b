"""Faults that are applied to tool calls by rule and by seed, outside the model and outside the sandbox. Pure.

A draw depends only on the seed of the rollout, the index of the call and the index of the rule: not on the clock, on
other rollouts, or on which other rules applied. So the same rollout meets the same faults.
"""

import hashlib
import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

import msgspec

type Kind = Literal["busy", "latency", "stale", "truncate", "pagination", "partial"]
BUSY_CONTENT = "error: busy"
LARGEST_BELOW_ONE = math.nextafter(1.0, 0.0)
_DIGITS_MAX = 1000
"Python's int() refuses more than 4,300 digits, and an agent can make a tool print such a number."


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of fault: for which tools, how often, on which arguments."""

    kind: Kind
    tools: tuple[str, ...]
    probability: float = 1.0
    match: str | None = None
    """A regular expression searched in the JSON of the arguments; None = every call."""
    milliseconds_max: float = 1000.0
    """latency: the wait is drawn uniformly from 0 to this."""
    characters_max: int = 200
    """truncate: longer content is cut to this many characters."""
    lines_per_page: int = 10
    """pagination: each identical call returns the next page; after the last comes the first again."""
    lines_lost_share: float = 0.5
    """partial: each line is missing with this probability."""

    def __post_init__(self) -> None:
        for name, (lowest, highest) in _BOUNDS.items():
            value = getattr(self, name)
            if not lowest <= value <= highest:
                raise ValueError(f"{name} of {self.kind} must be between {lowest:g} and {highest:g}, not {value}")
        if self.match is not None:
            try:
                re.compile(self.match)
            # Raised as ValueError, which msgspec turns into a ValidationError; re.error would end the program that
            # reads the world.
            except re.error as error:
                raise ValueError(f"match of {self.kind} is not a valid regular expression: {error}") from error


_BOUNDS: dict[str, tuple[float, float]] = {
    "probability": (0, 1),
    "milliseconds_max": (0, 600_000),
    "characters_max": (0, 2**31),
    "lines_per_page": (1, 2**31),
    "lines_lost_share": (0, 1),
}


class Perturbation(msgspec.Struct, frozen=True):
    """The rules drawn for one call, with their indices, in order."""

    seed: int
    call_index: int
    applying: tuple[tuple[int, Rule], ...]

    @property
    def is_busy(self) -> bool:
        return any(rule.kind == "busy" for _, rule in self.applying)

    @property
    def wait_milliseconds(self) -> float:
        waits = ((index, rule) for index, rule in self.applying if rule.kind == "latency")
        return sum(rule.milliseconds_max * uniform(self.seed, self.call_index, index, "wait") for index, rule in waits)


class ChangedContent(msgspec.Struct, frozen=True):
    """Content after the rules, and the indices of the rules that changed it."""

    content: str
    changed_by: tuple[int, ...]


def patterns_for(rules: Sequence[Rule], tool: str) -> list[str]:
    """What must be searched for in the arguments of a call, before the faults of the call are drawn."""
    return [rule.match for rule in rules if tool in rule.tools and rule.match is not None]


def searched_text(arguments: Mapping[str, Any]) -> str:
    return msgspec.json.encode(arguments).decode()


def draw_perturbation(
    rules: Sequence[Rule], seed: int, call_index: int, tool: str, patterns_found: Container[str] = ()
) -> Perturbation:
    """Decide which rules apply to a call, before it is made. `patterns_found` are those of `patterns_for` that were found
    in `searched_text`."""
    applying = tuple(
        (index, rule)
        for index, rule in enumerate(rules)
        if tool in rule.tools
        and (rule.match is None or rule.match in patterns_found)
        and uniform(seed, call_index, index, "applies") < rule.probability
    )
    return Perturbation(seed, call_index, applying)


def change(trouble: Perturbation, content: str, times_called_before: int) -> ChangedContent:
    """Apply the rules that change content, in order. `times_called_before` counts identical calls, for pagination."""
    changed_by: list[int] = []
    for index, rule in trouble.applying:
        name = (trouble.seed, trouble.call_index, index)
        before = content
        if rule.kind == "stale":
            content = stale(content, *name)
        elif rule.kind == "truncate":
            content = content[: rule.characters_max]
        elif rule.kind == "pagination":
            content = page(content, rule.lines_per_page, times_called_before)
        elif rule.kind == "partial":
            content = partial(content, rule.lines_lost_share, *name)
        # A rule that applied but changed nothing, such as truncate on a short text, is not recorded.
        if content != before:
            changed_by.append(index)
    return ChangedContent(content, tuple(changed_by))


def record(trouble: Perturbation, changed_by: Sequence[int], original: str | None) -> dict[str, Any] | None:
    """What the event records: the rules that had an effect, and the original content (None: the tool was not called).

    Returns None when no rule had an effect."""
    effective = [
        (index, rule)
        for index, rule in trouble.applying
        if rule.kind == "latency" or index in changed_by or (rule.kind == "busy" and original is None)
    ]
    if not effective:
        return None
    applied: list[dict[str, Any]] = [{"rule": index, "kind": rule.kind} for index, rule in effective]
    if trouble.wait_milliseconds:
        applied.append({"waited_milliseconds": round(trouble.wait_milliseconds, 3)})
    return {"applied": applied, "original": original}


def stale(content: str, seed: int, call_index: int, rule_index: int) -> str:
    """Replace every run of digits by another number of the same length; in a very long one only the first digits."""
    position = 0

    def another(found: re.Match[str]) -> str:
        nonlocal position
        # Numbers the runs of digits, so that equal numbers in one content are drawn independently.
        position += 1
        digits, rest = found.group()[:_DIGITS_MAX], found.group()[_DIGITS_MAX:]
        lowest = 0 if len(digits) == 1 else 10 ** (len(digits) - 1)
        count = 10 ** len(digits) - lowest
        old = int(digits) - lowest
        offset = integer(seed, call_index, rule_index, f"digits {position}", len(digits) + 8)
        # Leading zeros: every number drawn below has none, so it differs anyway.
        if old < 0:
            return str(lowest + offset % count) + rest
        # An offset of 1 to count - 1 round the circle never leads back to the old number.
        return str(lowest + (old + 1 + offset % (count - 1)) % count) + rest

    return re.sub(r"[0-9]+", another, content)


def page(content: str, lines_per_page: int, times_called_before: int) -> str:
    lines = content.split("\n")
    pages = -(-len(lines) // lines_per_page)
    if pages <= 1:
        return content
    number = times_called_before % pages
    shown = lines[number * lines_per_page : (number + 1) * lines_per_page]
    return "\n".join([*shown, f"[page {number + 1} of {pages}; call again for the next]"])


def partial(content: str, lines_lost_share: float, seed: int, call_index: int, rule_index: int) -> str:
    kept = [
        line
        for number, line in enumerate(content.split("\n"))
        if uniform(seed, call_index, rule_index, f"line {number}") >= lines_lost_share
    ]
    return "\n".join(kept)


def uniform(seed: int, call_index: int, rule_index: int, name: str) -> float:
    """A number from 0 up to but not including 1, the same on every machine and in every version."""
    # 56 bits are more than the 53 of a float, so the highest draws would round to 1, and a rule of probability 1 would
    # not apply to them. All other draws stay as they were: recorded rollouts meet the same faults again.
    return min(integer(seed, call_index, rule_index, name, 7) / 2**56, LARGEST_BELOW_ONE)


def integer(seed: int, call_index: int, rule_index: int, name: str, bytes_count: int) -> int:
    text = f"{seed}/{call_index}/{rule_index}/{name}".encode()
    # A hash of the name and not a generator: a draw does not depend on how many draws came before it. shake_128 gives
    # as many bytes as a long run of digits needs.
    return int.from_bytes(hashlib.shake_128(text).digest(bytes_count))
