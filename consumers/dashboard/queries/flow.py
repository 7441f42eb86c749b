"""How many events of a run each topic has, by partition, and how fast they come."""

from replayground.consumers.clickhouse.query_cache import CachedQuery
from replayground.schemas.events import EVENTS

RATE_SECONDS = 20
_KINDS = tuple(kind.__name__ for kind in EVENTS)

# Over the sorting key alone: no column of the envelope is read.
PARTITIONS = CachedQuery(
    "SELECT topic, partition, count() AS events FROM events WHERE run_id = {run:String} GROUP BY topic, partition",
    _KINDS,
    seconds=3.0,
)

RATES = CachedQuery(
    "SELECT topic, count() AS events FROM events WHERE run_id = {run:String} AND timestamp >= {since:Int64} GROUP BY topic",
    _KINDS,
    seconds=2.0,
    moving=("since",),
)
