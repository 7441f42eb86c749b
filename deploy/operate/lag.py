"""`replayground lag`: how far each group is behind the log, how fast it goes, and what it may lose."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from consumers.lag_watch import expiries_of, groups_of
from schemas.ids import now_microseconds
from schemas.retention import Expiry
from streams.log.protocol import GroupLag, Log


@dataclass(frozen=True)
class Row:
    """One group on one topic."""

    group: str
    topic: str
    lag: int
    taken_per_second: float | None
    "None at the first look"
    arriving_per_second: float | None
    expiry: Expiry | None
    "None where nothing unread can be forgotten"


def lags(log: Log, run_id: str) -> Iterator[list[Row]]:
    """All groups, look by look; the caller waits in between."""
    before: dict[tuple[str, str], tuple[int, int]] = {}
    looked_at = time.monotonic()
    while True:
        now = time.monotonic()
        seconds, looked_at = max(1e-9, now - looked_at), now
        expiries = {(expiry.group, expiry.topic): expiry for expiry in _expiries(log, run_id)}
        rows: list[Row] = []
        for group in groups_of(run_id):
            for topic, group_lags in log.group_lags(group.name, list(group.stage_by_topic)).items():
                place = (group.program, topic)
                taken = arriving = None
                if place in before:
                    committed, end = before[place]
                    taken, arriving = (group_lags.committed - committed) / seconds, (group_lags.end - end) / seconds
                before[place] = group_lags.committed, group_lags.end
                lag = _lag(log, group.name, topic, group_lags)
                rows.append(Row(group.program, topic, lag, taken, arriving, expiries.get(place)))
        yield rows


def _lag(log: Log, group: str, topic: str, group_lags: GroupLag) -> int:
    """A topic that is written by transactions ends with their marks, which are no messages: nobody is behind for them."""
    if group_lags.lag and log.unread(group, [topic])[topic].oldest_milliseconds is None:
        return 0
    return group_lags.lag


def _expiries(log: Log, run_id: str) -> list[Expiry]:
    return expiries_of(log, run_id, now_microseconds() // 1000)
