"""`replayground lag`: lag and speed of each consumer group, and the time until retention removes unread messages."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from replayground.consumers.lag_watch import expiries_of, groups_of
from replayground.schemas.ids import now_microseconds
from replayground.schemas.retention import Expiry
from replayground.streams.log.protocol import GroupLag, Log


@dataclass(frozen=True)
class Row:
    """One group on one topic."""

    group: str
    topic: str
    lag: int
    taken_per_second: float | None
    "None in the first round, when there is nothing to compare with"
    arriving_per_second: float | None
    expiry: Expiry | None
    "None where retention cannot remove anything unread"


def lags(log: Log, run_id: str) -> Iterator[list[Row]]:
    """The rows of all groups, again with each `next`; the caller waits in between. Raises LogUnavailable."""
    before: dict[tuple[str, str], tuple[int, int]] = {}
    looked_at = time.monotonic()
    while True:
        now = time.monotonic()
        # Not zero, for a caller that does not wait.
        seconds, looked_at = max(1e-9, now - looked_at), now
        expiries = {(expiry.group, expiry.topic): expiry for expiry in _expiries(log, run_id)}
        rows: list[Row] = []
        for group in groups_of(run_id):
            for topic, group_lags in log.group_lags(group.name, list(group.stage_by_topic)).items():
                if group.is_optional and not group_lags.has_begun:
                    continue
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
    """The lag in messages; 0 when only transaction markers are unread."""
    # A commit marker takes an offset and is never delivered, so the committed offset stays one behind the end.
    if group_lags.lag and log.unread(group, [topic])[topic].oldest_milliseconds is None:
        return 0
    return group_lags.lag


def _expiries(log: Log, run_id: str) -> list[Expiry]:
    return expiries_of(log, run_id, now_microseconds() // 1000)
