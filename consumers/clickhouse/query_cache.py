"""Answers of the store, kept as long as they are good enough.

A query costs some milliseconds of processor however small it is, and a live view asks every second for the whole of a
run. An answer is asked for anew only when rows that it rests on, by kind and run, were inserted since, and no sooner than
its time.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from consumers.clickhouse.store import QueryResult, Store


@dataclass(frozen=True)
class CachedQuery:
    """A query, the kinds of events that it rests on, and how old its answer may be although there are new ones."""

    sql: str
    kinds: tuple[str, ...]
    seconds: float = 0.0
    moving: tuple[str, ...] = ()
    """parameters that move with the clock: another value alone does not make the answer anew, but neither is it kept beyond
    `seconds` because nothing was inserted"""


_KEPT_MAX = 1000
"answers; some ten for every run that is looked at"


class QueryCache:
    """The newest answers, for all parameters their own. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._kept: OrderedDict[tuple[Any, ...], tuple[float, int, QueryResult]] = OrderedDict()
        self._turn = threading.Lock()

    def ask(self, question: CachedQuery, parameters: Mapping[str, Any]) -> QueryResult:
        """The answer, perhaps of a moment ago. Parameters are hashable."""
        run_id: str | None = parameters.get("run")
        still = sorted((name, value) for name, value in parameters.items() if name not in question.moving)
        key = (question.sql, *still)
        with self._turn:
            inserted = self.store.inserted(question.kinds, run_id)
            if key in self._kept:
                asked_at, inserted_then, answer = self._kept[key]
                is_newest = inserted_then == inserted and not question.moving
                if is_newest or time.monotonic() < asked_at + question.seconds:
                    return answer
            answer = self.store.ask(question.sql, parameters)
            self._kept[key] = (time.monotonic(), inserted, answer)
            self._kept.move_to_end(key)
            if len(self._kept) > _KEPT_MAX:
                self._kept.popitem(last=False)
            return answer
