"""Query results that are kept until newer rows arrive.

A query costs some milliseconds of CPU time however small it is, and a live view needs all queries of a run each second.
A query is repeated only when rows of its kinds and its run were inserted since, and not before its minimum age.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replayground.consumers.clickhouse.store import QueryResult, Store


@dataclass(frozen=True)
class CachedQuery:
    """A query, the kinds of events that it reads, and how long its result is reused although newer rows exist."""

    sql: str
    kinds: tuple[str, ...]
    seconds: float = 0.0
    moving: tuple[str, ...] = ()
    """parameters that follow the clock, such as `since`: a new value alone does not repeat the query, but a result is
    never reused for longer than `seconds`, even when nothing was inserted"""


_KEPT_MAX = 1000
"results; about ten for every run that is viewed"


class QueryCache:
    """The newest result for each query and its parameters. Safe to share between threads; runs one query at a time."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._kept: OrderedDict[tuple[Any, ...], tuple[float, int, QueryResult]] = OrderedDict()
        self._turn = threading.Lock()

    def ask(self, question: CachedQuery, parameters: Mapping[str, Any]) -> QueryResult:
        """The result, kept or new. Parameters are hashable, or lists of what is. Blocks while a query runs. Raises
        StoreFailed."""
        run_id: str | None = parameters.get("run")
        still = sorted((name, _hashable(value)) for name, value in parameters.items() if name not in question.moving)
        key = (question.sql, *still)
        # Held during the query: threads that ask the same at once wait for one query instead of each sending its own.
        with self._turn:
            # Read before the query: rows that arrive during it change this number, so the next call repeats the query.
            inserted = self.store.inserted(question.kinds, run_id)
            if key in self._kept:
                asked_at, inserted_then, answer = self._kept[key]
                # With a moving window rows drop out without any insert: programs that ended would be shown as running
                # forever.
                is_newest = inserted_then == inserted and not question.moving
                if is_newest or time.monotonic() < asked_at + question.seconds:
                    return answer
            answer = self.store.ask(question.sql, parameters)
            self._kept[key] = (time.monotonic(), inserted, answer)
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT_MAX:
                self._kept.popitem(last=False)
            return answer


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
