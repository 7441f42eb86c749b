"""`replayground tail`: what stands on the log, decoded, as it comes."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from schemas.errors import BadInput
from schemas.events import EVENTS, Event
from schemas.topics import TOPIC_BY_NAME, TOPICS
from streams.log.protocol import Delivery, Log

_POLL_SECONDS = 0.5
_EVENTS_MAX = 1000


@dataclass(frozen=True)
class EventFilter:
    """Which events to show; what is not set does not matter."""

    run: str | None = None
    task: str | None = None
    trajectory: str | None = None
    types: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        known = {kind.__name__ for kind in EVENTS}
        for name in self.types - known:
            raise BadInput(f"there is no event {name}; there are: {', '.join(sorted(known))}")

    def holds(self, delivery: Delivery) -> bool:
        """A message that cannot be read is shown unless something is asked for that it does not have."""
        event = delivery.event
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
    """The topics to read; all but the heartbeats' when none is named. Raises BadInput."""
    for name in names:
        if name not in TOPIC_BY_NAME:
            raise BadInput(f"there is no topic {name}; there are: {', '.join(TOPIC_BY_NAME)}")
    return list(names) or [topic.name for topic in TOPICS if topic.name != "control"]


def tail(
    log: Log, topics: Sequence[str], wanted: EventFilter, messages: int | None, goes_on: Callable[[], bool]
) -> Iterator[Delivery]:
    """Messages from so many before the end of each partition on (None: from the beginning), for as long as `goes_on`
    says so; at least once up to the end."""
    reader = log.reader(topics)
    try:
        if messages is not None:
            reader.seek_before_end(messages)
        while True:
            yield from filter(wanted.holds, reader.poll(_EVENTS_MAX, _POLL_SECONDS))
            if reader.caught_up() and not goes_on():
                return
    finally:
        reader.close()


def line(delivery: Delivery, width: int) -> str:
    """One message in one line."""
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
    """All of a message, for programs. Bytes are base64."""
    address = msgspec.to_builtins(delivery.address)
    if delivery.event is None:
        return msgspec.json.encode({"address": address, "undecodable": delivery.undecodable}).decode()
    return msgspec.json.encode(
        {"address": address, "type": type(delivery.event).__name__, "event": delivery.event}
    ).decode()


def _body(event: Event) -> dict[str, object]:
    """The event without its envelope and without what is empty; bytes by their length."""
    body = msgspec.to_builtins(event, builtin_types=(bytes,))
    del body["meta"]
    return {name: f"{len(value)} bytes" if isinstance(value, bytes) else value for name, value in body.items() if value}
