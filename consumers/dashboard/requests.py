"""What people asked for on the page and how far it is, as the views show it (decision 0033)."""

from collections.abc import Mapping
from typing import Any

from replayground.consumers.dashboard.frame import moment
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.queries.operations import is_carried_out
from replayground.consumers.dashboard.request import ViewRequest
from replayground.consumers.dashboard.views.trajectory import raw_link
from replayground.schemas.ids import now_microseconds
from replayground.schemas.run import FIELD

_MARKS = {"": "odd", "started": "", "finished": "good", "failed": "bad"}
"by state; empty = nobody has begun it"


def requested(row: Mapping[str, Any], told: str, *more: Element | None) -> Element:
    """One request with its newest report."""
    state = str(row["state"])
    return el(
        "article",
        {"class": "say"},
        el(
            "div",
            {"class": "who"},
            el("b", told),
            el("span", {"class": f"mark-word {_MARKS.get(state, '')}"}, state or "waiting"),
            el("span", f"{row['requested_by']}, {moment(row['timestamp'])}"),
            raw_link(FIELD, row),
        ),
        el("div", row["detail"]) if row["detail"] else None,
        *more,
    )


def about_worker(request: ViewRequest) -> Element:
    """Whether what is asked for is carried out at once."""
    command = el("code", "replayground requests")
    if is_carried_out(request.store, now_microseconds()):
        return el("span", {"class": "soft"}, "carried out by ", command, ", which is there")
    return el("span", {"class": "soft"}, "waits until somebody starts ", command, " on the machine of the field")
