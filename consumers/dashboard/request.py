"""What a view is given, and what it returns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replayground.consumers.clickhouse.store import Store
from replayground.consumers.dashboard.markup import Element
from replayground.consumers.dashboard.tokens import LOCAL, Person
from replayground.consumers.dashboard.web import SqlResult, Traces
from replayground.schemas.errors import BadInput
from replayground.streams.rules.runs import RunState

_NUMBER_MAX = 2**53
StatementResult = SqlResult | str | None
"rows, or one sentence that says why there are none; None when nothing was asked"


@dataclass(frozen=True)
class ViewRequest:
    """One request for a view. Belongs to one thread."""

    traces: Traces
    path: str
    query: Mapping[str, Sequence[str]]
    statement: StatementResult = None
    "what became of the statement that the address holds or names"
    person: Person = LOCAL

    @property
    def store(self) -> Store:
        return self.traces.store

    @property
    def may_act(self) -> bool:
        """Whether this person may do more than look, and there is a log to write to."""
        return self.traces.follows and self.person.may("operator")

    def run(self) -> RunState:
        """The run that the address names, or the newest one. Raises UnknownRun."""
        return self.traces.find(self.text("run") or None)

    def text(self, name: str) -> str:
        values = self.query.get(name, ())
        return values[-1].strip() if values else ""

    def texts(self, name: str) -> list[str]:
        return [value for value in self.query.get(name, ()) if value]

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of the choices, the first one when the address says nothing. Raises BadInput."""
        value = self.text(name) or choices[0]
        if value not in choices:
            raise BadInput(f"?{name}={value[:40]} is not one of {', '.join(filter(None, choices))}")
        return value

    def number(self, name: str, default: int = 0) -> int:
        """A number that is not negative. Raises BadInput."""
        found = self.optional_number(name)
        return default if found is None else found

    def optional_number(self, name: str) -> int | None:
        value = self.text(name)
        if not value:
            return None
        # isdecimal is also true of digits of other scripts, and int() takes underscores.
        if not (value.isascii() and value.isdecimal() and int(value[:20]) <= _NUMBER_MAX):
            raise BadInput(f"?{name}={value[:40]} is no whole number")
        return int(value)

    def optional_figure(self, name: str) -> float | None:
        """A finite number. Raises BadInput."""
        value = self.text(name)
        if not value:
            return None
        try:
            figure = float(value)
        except ValueError as error:
            raise BadInput(f"?{name}={value[:40]} is no number") from error
        if not math.isfinite(figure):
            raise BadInput(f"?{name}={value[:40]} is no number")
        return figure

    def ask(self, sql: str, **parameters: Any) -> list[dict[str, Any]]:
        """Rows of a query of our own. Raises StoreFailed."""
        return self.store.ask(sql, parameters).dicts()


@dataclass(frozen=True)
class ViewContent:
    """What a view shows inside the frame."""

    title: str
    body: Sequence[Element | None]
    run: RunState | None = None
    "the run it is about; None for views of the whole field"
    refresh_seconds: float = 0.0
    "how often a browser asks again for the parts with the attribute data-live; 0 = never"
    note: str = ""
    "one line under the title"
    trail: Sequence[tuple[str, str]] = ()
    "names and addresses of the views above it"
    scripts: Sequence[str] = ()
    "names of further files in assets/"
