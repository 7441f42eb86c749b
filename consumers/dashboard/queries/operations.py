"""What people did to the field, from the store: saved queries, alerts and their changes, replays that were asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from replayground.consumers.clickhouse.store import Store
from replayground.schemas.events import Bound, Event, QueryUse
from replayground.schemas.run import FIELD

CHANGES = 50
"changes of alerts on the page"
_SAVED = """
SELECT name, kind AS use, where_sql AS sql, bound, threshold, every_seconds, requested_by AS saved_by, timestamp AS saved_at
FROM events WHERE run_id = {field:String} AND type = 'QuerySaved' ORDER BY offset DESC LIMIT 1 BY name
"""
_CHANGES = f"""
SELECT name, kind AS state, score AS value, bound, threshold, timestamp, type, topic, partition, offset
FROM events WHERE run_id = {{field:String}} AND type = 'AlertChanged' AND ({{name:String}} = '' OR name = {{name:String}})
ORDER BY offset DESC LIMIT {CHANGES}
"""

# The newest report of each request of one kind.
_REQUESTS = """
SELECT id, topic, partition, offset, type, kind, source_runs, asked_scorers, where_sql, rejects, requested_by,
       asked.timestamp AS timestamp, report.state AS state, report.run AS run, report.detail AS detail,
       report.figures AS figures
FROM
(
    SELECT id, topic, partition, offset, type, kind, source_runs, asked_scorers, where_sql, rejects, requested_by, timestamp
    FROM events WHERE run_id = {field:String} AND type = {type:String} ORDER BY offset DESC LIMIT {most:UInt32}
) AS asked
LEFT ANY JOIN
(
    SELECT request_id, argMax(kind, offset) AS state, argMax(name, offset) AS run,
           argMax(ifNull(reason, ''), offset) AS detail, argMax(metrics, offset) AS figures
    FROM events WHERE run_id = {field:String} AND type = 'RequestReported' GROUP BY request_id
) AS report
ON asked.id = report.request_id
ORDER BY offset DESC
"""
_WORKER = """
SELECT max(timestamp) FROM events WHERE run_id = {field:String} AND type = 'WorkerSeen' AND role = 'requests'
"""
_WORKER_MICROSECONDS = 60_000_000
_REJECTS = "SELECT DISTINCT id FROM events WHERE type = 'EventRejected' AND id IN {ids:Array(String)}"
_HAS = "SELECT 1 FROM events WHERE run_id = {run:String} AND type = {type:String} AND id = {id:String} LIMIT 1"


class SavedQuery(Struct, frozen=True, kw_only=True):
    """The newest QuerySaved of a name."""

    name: str
    use: QueryUse
    sql: str
    bound: Bound
    threshold: float
    every_seconds: float
    saved_by: str
    saved_at: int


def saved_queries(store: Store) -> Mapping[str, SavedQuery]:
    """All that are not removed, by name. Raises StoreFailed."""
    rows = store.ask(_SAVED, {"field": FIELD}).dicts()
    found = [msgspec.convert(row, SavedQuery, strict=False) for row in rows]
    return {query.name: query for query in sorted(found, key=lambda query: query.name) if query.use != "removed"}


def has(store: Store, event: Event) -> bool:
    """Whether the store has an event. Raises StoreFailed."""
    asked = {"run": event.meta.run_id, "type": type(event).__name__, "id": event.meta.id}
    return bool(store.ask(_HAS, asked).rows)


def requests(store: Store, kind: str, most: int) -> list[dict[str, Any]]:
    """The newest requests of a kind, with the newest report of each. Raises StoreFailed."""
    return store.ask(_REQUESTS, {"field": FIELD, "type": kind, "most": most}).dicts()


def is_carried_out(store: Store, now: int) -> bool:
    """Whether `replayground requests` was heard of within a minute. Raises StoreFailed."""
    return int(store.ask(_WORKER, {"field": FIELD}).rows[0][0] or 0) >= now - _WORKER_MICROSECONDS


def rejects_among(store: Store, ids: Sequence[str]) -> set[str]:
    """Those of the ids that are of rejected messages. Raises StoreFailed."""
    return {found for (found,) in store.ask(_REJECTS, {"ids": list(ids)}).rows}


def alert_changes(store: Store, name: str = "") -> list[dict[str, Any]]:
    """The newest changes of one alert or of all, newest first. Raises StoreFailed."""
    return store.ask(_CHANGES, {"field": FIELD, "name": name}).dicts()
