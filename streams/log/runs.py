"""The facts about all runs of a field, read from topic `runs`; streams.rules.runs says what follows from them."""

from schemas.events import Event
from streams.log.protocol import Log

_EVENTS_MAX = 1000
_POLL_SECONDS = 0.2


def run_facts(log: Log) -> list[Event]:
    """All that is on the topic now. Raises LogUnavailable."""
    reader = log.reader(["runs"])
    facts: list[Event] = []
    try:
        while not reader.caught_up():
            deliveries = reader.poll(_EVENTS_MAX, _POLL_SECONDS)
            facts += [delivery.event for delivery in deliveries if delivery.event is not None]
    finally:
        reader.close()
    return facts
