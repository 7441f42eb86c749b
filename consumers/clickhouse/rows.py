"""An event and its address, as a row of the trace store. Pure: the same message always gives the same row.

The envelope and a few figures that are asked for all the time are columns; all the rest is `body`, the event as JSON
without its envelope. Bytes (token ids, log-probabilities) are base64 in it, so nothing of the log is lost. The one exception
is the state in a snapshot: it is as large as a program's memory and nobody asks about it, so its row has only its size.
"""

import base64
from collections.abc import Iterable
from typing import Any

import msgspec

from schemas.events import (
    Address,
    AttemptEnded,
    ControlIssued,
    Event,
    RewardAssigned,
    RolloutEnded,
    SnapshotTaken,
    StepTaken,
    TrajectoryAssembled,
    TurnGenerated,
    WeightsLoaded,
    WeightsPublished,
)
from schemas.packed import token_count

UNDECODABLE = "undecodable"
"the type of a message that is no event of ours: it has a row all the same, so that rows can be counted against the log"

Row = dict[str, Any]

_encoder = msgspec.json.Encoder()


def event_row(address: Address, event: Event) -> Row:
    """The row of an event."""
    row = msgspec.structs.asdict(event.meta)
    row["topic"] = address.topic
    row["partition"] = address.partition
    row["offset"] = address.offset
    row["type"] = type(event).__name__
    row["body"] = msgspec.Raw(_encoder.encode(_body(event)))
    _add_figures(row, event)
    return row


def undecodable_row(address: Address, key: bytes | None, value: bytes, reason: str) -> Row:
    """The row of a message that could not be read."""
    body = {
        "reason": reason,
        "key": None if key is None else base64.b64encode(key).decode(),
        "value": base64.b64encode(value).decode(),
    }
    return {
        "topic": address.topic,
        "partition": address.partition,
        "offset": address.offset,
        "type": UNDECODABLE,
        "body": msgspec.Raw(_encoder.encode(body)),
    }


def encode_rows(rows: Iterable[Row]) -> bytes:
    """Rows as JSON lines, the form in which they are inserted."""
    return _encoder.encode_lines(rows)


def _body(event: Event) -> dict[str, Any]:
    body = msgspec.structs.asdict(event)
    del body["meta"]
    if isinstance(event, SnapshotTaken):
        del body["state"]
        body["size_bytes"] = len(event.state)
    return body


def _add_figures(row: Row, event: Event) -> None:
    """Columns of their own for what is summed and filtered by all the time."""
    match event:
        case TurnGenerated():
            row["tokens"] = token_count(event.tokens)
        case RewardAssigned():
            row["score"] = event.score
            row["verdict"] = event.verdict
            row["ended_by"] = event.ended_by
        case RolloutEnded() | TrajectoryAssembled() | AttemptEnded():
            row["ended_by"] = event.ended_by
        case WeightsPublished() | WeightsLoaded() | ControlIssued():
            row["version"] = event.version
        case StepTaken():
            row["version"] = event.new_version
