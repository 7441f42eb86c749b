"""`replayground tail`: follows topics of the log, decoded."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from replayground.schemas.errors import BadInput
from replayground.schemas.events import EVENTS, Event
from replayground.schemas.topics import TOPIC_BY_NAME, TOPICS
from replayground.streams.log.protocol import Delivery, Log

_POLL_SECONDS = 0.5
_EVENTS_MAX = 1000


@dataclass(frozen=True)
class EventFilter:
    """Which events to show; a field that is None or empty does not filter."""

    run: str | None = None
    task: str | None = None
    trajectory: str | None = None
    types: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        known = {kind.__name__ for kind in EVENTS}
        for name in self.types - known:
            raise BadInput(f"there is no event {name}; there are: {', '.join(sorted(known))}")

    def holds(self, delivery: Delivery) -> bool:
        """True when a message passes the filter."""
        event = delivery.event
        # An undecodable message has no ids and no type: it is shown only without a filter.
        if event is None:
            return not (self.run or self.task or self.trajectory or self.types)
        meta = event.meta
        return (
            (self.run is None or meta.run_id == self.run)
            and (self.task is None or (meta.task_id or "").startswith(self.task))
            and (self.trajectory is None or (meta.trajectory_id or "").startswith(self.trajectory))
            and (not self.types or type(event).__name__ in self.types)
        )


def topics_of(names: Sequence[str]) -> list[str]:
    """The topics to read; all but control when none is named. Raises BadInput for an unknown topic."""
    for name in names:
        if name not in TOPIC_BY_NAME:
            raise BadInput(f"there is no topic {name}; there are: {', '.join(TOPIC_BY_NAME)}")
    # Heartbeats on control, one per program every two seconds, would drown everything else.
    return list(names) or [topic.name for topic in TOPICS if topic.name != "control"]


def tail(
    log: Log, topics: Sequence[str], wanted: EventFilter, messages: int | None, goes_on: Callable[[], bool]
) -> Iterator[Delivery]:
    """Yields messages, from `messages` before the end of each partition on, or from the beginning with None. Reads at
    least to the current end, and on while `goes_on` returns True. Raises LogUnavailable."""
    reader = log.reader(topics)
    try:
        if messages is not None:
            reader.seek_before_end(messages)
        while True:
            yield from filter(wanted.holds, reader.poll(_EVENTS_MAX, _POLL_SECONDS))
            # caught_up first: goes_on is asked only at the end of the log, so a single pass is always complete.
            if reader.caught_up() and not goes_on():
                return
    finally:
        reader.close()


def line(delivery: Delivery, width: int) -> str:
    """A message as one line, cut to `width`."""
    address = f"{delivery.address.topic}/{delivery.address.partition}@{delivery.address.offset}"
    if delivery.event is None:
        return f"{'-':12}  {address:24}  undecodable  {delivery.undecodable}"[:width]
    event, meta = delivery.event, delivery.event.meta
    moment = datetime.fromtimestamp(meta.timestamp / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3]
    name = (meta.trajectory_id or meta.task_id or "")[:8]
    place = f"{name}{'' if meta.seq is None else f'#{meta.seq}'}"
    said = json.dumps(_body(event), ensure_ascii=False)
    return f"{moment}  {address:24}  {type(event).__name__:20} {place:12} {said}"[:width]


def as_json(delivery: Delivery) -> str:
    """A message with all its fields as one JSON object. Bytes are base64."""
    address = msgspec.to_builtins(delivery.address)
    if delivery.event is None:
        return msgspec.json.encode({"address": address, "undecodable": delivery.undecodable}).decode()
    return msgspec.json.encode(
        {"address": address, "type": type(delivery.event).__name__, "event": delivery.event}
    ).decode()


def _body(event: Event) -> dict[str, object]:
    """The fields of an event without its envelope and without empty fields; bytes are replaced by their length."""
    body = msgspec.to_builtins(event, builtin_types=(bytes,))
    del body["meta"]
    return {name: f"{len(value)} bytes" if isinstance(value, bytes) else value for name, value in body.items() if value}
