"""/audit · who did what on this field: runs started, resumed and ended, commands, selections, verdicts."""

from collections.abc import Mapping
from typing import Any

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, empty, moment, select, table
from replayground.consumers.dashboard.markup import el
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.dashboard.views.trajectory import raw_link
from replayground.schemas.run import FIELD

_ROWS = 50
_SQL_MAX = 300
_KINDS = (
    *("RunStarted", "RunResumed", "RunEnded", "ControlIssued", "TrajectoriesSelected", "VerdictGiven", "QuerySaved"),
    *("ReplayRequested", "RedriveRequested", "OperatorActed"),
)
_PROGRAMS = ("feeder", "scheduler", "reloader", "trainer")
"who holds and releases weights for evaluations by itself: shown when asked for"
_LIST = f"""
SELECT run_id, type, topic, partition, offset, timestamp, sender, kind, job, started_by, ifNull(reason, '') AS why, command,
       version, requested_by, annotator, scorer, score, name, trajectories, start, trajectory_id, where_sql, source_runs, rejects
FROM events
WHERE type IN {_KINDS} AND ({{kind:String}} = '' OR type = {{kind:String}})
  AND ({{programs:UInt8}} = 1 OR type != 'ControlIssued' OR requested_by NOT IN {_PROGRAMS})
ORDER BY timestamp DESC, offset DESC LIMIT {_ROWS + 1} OFFSET {{offset:UInt64}}
"""


def view(request: ViewRequest) -> ViewContent:
    kind = request.choice("kind", ("", *_KINDS))
    programs = request.choice("programs", ("", "yes"))
    page = request.number("page")
    rows = request.ask(_LIST, kind=kind, programs=int(programs == "yes"), offset=page * _ROWS)
    form = el(
        "form",
        {"class": "filters", "method": "get", "action": addresses.AUDIT},
        select("kind", "what", [(name, name or "everything") for name in ("", *_KINDS)], kind),
        select("programs", "by", [("", "people"), ("yes", "people and programs")], programs),
    )
    kept = {"kind": kind, "programs": programs}
    before = el("a", {"rel": "prev", "href": address(addresses.AUDIT, **kept, page=page - 1)}, "‹ newer")
    after = el("a", {"rel": "next", "href": address(addresses.AUDIT, **kept, page=page + 1)}, "older ›")
    pages = el("div", {"class": "pages"}, before if page else None, after if len(rows) > _ROWS else None)
    shown = (
        table(("when", "who", "what", "run", "event"), [_entry(row) for row in rows[:_ROWS]])
        if rows
        else empty("Nobody has done anything of this kind yet.")
    )
    body = [form, card("Newest first", shown, pages, name="list")]
    return ViewContent(
        "Audit", body, refresh_seconds=5.0, note="Everything that somebody did stands on the log as an event."
    )


def _entry(row: Mapping[str, Any]) -> list[object]:
    # What is done to the field belongs to no run.
    flow = {"href": address(addresses.FLOW, row["run_id"]), "data-row": True}
    return [
        moment(row["timestamp"]),
        el("b", _who(row)),
        el("span", {"class": "wide"}, _what(row)),
        el("a", flow, row["run_id"]) if row["run_id"] != FIELD else "–",
        raw_link(row["run_id"], row),
    ]


def _who(row: Mapping[str, Any]) -> str:
    return str(row["started_by"] or row["requested_by"] or row["annotator"] or row["sender"])


def _what(row: Mapping[str, Any]) -> str:
    version = "" if row["version"] is None else f" of v{row['version']}"
    told: dict[str, str] = {
        "QuerySaved": f"kept “{row['name']}” as {row['kind']}: {row['where_sql'][:_SQL_MAX]}",
        "ReplayRequested": f"asked for a {row['kind']} of {', '.join(row['source_runs'])}",
        "RedriveRequested": f"asked for {len(row['rejects']):,} rejected messages to be written again",
        "OperatorActed": f"{row['command']}: {row['why']}",
        "RunStarted": f"started a run of kind {row['kind']}: {row['job']}",
        "RunResumed": f"resumed the run, start {row['start']}",
        "RunEnded": f"the run ended: {row['why']}",
        "ControlIssued": f"{row['command']}{version}: {row['why']}",
        "TrajectoriesSelected": f"selected {row['trajectories']:,} trajectories as “{row['name']}”",
        "VerdictGiven": f"gave {row['score']} for {row['scorer']} to trajectory {(row['trajectory_id'] or '')[:8]}",
    }
    return told[row["type"]]
