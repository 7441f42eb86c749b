"""/event · one event as it stands on the log: its address, its envelope, and all of its fields."""

from typing import Any

import msgspec

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, moment
from replayground.consumers.dashboard.markup import el
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.reports.runs import UnknownRun

# The whole sorting key: one granule is read, however many events there are.
_EVENT = """
SELECT * FROM events WHERE run_id = {run:String} AND type = {type:String} AND topic = {topic:String}
  AND partition = {partition:Int32} AND offset = {offset:Int64} LIMIT 1
"""
_BODY = _EVENT.replace("*", "body").replace("events", "payloads")
_ENVELOPE = (
    *("id", "type", "timestamp", "sender", "receiver", "caller", "category", "session_id", "purpose", "policy_version"),
    *("task_id", "group_id", "trajectory_id", "attempt_id", "seq", "correlation_id", "causation_id", "idempotency_key"),
    *("headers",),
)
_CHARACTERS_MAX = 400_000


def view(request: ViewRequest) -> ViewContent:
    # Not looked up among the runs: events of the field itself belong to none.
    asked: dict[str, Any] = {
        "run": request.text("run"),
        "type": request.text("type"),
        "topic": request.text("topic"),
        "partition": request.number("partition"),
        "offset": request.number("offset"),
    }
    rows, bodies = request.ask(_EVENT, **asked), request.ask(_BODY, **asked)
    place = f"{asked['topic'][:80]}/{asked['partition']}@{asked['offset']}"
    if not rows or not bodies:
        raise UnknownRun(f"no event of this kind and run stands at {place}")
    row = rows[0]
    known = [(name, _shown(name, row[name])) for name in _ENVELOPE if row.get(name) not in (None, "", {})]
    trajectory_id = row["trajectory_id"]
    link = address(addresses.TRAJECTORY, row["run_id"], id=trajectory_id, attempt=row["attempt_id"])
    more = el("a", {"href": link}, "its trajectory") if trajectory_id else None
    body = [
        card(
            "Envelope",
            el("dl", {"class": "facts"}, [(el("dt", name), el("dd", told)) for name, told in known]),
            more=more,
        ),
        card("Fields", el("pre", {"class": "tall", "tabindex": 0}, _indented(bodies[0]["body"]))),
    ]
    return ViewContent(f"{row['type']} {place}", body, note=f"run {row['run_id']}")


def _shown(name: str, value: Any) -> str:
    if name == "timestamp":
        return f"{moment(value)} UTC ({value})"
    return ", ".join(f"{key}={told}" for key, told in value.items()) if isinstance(value, dict) else str(value)


def _indented(body: str) -> str:
    text = msgspec.json.format(body, indent=2)
    if len(text) <= _CHARACTERS_MAX:
        return text
    return (
        f"{text[:_CHARACTERS_MAX]}\n… {len(text) - _CHARACTERS_MAX:,} more characters: `replayground tail` shows them"
    )
