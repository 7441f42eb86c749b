"""Things that go wrong around a tool call, by rule and by seed, outside the model and outside the sandbox. Pure.

Every draw depends on (seed of the rollout, index of the call, index of the rule) alone: not on the clock, not on other
rollouts, not on which other rules applied. So the same rollout meets the same weather, and an event can record it.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

type Kind = Literal["busy", "latency", "stale", "truncate", "pagination", "partial"]
BUSY_CONTENT = "error: busy"
_DIGITS_MAX = 1000
"Python refuses to read numbers of more than 4,300 digits, and an agent can make a tool print one."


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of trouble: for which tools, how often, on which arguments."""

    kind: Kind
    tools: tuple[str, ...]
    probability: float = 1.0
    match: str | None = None
    """A regular expression searched in the JSON of the arguments; None = every call."""
    milliseconds_max: float = 1000.0
    """latency: the wait is drawn evenly from 0 to this."""
    characters_max: int = 200
    """truncate: what is longer is cut here."""
    lines_per_page: int = 10
    """pagination: an identical call gives the next page, and after the last the first again."""
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
            except re.error as error:  # no ValueError: it would end the program that reads the world
                raise ValueError(f"match of {self.kind} is no regular expression: {error}") from error


_BOUNDS: dict[str, tuple[float, float]] = {
    "probability": (0, 1),
    "milliseconds_max": (0, 600_000),
    "characters_max": (0, 2**31),
    "lines_per_page": (1, 2**31),
    "lines_lost_share": (0, 1),
}


class Perturbation(msgspec.Struct, frozen=True):
    """What is drawn for one call: the rules that apply, by index, in order."""

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
    """Content after the rules, and the rules that did change it."""

    content: str
    changed_by: tuple[int, ...]


def draw_perturbation(
    rules: Sequence[Rule], seed: int, call_index: int, tool: str, arguments: Mapping[str, Any]
) -> Perturbation:
    """Decide, before the call, which rules apply to it."""
    text = msgspec.json.encode(arguments).decode() if rules else ""
    applying = tuple(
        (index, rule)
        for index, rule in enumerate(rules)
        if tool in rule.tools
        and (rule.match is None or re.search(rule.match, text) is not None)
        and uniform(seed, call_index, index, "applies") < rule.probability
    )
    return Perturbation(seed, call_index, applying)


def change(trouble: Perturbation, content: str, times_called_before: int) -> ChangedContent:
    """Apply the rules that change content, in order. `times_called_before` counts identical calls, for pages."""
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
        if content != before:
            changed_by.append(index)
    return ChangedContent(content, tuple(changed_by))


def record(trouble: Perturbation, changed_by: Sequence[int], original: str | None) -> dict[str, Any] | None:
    """What an event says of it: the rules that had an effect, and what the tool had said (None: not called)."""
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
    """Every run of digits becomes another number of as many digits; of a very long one only the beginning changes."""
    position = 0

    def another(found: re.Match[str]) -> str:
        nonlocal position
        position += 1
        digits, rest = found.group()[:_DIGITS_MAX], found.group()[_DIGITS_MAX:]
        lowest = 0 if len(digits) == 1 else 10 ** (len(digits) - 1)
        count = 10 ** len(digits) - lowest
        old = int(digits) - lowest
        offset = integer(seed, call_index, rule_index, f"digits {position}", len(digits) + 8)
        if old < 0:  # leading zeros: any number of that length differs from it
            return str(lowest + offset % count) + rest
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
    """A number in [0, 1) that is the same on every machine and in every version."""
    return integer(seed, call_index, rule_index, name, 7) / 2**56


def integer(seed: int, call_index: int, rule_index: int, name: str, bytes_count: int) -> int:
    text = f"{seed}/{call_index}/{rule_index}/{name}".encode()
    return int.from_bytes(hashlib.shake_128(text).digest(bytes_count))
