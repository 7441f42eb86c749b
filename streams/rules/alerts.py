"""Alerts, folded from topic `operations`: which are set, which are raised, and when they change. Pure.

An alert is a saved query and a threshold. The first number of its first row is compared; no row, or no number, changes
nothing: an alert that cannot be asked is neither raised nor cleared.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from replayground.schemas.events import AlertChanged, AlertState, Event, QuerySaved


class AlertStanding(Struct, frozen=True, kw_only=True):
    """What the log says about one alert."""

    saved: QuerySaved
    raised_at: int | None = None
    "microseconds since the epoch; None = it is not raised"

    @property
    def is_set(self) -> bool:
        """Whether somebody wants it to be watched."""
        return self.saved.use == "alert"

    def change(self, value: float | None) -> AlertState | None:
        """What a new value makes of it; None when it stays as it is."""
        if not self.is_set:
            return None if self.raised_at is None else "cleared"
        if value is None:
            return None
        is_beyond = value > self.saved.threshold if self.saved.bound == "above" else value < self.saved.threshold
        if is_beyond == (self.raised_at is not None):
            return None
        return "raised" if is_beyond else "cleared"


def apply(standings: dict[str, AlertStanding], event: Event) -> None:
    """Takes the next event of topic `operations`. Names that are no alert, and never were one, are left out."""
    match event:
        case QuerySaved():
            before = standings.get(event.name)
            if before is not None or event.use == "alert":
                raised_at = None if before is None else before.raised_at
                standings[event.name] = AlertStanding(saved=event, raised_at=raised_at)
        case AlertChanged() if event.name in standings:
            raised_at = event.meta.timestamp if event.state == "raised" else None
            standings[event.name] = AlertStanding(saved=standings[event.name].saved, raised_at=raised_at)


def fold(events: Iterable[Event]) -> dict[str, AlertStanding]:
    """All alerts by name."""
    standings: dict[str, AlertStanding] = {}
    for event in events:
        apply(standings, event)
    return standings


def value_of(rows: Sequence[Sequence[object]]) -> float | None:
    """The number that an alert compares: the first one of the first row."""
    for cell in rows[0] if rows else ():
        # ClickHouse writes large whole numbers as text.
        if isinstance(cell, int | float | str):
            try:
                number = float(cell)
            except ValueError:
                continue
            if math.isfinite(number):
                return number
    return None
