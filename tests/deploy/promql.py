"""A parser of PromQL for checking queries, where promtool is not there: grammar, functions, and which series are read.

It knows the operators, aggregations and functions named below and refuses everything else. Types are checked as far as
functions that need a range get one, and nothing else does.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))|(?P<duration>(?:\d+(?:ms|[smhdwy]))+)"
    r"|(?P<name>[a-zA-Z_:][\w:]*)|(?P<string>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')"
    r"|(?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){}\[\],@]))"
)
_AGGREGATIONS = "sum min max avg count group stddev topk bottomk quantile count_values"
_WITH_ARGUMENT = "topk bottomk quantile count_values"
_OF_RANGES = (
    "rate increase irate delta deriv changes resets avg_over_time max_over_time min_over_time sum_over_time "
    "count_over_time last_over_time predict_linear quantile_over_time"
)
_OF_VECTORS = "abs absent ceil clamp_max clamp_min floor label_replace round scalar sort_desc time vector"
# From the loosest to the tightest; ^ binds to the right, which no check here depends on.
_OPERATORS = (("or",), ("and", "unless"), ("==", "!=", "<", "<=", ">", ">="), ("+", "-"), ("*", "/", "%"), ("^",))


class Malformed(Exception):
    """The query is not PromQL, or more of it than this parser knows."""


@dataclass(frozen=True)
class Selector:
    """A metric and the values that its labels are asked for."""

    metric: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Query:
    """What a query reads, and by which labels it groups and joins."""

    selectors: list[Selector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)


def parsed(text: str) -> Query:
    """Raises Malformed."""
    parser = _Parser(text)
    parser.expression(0)
    if parser.kind:
        raise Malformed(f"unexpected {parser.text!r} in {text!r}")
    return parser.query


class _Parser:
    def __init__(self, text: str) -> None:
        self.query = Query()
        self._tokens = list(_tokens(text))
        self._at = 0

    @property
    def kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def text(self) -> str:
        return self._tokens[self._at][1]

    def expression(self, level: int) -> bool:
        """Reads an expression; returns whether it is a range of samples."""
        if level == len(_OPERATORS):
            return self._unary()
        is_range = self.expression(level + 1)
        while self.text in _OPERATORS[level] and self.kind in ("sign", "name"):
            self._take()
            self._modifiers()
            if is_range | self.expression(level + 1):
                raise Malformed("an operator takes no range of samples")
            is_range = False
        return is_range

    def _modifiers(self) -> None:
        self._is("bool")
        for names in (("on", "ignoring"), ("group_left", "group_right")):
            if self.text in names:
                self._take()
                self.query.labels |= set(self._listed(self._label))

    def _unary(self) -> bool:
        while self.text in ("-", "+") and self.kind == "sign":
            self._take()
        return self._suffixed(self._primary())

    def _primary(self) -> str:
        """Reads the part that others are built from; returns "selector", "range" or ""."""
        kind, text = self.kind, self.text
        if text == "{" or kind == "name":
            return self._named()
        self._take()
        if text == "(":
            is_range = self.expression(0)
            self._require(")")
            return "range" if is_range else ""
        if kind not in ("number", "string"):
            raise Malformed(f"unexpected {text!r}")
        return ""

    def _named(self) -> str:
        name = "" if self.text == "{" else self._take()
        if name in _AGGREGATIONS.split():
            self._aggregation(name)
            return ""
        if self.text == "(" and self.kind == "sign":
            self._call(name)
            return ""
        labels: dict[str, str] = {}
        if self.text == "{":
            labels = dict(self._listed(self._matcher, "{", "}"))
        if not name and not labels:
            raise Malformed("a selector without a name and labels")
        self.query.selectors.append(Selector(name, labels))
        return "selector"

    def _suffixed(self, of: str) -> bool:
        is_range = of == "range"
        if self._is("["):
            if of != "selector":
                raise Malformed("a range of samples is asked of something other than a metric")
            self._of_kind("duration")
            self._require("]")
            is_range = True
        if self._is("offset"):
            self._of_kind("duration")
        return is_range

    def _aggregation(self, name: str) -> None:
        self._grouping()
        arguments = self._listed(lambda: self.expression(0))
        self._grouping()
        if any(arguments) or len(arguments) != 1 + (name in _WITH_ARGUMENT.split()):
            raise Malformed(f"{name} has the wrong arguments")

    def _grouping(self) -> None:
        if self.text in ("by", "without"):
            self._take()
            self.query.labels |= set(self._listed(self._label))

    def _call(self, name: str) -> None:
        is_of_ranges = name in _OF_RANGES.split()
        if not is_of_ranges and name not in _OF_VECTORS.split():
            raise Malformed(f"unknown function {name}")
        arguments = self._listed(lambda: self.expression(0))
        if any(arguments) != is_of_ranges:
            raise Malformed(f"{name} takes {'a range of' if is_of_ranges else 'no range of'} samples")

    def _matcher(self) -> tuple[str, str]:
        label = self._label()
        if self._take() not in ("=", "!=", "=~", "!~"):
            raise Malformed(f"the label {label} is compared with nothing")
        return label, self._of_kind("string")[1:-1]

    def _label(self) -> str:
        return self._of_kind("name")

    def _listed[Part](self, part: Callable[[], Part], opening: str = "(", closing: str = ")") -> list[Part]:
        self._require(opening)
        parts: list[Part] = []
        while not self._is(closing):
            if parts:
                self._require(",")
            parts.append(part())
        return parts

    def _of_kind(self, kind: str) -> str:
        if self.kind != kind:
            raise Malformed(f"a {kind} is expected at {self.text!r}")
        return self._take()

    def _require(self, text: str) -> None:
        if self._take() != text:
            raise Malformed(f"{text!r} is missing")

    def _is(self, text: str) -> bool:
        if self.text != text:
            return False
        self._take()
        return True

    def _take(self) -> str:
        text = self.text
        # The last token is the end, which is never passed.
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return text


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at = 0
    while text[at:].strip():
        token = _TOKEN.match(text, at)
        if token is None:
            raise Malformed(f"unexpected {text[at:].strip()[:1]!r}")
        found.append((str(token.lastgroup), token[str(token.lastgroup)]))
        at = token.end()
    return [*found, ("", "")]
