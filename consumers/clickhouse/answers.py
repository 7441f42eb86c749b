"""Answers of the store, kept as long as they are good enough.

A query costs some milliseconds of processor however small it is, and a live view asks every second for the whole of a
run. An answer is asked for anew only when rows of the kinds that it rests on were inserted since, and no sooner than its
time.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from consumers.clickhouse.store import Answer, Store


@dataclass(frozen=True)
class Question:
    """A query, the kinds of events that it rests on, and how old its answer may be although there are new ones."""

    sql: str
    kinds: tuple[str, ...]
    seconds: float = 0.0


class Answers:
    """The newest answers. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, tuple[float, int, Answer]] = {}
        self._turn = threading.Lock()

    def ask(self, question: Question, parameters: Mapping[str, Any]) -> Answer:
        """The answer, perhaps of a moment ago. Parameters may change between calls: they do not make it anew."""
        with self._turn:
            inserted = self._store.inserted(question.kinds)
            kept = self._kept.get(question.sql)
            if kept and (kept[1] == inserted or time.monotonic() < kept[0] + question.seconds):
                return kept[2]
            answer = self._store.ask(question.sql, parameters)
            self._kept[question.sql] = (time.monotonic(), inserted, answer)
            return answer
