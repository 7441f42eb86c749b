"""/machines · programs, sandboxes and servers of a run: what each was doing when it was last heard of."""

from collections.abc import Mapping, Sequence
from typing import Any

from replayground.consumers.clickhouse.query_cache import CachedQuery
from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, duration, empty, mebibytes, moment, table
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import Curve, line_plot, number
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.schemas.ids import now_microseconds
from replayground.streams.rules.runs import RunState

_SILENT_MICROSECONDS = 30_000_000
_SHOWN_FIRST = ("running", "busy_share", "progress", "version", "lag")
"figures of a heartbeat that have a place of their own"
_POINTS = 120
_WORKERS = CachedQuery(
    """
SELECT worker, any(role) AS role, argMax(told.load, timestamp) AS load, max(timestamp) AS seen,
       max(told.load['memory_bytes_peak']) AS peak
FROM events AS told WHERE run_id = {run:String} AND type = 'WorkerSeen' GROUP BY worker ORDER BY role, worker LIMIT 500
""",
    ("WorkerSeen",),
    seconds=2.0,
)


def _over_time(figure: str, name: str, where: str = "1") -> CachedQuery:
    """The largest value of a figure of heartbeats in each of _POINTS stretches of the run, by role."""
    return CachedQuery(
        f"""
SELECT role, intDiv((timestamp - begun) * {_POINTS}, lasted) AS place, any(begun) + any(lasted) / {_POINTS} * place AS x,
       max({figure}) AS {name}
FROM
(
    SELECT role, load, timestamp, min(timestamp) OVER () AS begun, max(timestamp) OVER () - begun + 1 AS lasted
    FROM events WHERE run_id = {{run:String}} AND type = 'WorkerSeen' AND {where}
)
GROUP BY role, place ORDER BY role, place
""",
        ("WorkerSeen",),
        seconds=10.0,
    )


_MEMORY = _over_time("load['memory_bytes'] / 1048576", "mebibytes", "mapContains(load, 'memory_bytes')")
_SANDBOXES_OPEN = _over_time("load['sandboxes']", "sandboxes", "mapContains(load, 'sandboxes')")
_SERVERS = CachedQuery(
    """
SELECT server, argMaxIf(version, timestamp, isNull(refusal)) AS version, countIf(isNull(refusal)) AS loads,
       countIf(isNotNull(refusal)) AS refusals, max(load_seconds) AS slowest, max(probe_gap) AS gap, max(timestamp) AS seen
FROM events AS loaded WHERE run_id = {run:String} AND type = 'WeightsLoaded' GROUP BY server ORDER BY server LIMIT 200
""",
    ("WeightsLoaded",),
)
_SANDBOXES = CachedQuery(
    """
SELECT started.isolation AS isolation, started.worker AS worker, count() AS attempts, countIf(ended.ended_by = '') AS open,
       countIf(ended.ended_by = 'infra_error') AS lost, max(started.timestamp) AS newest
FROM
(
    SELECT attempt_id, isolation, worker, timestamp FROM events WHERE run_id = {run:String} AND type = 'RolloutStarted'
) AS started
LEFT ANY JOIN
(SELECT attempt_id, ended_by FROM events WHERE run_id = {run:String} AND type = 'RolloutEnded') AS ended
ON started.attempt_id = ended.attempt_id
GROUP BY isolation, worker ORDER BY attempts DESC LIMIT 200
""",
    ("RolloutStarted", "RolloutEnded"),
    seconds=5.0,
)

# Attempts that hold a sandbox, or may: a call of a tool opens it, the end of the attempt gives it back.
_RUNNING = CachedQuery(
    """
SELECT trajectory_id, attempt_id, worker, isolation, timestamp FROM events
WHERE run_id = {run:String} AND type = 'RolloutStarted' AND attempt_id NOT IN
(SELECT attempt_id FROM events WHERE run_id = {run:String} AND type = 'RolloutEnded')
ORDER BY timestamp LIMIT 20
""",
    ("RolloutStarted", "RolloutEnded"),
    seconds=3.0,
)


def view(request: ViewRequest) -> ViewContent:
    run = request.run()

    def ask(question: CachedQuery) -> list[dict[str, Any]]:
        return request.traces.answers.ask(question, {"run": run.run_id}).dicts()

    newest = request.traces.overview(run.run_id).version_published
    body = [
        card("Programs", _workers(ask(_WORKERS), run.is_active), name="workers"),
        card("Servers", _servers(run.run_id, ask(_SERVERS), newest), name="servers"),
        card("Sandboxes", _sandboxes(ask(_SANDBOXES)), name="sandboxes"),
        card("Attempts without an end, the oldest first", _running(run, ask(_RUNNING)), name="running"),
        el(
            "div",
            {"class": "grid", "id": "plots", "data-live": True},
            _plot("Sandboxes open", "sandboxes", ask(_SANDBOXES_OPEN), run.started_at),
            _plot("MiB of the largest program", "mebibytes", ask(_MEMORY), run.started_at),
        ),
    ]
    return ViewContent("Machines", body, run, 3.0 if run.is_active else 0.0)


def _workers(rows: Sequence[Mapping[str, Any]], is_active: bool) -> Element:
    if not rows:
        return empty("No program has written a heartbeat yet; each does so every few seconds.")
    now = now_microseconds()
    # A column that says nothing of anybody would only push the others out of sight.
    first = [name for name in _SHOWN_FIRST if any(name in row["load"] for row in rows)]
    named = (name.replace("_", " ") for name in first)
    columns = ("worker", "role", "seen", "memory", "peak", *named, "other figures")
    return table(columns, [_worker(row, first, is_active, now) for row in rows], columns[3:-1])


def _worker(row: Mapping[str, Any], shown_first: Sequence[str], is_active: bool, now: int) -> list[object]:
    load = dict(row["load"])
    is_silent = now - row["seen"] > _SILENT_MICROSECONDS
    seen = f"{duration(max(0, now - row['seen']))} ago" if is_active else moment(row["seen"])
    memory, peak = load.pop("memory_bytes", None), row["peak"]
    load.pop("memory_bytes_peak", None)
    first = [number(load.pop(name, None)) for name in shown_first]
    others = ", ".join(f"{name} {number(value)}" for name, value in sorted(load.items()))
    return [
        row["worker"],
        row["role"],
        el("span", {"class": "mark-word odd" if is_silent and is_active else ""}, seen),
        mebibytes(memory),
        mebibytes(peak),
        *first,
        el("span", {"class": "short", "title": others}, others or "–"),
    ]


def _servers(run_id: str, rows: Sequence[Mapping[str, Any]], newest: int | None) -> Element:
    if not rows:
        return empty("No server has loaded weights of this run yet.")
    shown = [
        [
            row["server"],
            el("a", {"href": address(addresses.LINEAGE, run_id, version=row["version"])}, f"v{row['version']}"),
            _standing(row["version"], newest),
            f"{row['loads']:,}",
            f"{row['refusals']:,}",
            f"{number(row['slowest'])} s",
            number(row["gap"]),
            moment(row["seen"]),
        ]
        for row in rows
    ]
    columns = ("server", "version", "", "loads", "refusals", "slowest load", "largest probe gap", "last load")
    return table(columns, shown, ("loads", "refusals", "slowest load", "largest probe gap"))


def _standing(version: int | None, newest: int | None) -> Element:
    # The newest version is looked up at another moment than the servers.
    if newest is None or (version is not None and version >= newest):
        return el("span", {"class": "mark-word good"}, "newest")
    return el("span", {"class": "mark-word odd"}, f"newest is v{newest}")


def _sandboxes(rows: Sequence[Mapping[str, Any]]) -> Element:
    if not rows:
        return empty("No attempt has begun yet. A sandbox is leased at the first tool call of an attempt.")
    shown = [
        [
            row["isolation"] or "none",
            row["worker"],
            f"{row['attempts']:,}",
            f"{row['open']:,}",
            f"{row['lost']:,}",
            moment(row["newest"]),
        ]
        for row in rows
    ]
    columns = ("isolation", "worker", "attempts", "without an end", "infra errors", "newest")
    return table(columns, shown, columns[2:5])


def _running(run: RunState, rows: Sequence[Mapping[str, Any]]) -> Element:
    if not rows:
        return empty("None: every attempt that has begun has ended, and has given its sandbox back.")
    now = now_microseconds()
    shown = [
        [
            el("a", {"href": _address_of(run.run_id, row), "data-row": True}, str(row["trajectory_id"])[:8]),
            row["worker"],
            row["isolation"] or "none",
            f"{duration(max(0, now - row['timestamp']))} ago" if run.is_active else moment(row["timestamp"]),
        ]
        for row in rows
    ]
    return table(("trajectory", "worker", "isolation", "begun"), shown)


def _address_of(run_id: str, row: Mapping[str, Any]) -> str:
    return address(addresses.TRAJECTORY, run_id, id=row["trajectory_id"], attempt=row["attempt_id"])


def _plot(title: str, figure: str, rows: Sequence[Mapping[str, Any]], started_at: int) -> Element:
    roles = sorted({row["role"] for row in rows})
    curves = [
        Curve(role, [((row["x"] - started_at) / 6e7, row[figure]) for row in rows if row["role"] == role], slot)
        for slot, role in enumerate(roles)
    ]
    return el("section", {"class": "card"}, line_plot(title, curves, x_label="minutes", x_is_whole=False))
