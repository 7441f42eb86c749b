"""A message as it came from the log, as a row of the trace store."""

from consumers.clickhouse.rows import Row, event_row, undecodable_row
from streams.log.protocol import Delivery


def delivery_row(delivery: Delivery) -> Row:
    """The row of a message, whatever it is."""
    if delivery.event is not None:
        return event_row(delivery.address, delivery.event)
    return undecodable_row(delivery.address, delivery.key, delivery.value, delivery.undecodable or "")
