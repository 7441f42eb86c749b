"""`replayground lag`: how far each group is behind the log, and how fast it goes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from consumers.lag_watch import GROUPS
from streams.log.protocol import Log


@dataclass(frozen=True)
class Row:
    """One group on one topic."""

    group: str
    topic: str
    lag: int
    taken_per_second: float | None
    "None at the first look"
    arriving_per_second: float | None


def lags(log: Log, run_id: str) -> Iterator[list[Row]]:
    """All groups, look by look; the caller waits in between."""
    before: dict[tuple[str, str], tuple[int, int]] = {}
    looked_at = time.monotonic()
    while True:
        now = time.monotonic()
        seconds, looked_at = max(1e-9, now - looked_at), now
        rows: list[Row] = []
        for group, topics in GROUPS:
            for topic, standing in log.standing(f"{group}-{run_id}", list(topics)).items():
                place = (group, topic)
                rates: tuple[float, float] | None = None
                if place in before:
                    committed, end = before[place]
                    rates = (standing.committed - committed) / seconds, (standing.end - end) / seconds
                before[place] = standing.committed, standing.end
                rows.append(Row(group, topic, standing.lag, *(rates or (None, None))))
        yield rows
