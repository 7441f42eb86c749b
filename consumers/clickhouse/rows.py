"""Converts an event and its address to a row of the trace store. Pure: the same message always gives the same row.

The envelope and a few figures that are queried often are columns. The rest is `body`: the event as JSON without its
envelope, with bytes (token ids, log-probabilities) in base64. Only the state of a snapshot is left out.
"""

import base64
from collections.abc import Iterable
from typing import Any

import msgspec

from replayground.schemas.events import (
    Address,
    AttemptEnded,
    ControlIssued,
    Event,
    RewardAssigned,
    RolloutEnded,
    SnapshotTaken,
    StepTaken,
    TrajectoriesSelected,
    TrajectoryAssembled,
    TurnGenerated,
    WeightsLoaded,
    WeightsPublished,
)
from replayground.schemas.packed import token_count

UNDECODABLE = "undecodable"
"type of a message that cannot be decoded; it has a row too, so that rows can be counted against messages"

Row = dict[str, Any]

_encoder = msgspec.json.Encoder()


def event_row(address: Address, event: Event) -> Row:
    """The row of an event."""
    row = msgspec.structs.asdict(event.meta)
    # The address where the message is. meta.topic is only what its writer says.
    row["topic"] = address.topic
    row["partition"] = address.partition
    row["offset"] = address.offset
    row["type"] = type(event).__name__
    # Encoded once, here. ClickHouse stores these bytes as text (input_format_json_read_objects_as_strings), and
    # reconcile computes its checksum over the same bytes.
    row["body"] = msgspec.Raw(_encoder.encode(_body(event)))
    _add_figures(row, event)
    return row


def undecodable_row(address: Address, key: bytes | None, value: bytes, reason: str) -> Row:
    """The row of a message that could not be decoded, with all its bytes in base64."""
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
    """Rows as JSON lines, ClickHouse's format JSONEachRow."""
    return _encoder.encode_lines(rows)


def _body(event: Event) -> dict[str, Any]:
    body = msgspec.structs.asdict(event)
    del body["meta"]
    # The state is as large as the memory of its program, and nobody queries it.
    if isinstance(event, SnapshotTaken):
        del body["state"]
        body["size_bytes"] = len(event.state)
    # Packed addresses, millions perhaps: they are read from the log.
    if isinstance(event, TrajectoriesSelected):
        for packed in ("partitions", "offsets", "group_sizes"):
            del body[packed]
        body["trajectories"] = token_count(event.partitions)
    return body


def _add_figures(row: Row, event: Event) -> None:
    """Adds the figures that have columns of their own, because queries sum and filter by them."""
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
