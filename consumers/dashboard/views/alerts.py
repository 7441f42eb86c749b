"""/alerts · saved queries whose number is watched: what they are, which are raised, what happened, and how to set one.

`?name=` is one of them. Who watches is consumers.alert_watch; changes are on the log, in the log of the traces program
and posted to the webhook, with the same fields.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from replayground.consumers.alert_watch import AlertLook
from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, duration, empty, moment, table
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import number
from replayground.consumers.dashboard.queries.operations import SavedQuery, alert_changes, saved_queries
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.dashboard.views.trajectory import raw_link
from replayground.schemas.ids import now_microseconds
from replayground.schemas.run import FIELD

EXAMPLES: tuple[tuple[str, str, str, float], ...] = (
    ("rejects", "SELECT count() FROM rejects WHERE time > now() - INTERVAL 10 MINUTE", "above", 0),
    (
        "no-new-weights",
        "SELECT dateDiff('minute', max(time), now()) FROM weights",
        "above",
        30,
    ),
    (
        "infra-errors",
        "SELECT avg(ended_by = 'infra_error') FROM attempts WHERE time > now() - INTERVAL 10 MINUTE",
        "above",
        0.1,
    ),
    (
        "reward-falls",
        "SELECT avg(reward) FROM outcomes WHERE purpose = 'train' AND time > now() - INTERVAL 10 MINUTE",
        "below",
        0.05,
    ),
)
"""name, statement, bound and threshold"""


def view(request: ViewRequest) -> ViewContent:
    name = request.text("name")
    alerts = {one: query for one, query in saved_queries(request.store).items() if query.use == "alert"}
    shown = {one: query for one, query in alerts.items() if name in ("", one)}
    changes = alert_changes(request.store, name)
    body = [
        card("Alerts", _list(request, shown, changes), name="list", more=_about_hook(request)),
        card(
            f"Change {name}" if name in alerts else "Set an alert", _form(request, alerts.get(name) or _draft(request))
        ),
        card("What happened", _history(changes), name="history"),
    ]
    if not name:
        body.insert(2, card("Examples", el("p", {"class": "soft"}, "A click fills the form above."), _examples()))
    trail = (("Alerts", addresses.ALERTS),) if name else ()
    title = f"Alert {name[:64]}" if name else "Alerts"
    return ViewContent(title, body, None, 3.0, note=_note(request, alerts), trail=trail)


def _note(request: ViewRequest, alerts: Mapping[str, SavedQuery]) -> str:
    if request.traces.alerts is None:
        return "The log is not being read, so nothing is watched now."
    raised = sum(s.raised_at is not None for s in request.traces.alerts.standings().values())
    return f"{raised} raised, {len(alerts)} set" if alerts else "none is set"


def _about_hook(request: ViewRequest) -> Element | None:
    watch = request.traces.alerts
    return None if watch is None else el("span", {"class": "soft"}, f"webhook: {watch.hook_state}")


def _list(request: ViewRequest, alerts: Mapping[str, SavedQuery], changes: Sequence[Mapping[str, Any]]) -> Element:
    if not alerts:
        return empty(
            "An alert is a SELECT that gives one number, and a threshold. It is asked again and again; when the number passes "
            "the threshold, it is raised here, on the log and by webhook. Set one below."
        )
    watch = request.traces.alerts
    looks = {} if watch is None else watch.looks()
    newest = {row["name"]: row for row in reversed(changes)}
    rows = [_row(query, looks.get(name), newest.get(name)) for name, query in alerts.items()]
    return table(("state", "alert", "value", "raised when", "asked", "since", ""), rows, ("value",))


def _row(query: SavedQuery, look: AlertLook | None, change: Mapping[str, Any] | None) -> list[object]:
    name = el("a", {"href": address(addresses.ALERTS, name=query.name), "data-row": True}, query.name)
    asked = "not yet" if look is None else f"{duration(max(0, now_microseconds() - look.at))} ago"
    took = "" if look is None else f", took {duration(look.seconds * 1e6)}"
    return [
        _state(look, change),
        name,
        "–" if look is None else number(look.value),
        f"{query.bound} {query.threshold:g}",
        f"{asked}{took}",
        "–" if change is None else moment(change["timestamp"]),
        el("a", {"href": address(addresses.SQL, sql=query.sql)}, "its question"),
    ]


def _state(look: AlertLook | None, change: Mapping[str, Any] | None) -> Element:
    if change is not None and change["state"] == "raised":
        return el("span", {"class": "mark-word bad"}, "raised")
    if look is not None and look.problem:
        return el("span", {"class": "mark-word odd", "title": look.problem[:400]}, "not answered")
    return el("span", {"class": "mark-word good" if look else "mark-word"}, "quiet" if look else "waiting")


def _draft(request: ViewRequest) -> SavedQuery:
    """An alert that is not set yet, from the address."""
    return SavedQuery(
        name=request.text("name")[:64],
        use="alert",
        sql=request.text("sql") or EXAMPLES[0][1],
        bound="below" if request.choice("bound", ("above", "below")) == "below" else "above",
        threshold=request.optional_figure("threshold") or 0.0,
        every_seconds=60.0,
        saved_by="",
        saved_at=0,
    )


def _form(request: ViewRequest, query: SavedQuery) -> Element:
    if not request.may_act:
        return empty("Alerts are set by operators, while the log is being read.")
    is_set = query.saved_at > 0
    name = {"name": "name", "value": query.name, "required": True, "pattern": "[a-z0-9][a-z0-9_\\-]{0,63}"}
    box = {
        "name": "sql",
        "rows": 4,
        "required": True,
        "spellcheck": "false",
        "class": "code",
        "aria-label": "statement",
    }
    figure = {"data-kind": "number", "inputmode": "decimal", "required": True, "size": 7}
    bounds = [el("option", {"value": one, "selected": query.bound == one}, one) for one in _BOUNDS]
    problem = _problem(request, query)
    return el(
        "form",
        {"class": "post", "action": "/api/queries", "data-then": addresses.ALERTS},
        el(
            "div",
            {"class": "filters row"},
            el("label", "name ", el("input", name | {"readonly": is_set, "size": 20})),
            el("label", "raised when the number is ", el("select", {"name": "bound"}, bounds)),
            el(
                "label",
                el("input", figure | {"name": "threshold", "aria-label": "threshold", "value": f"{query.threshold:g}"}),
            ),
            el(
                "label",
                "asked every ",
                el("input", figure | {"name": "every_seconds", "value": f"{query.every_seconds:g}"}),
                " s",
            ),
        ),
        el("textarea", box, query.sql),
        problem,
        el(
            "div",
            {"class": "filters row"},
            el("button", {"class": "first", "name": "use", "value": "alert"}, "Set"),
            el("button", {"name": "use", "value": "removed"}, "Remove") if is_set else None,
        ),
        el("output", {"class": "problem", "role": "status"}),
    )


_BOUNDS = ("above", "below")


def _problem(request: ViewRequest, query: SavedQuery) -> Element | None:
    watch = request.traces.alerts
    look = None if watch is None else watch.looks().get(query.name)
    return el("p", {"class": "problem"}, look.problem[:600]) if look is not None and look.problem else None


def _examples() -> Element:
    rows = [
        [
            el("a", {"href": address(addresses.ALERTS, name=name, sql=sql, bound=bound, threshold=threshold)}, name),
            f"{bound} {threshold:g}",
            el("span", {"class": "wide text"}, sql),
        ]
        for name, sql, bound, threshold in EXAMPLES
    ]
    return table(("name", "raised when", "statement"), rows)


def _history(changes: Sequence[Mapping[str, Any]]) -> Element:
    if not changes:
        return empty("No alert has been raised yet.")
    rows = [
        [
            moment(row["timestamp"]),
            el("span", {"class": f"mark-word {'bad' if row['state'] == 'raised' else 'good'}"}, row["state"]),
            el("a", {"href": address(addresses.ALERTS, name=row["name"])}, row["name"]),
            "removed" if row["value"] is None else number(row["value"]),
            f"{row['bound']} {row['threshold']:g}",
            raw_link(FIELD, row),
        ]
        for row in changes
    ]
    return table(("when", "", "alert", "value", "raised when", "event"), rows, ("value",))
