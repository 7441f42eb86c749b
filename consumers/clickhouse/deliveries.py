"""Converts a delivery of the log to a row of the trace store."""

from replayground.consumers.clickhouse.rows import Row, event_row, undecodable_row
from replayground.streams.log.protocol import Delivery


def delivery_row(delivery: Delivery) -> Row:
    """The row of a delivery: of its event, or of the bytes that cannot be decoded."""
    if delivery.event is not None:
        return event_row(delivery.address, delivery.event)
    # Readers of the trace store pass no run_id, so `other_run` is never set: what has no event is undecodable.
    return undecodable_row(delivery.address, delivery.key, delivery.value, delivery.undecodable or "")
