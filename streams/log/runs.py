"""Reads the events of all runs of a field from topic `runs`; streams.rules.runs folds them into states."""

from replayground.schemas.events import Event
from replayground.streams.log.protocol import Log

_EVENTS_MAX = 1000
_POLL_SECONDS = 0.2


def run_facts(log: Log) -> list[Event]:
    """All events that are on the topic now, in order. Undecodable messages are left out. Raises LogUnavailable."""
    reader = log.reader(["runs"])
    facts: list[Event] = []
    try:
        while not reader.caught_up():
            deliveries = reader.poll(_EVENTS_MAX, _POLL_SECONDS)
            facts += [delivery.event for delivery in deliveries if delivery.event is not None]
    finally:
        reader.close()
    return facts
