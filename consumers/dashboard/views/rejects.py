"""/rejects · messages that a stage could not take: by stage and reason, each with its address, and how to redrive them."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, counted, empty, hidden, moment, select
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.queries import operations
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.dashboard.requests import about_worker, requested
from replayground.schemas.run import FIELD

_ROWS = 40
_BYTES_SHOWN = 400
_REQUESTS_SHOWN = 10
# Numbered as `replayground dead-letters` does: in the order of the topic, each message once.
_NUMBERED = """
SELECT run_id, id, stage, ifNull(reason, '') AS why, origin_topic, origin_partition, origin_offset, timestamp, type, topic,
       partition, offset, row_number() OVER (ORDER BY offset) AS number
FROM (SELECT * FROM events WHERE topic = 'dead-letters' AND type = 'EventRejected' ORDER BY offset LIMIT 1 BY id)
"""
_WHERE = "({run:String} = '' OR run_id = {run:String}) AND ({stage:String} = '' OR stage = {stage:String})"
_LIST = f"""
SELECT * FROM ({_NUMBERED}) WHERE {_WHERE} ORDER BY number DESC LIMIT {_ROWS + 1} OFFSET {{offset:UInt64}}
"""
# Without numbers, so that the rejects of one run are found without those of the others.
_STAGES = f"""
SELECT stage, ifNull(reason, '') AS why, uniqExact(id) AS times FROM events
WHERE topic = 'dead-letters' AND type = 'EventRejected' AND {_WHERE} GROUP BY stage, why ORDER BY times DESC LIMIT 50
"""
_BODIES = """
SELECT offset, body FROM payloads
WHERE run_id IN {runs:Array(String)} AND type = 'EventRejected' AND topic = 'dead-letters' AND offset IN {offsets:Array(Int64)}
"""


def view(request: ViewRequest) -> ViewContent:
    # Rejects of the field belong to no run: a message that could not be read does not say which.
    named = request.text("run")
    run = request.run() if named and named != FIELD else None
    asked = {"run": named, "stage": request.text("stage")}
    page = request.number("page")
    rows = request.ask(_LIST, **asked, offset=page * _ROWS)
    kinds = request.ask(_STAGES, **(asked | {"stage": ""}))
    if not kinds:
        told = "No message was rejected" + (f" by the stages of run {run.run_id}." if run else " on this field.")
        link = el("a", {"href": addresses.REJECTS}, "all rejects of the field") if named else None
        return ViewContent("Rejects", [card("Rejects", empty(told, " ", link), name="list")], run, 5.0)
    bodies = _bodies(request, rows)
    body = [
        _filter(asked, kinds),
        card("Reasons", _reasons(kinds), name="reasons"),
        card("Newest first", _list(request, rows[:_ROWS], bodies), _pages(asked, page, len(rows)), name="list"),
        card("Write them again", _redrive(request, rows[:_ROWS], asked["stage"])),
        card("Asked for on this page", _requests(request), name="requests"),
    ]
    return ViewContent(
        "Rejects", body, run, 5.0, note=f"of run {run.run_id}" if run else "of all runs, and of the field itself"
    )


def _bodies(request: ViewRequest, rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    runs, offsets = sorted({row["run_id"] for row in rows}), [row["offset"] for row in rows]
    found = request.ask(_BODIES, runs=runs, offsets=offsets)
    return {row["offset"]: msgspec.json.decode(row["body"]) for row in found}


def _filter(asked: Mapping[str, str], kinds: Sequence[Mapping[str, Any]]) -> Element:
    stages = sorted({row["stage"] for row in kinds})
    choices = [("", "all stages"), *((stage, stage) for stage in stages)]
    everything = el("a", {"href": addresses.REJECTS}, "rejects of all runs") if asked["run"] else None
    form = {"class": "filters", "method": "get", "action": addresses.REJECTS}
    return el("form", form, hidden(run=asked["run"]), select("stage", "stage", choices, asked["stage"]), everything)


def _reasons(kinds: Sequence[Mapping[str, Any]]) -> Element:
    rows = [
        el(
            "tr",
            el("td", row["stage"]),
            el("td", {"class": "number"}, f"{row['times']:,}"),
            el("td", {"class": "wide"}, row["why"]),
        )
        for row in kinds
    ]
    head = el("tr", el("th", "stage"), el("th", {"class": "number"}, "times"), el("th", "reason"))
    return el("div", {"class": "scroll", "tabindex": 0}, el("table", el("thead", head), el("tbody", rows)))


def _list(request: ViewRequest, rows: Sequence[Mapping[str, Any]], bodies: Mapping[int, Mapping[str, Any]]) -> Element:
    return el("div", [_reject(request, row, bodies.get(row["offset"], {})) for row in rows])


def _reject(request: ViewRequest, row: Mapping[str, Any], body: Mapping[str, Any]) -> Element:
    place = {name: row[name] for name in ("type", "topic", "partition", "offset")}
    original = base64.b64decode(body.get("original", ""))
    return el(
        "article",
        {"class": "say wrong"},
        el(
            "div",
            {"class": "who"},
            el("b", f"{row['number']} · {row['stage']}"),
            el("span", f"from {row['origin_topic']}/{row['origin_partition']}@{row['origin_offset']}"),
            el("span", moment(row["timestamp"])),
            el("span", f"run {row['run_id']}"),
            el(
                "a",
                {"href": address(addresses.EVENT, row["run_id"], **place), "data-row": True},
                "the reject as an event",
            ),
        ),
        el("div", {"class": "text"}, row["why"]),
        el(
            "details",
            {"id": f"bytes-{row['number']}"},
            el("summary", f"the message, {len(original):,} bytes"),
            el("div", {"class": "text tall"}, _bytes_as_text(original)),
        ),
        _ask(request, [row["id"]], "Write it again") if request.may_act else None,
    )


def _bytes_as_text(original: bytes) -> str:
    if not original:
        return "nothing is left of it: the stage gave up on the rest of a key"
    more = f"\n… {len(original) - _BYTES_SHOWN:,} more bytes" if len(original) > _BYTES_SHOWN else ""
    return repr(original[:_BYTES_SHOWN]) + more


def _pages(asked: Mapping[str, str], page: int, found: int) -> Element:
    def at(number: int) -> str:
        return address(addresses.REJECTS, asked["run"], stage=asked["stage"], page=number)

    before = el("a", {"rel": "prev", "href": at(page - 1)}, "‹ newer") if page else None
    return el(
        "div",
        {"class": "pages"},
        before,
        el("a", {"rel": "next", "href": at(page + 1)}, "older ›") if found > _ROWS else None,
    )


def _redrive(request: ViewRequest, rows: Sequence[Mapping[str, Any]], stage: str) -> Element:
    numbers = " ".join(str(row["number"]) for row in rows[:10])
    every = f"replayground dead-letters redrive --all{f' --stage {stage}' if stage else ''}"
    return el(
        "div",
        el("p", "Once the cause is mended, the same messages go to their topics again, byte for byte. From here:"),
        _ask(request, [row["id"] for row in rows], f"The {len(rows):,} of this page", about_worker(request)),
        el("p", "Or by command:"),
        el("pre", {"tabindex": 0}, f"replayground dead-letters redrive {numbers}\n{every}"),
        empty("Safe to repeat: a stage that has taken a message knows its id."),
    )


def _ask(request: ViewRequest, ids: Sequence[str], told: str, about: Element | None = None) -> Element:
    """A button that asks for these messages to be written again."""
    if not request.may_act:
        return empty("operators may, while the log is being read.")
    fields = [el("input", {"type": "hidden", "data-kind": "list", "name": "rejects", "value": one}) for one in ids]
    return el(
        "form",
        {"class": "post", "action": "/api/redrives"},
        fields,
        el("div", {"class": "filters row"}, el("button", told), about),
        el("output", {"class": "problem", "role": "status"}),
    )


def _requests(request: ViewRequest) -> Element:
    rows = operations.requests(request.store, "RedriveRequested", _REQUESTS_SHOWN)
    if not rows:
        return empty("Nothing yet.")
    return el("div", [requested(row, counted(len(row["rejects"]), "message")) for row in rows])
