"""/trajectories · the trajectories of a run: filters, search, rewards as a histogram whose bars are filters, pages."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, counted, empty, hidden, moment, select, table
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import Bar, bar_plot, number
from replayground.consumers.dashboard.queries.trajectories import (
    ROWS,
    FoundTrajectories,
    TrajectoryFilter,
    find_trajectories,
    sessions_of,
)
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.schemas.events import EndedBy, Purpose

_OUTCOMES = ("", "passed", "failed", "excluded")
_PURPOSES = ("", *get_args(Purpose))
_ENDINGS = ("", *get_args(EndedBy))
_BARS = 20
_VALUES_MAX = 12
"with more different rewards, a bar stands for a range of them"


def view(request: ViewRequest) -> ViewContent:
    run = request.run()
    asked = TrajectoryFilter(
        run_id=run.run_id,
        purpose=request.choice("purpose", _PURPOSES),
        session=request.text("session"),
        ended_by=request.choice("ended", _ENDINGS),
        outcome=request.choice("outcome", _OUTCOMES),
        group_id=request.text("group"),
        version=request.optional_number("version"),
        low=request.optional_figure("low"),
        high=request.optional_figure("high"),
        text=request.text("text"),
        step=request.optional_number("step"),
    )
    page = request.number("page")
    found = find_trajectories(request.traces.answers, asked, page)
    body = [
        _filters(asked, sessions_of(request.traces.answers, run.run_id)),
        el(
            "div",
            {"class": "grid"},
            card("Rewards", _histogram(asked, found), name="rewards"),
            card("Outcomes", _outcomes(asked, found), name="outcomes"),
        ),
        card("Newest first", _list(asked, found, page), name="list"),
    ]
    is_live = run.is_active and page == 0 and not asked.text
    return ViewContent("Trajectories", body, run, 3.0 if is_live else 0.0, _note(asked, found))


def _note(asked: TrajectoryFilter, found: FoundTrajectories) -> str:
    low, high = asked.low, asked.high
    chosen = sum(
        attempts
        for reward, attempts in found.rewards
        if (low is None or reward >= low) and (high is None or reward <= high)
    )
    told = f"{counted(found.attempts, 'judged attempt')}"
    if low is not None or high is not None:
        told = f"{chosen:,} of {told} by reward"
    if asked.step is not None:
        told += f", the rollouts from which version {asked.step} was made"
    if asked.group_id:
        told += f", members of group {asked.group_id[:8]}"
    return told


def _query(asked: TrajectoryFilter, **changed: object) -> str:
    """The address with these filters, some of them changed."""
    query: dict[str, Any] = {
        "purpose": asked.purpose,
        "session": asked.session,
        "ended": asked.ended_by,
        "outcome": asked.outcome,
        "group": asked.group_id,
        "version": asked.version,
        "text": asked.text,
        "step": asked.step,
        "low": asked.low,
        "high": asked.high,
    }
    return address(addresses.TRAJECTORIES, asked.run_id, **(query | changed))


def _filters(asked: TrajectoryFilter, sessions: Sequence[str]) -> Element:
    known = [*sessions] if asked.session in ("", *sessions) else [asked.session, *sessions]
    search = {
        "type": "search",
        "name": "text",
        "value": asked.text,
        "placeholder": "words anybody said",
        "maxlength": 200,
    }
    version = {"name": "version", "value": asked.version, "inputmode": "numeric", "size": 5, "placeholder": "any"}
    is_filtered = _query(asked) != address(addresses.TRAJECTORIES, asked.run_id)
    return el(
        "form",
        {"class": "filters", "method": "get", "action": addresses.TRAJECTORIES},
        hidden(run=asked.run_id, group=asked.group_id, step=asked.step),
        hidden(low=None if asked.low is None else str(asked.low), high=None if asked.high is None else str(asked.high)),
        el("label", {"class": "wide"}, "search", el("input", search)),
        select("outcome", "outcome", [(name, name or "any") for name in _OUTCOMES], asked.outcome),
        select("purpose", "purpose", [(name, name or "any") for name in _PURPOSES], asked.purpose),
        select("session", "session", [("", "any"), *((name, name) for name in known)], asked.session),
        select("ended", "ended by", [(name, name or "any") for name in _ENDINGS], asked.ended_by),
        el("label", "version", el("input", version)),
        el("button", {"class": "first"}, "Show"),
        el("a", {"href": address(addresses.TRAJECTORIES, asked.run_id)}, "clear") if is_filtered else None,
    )


def _histogram(asked: TrajectoryFilter, found: FoundTrajectories) -> Element:
    bars = []
    for low, high, attempts in ranges(found.rewards):
        name = number(low) if low == high else f"{number(low)} … {number(high)}"
        # Rewards are rounded for the histogram: a bar takes what rounds to it.
        chosen = asked.low == low - _ROUNDING and asked.high == high + _ROUNDING
        target = (
            _query(asked, low=None, high=None) if chosen else _query(asked, low=low - _ROUNDING, high=high + _ROUNDING)
        )
        bars.append(Bar(name, attempts, target, chosen))
    if not bars:
        return empty("Nothing was judged yet that these filters let through.")
    return el("div", {"class": "histogram"}, bar_plot("Attempts by reward", bars, "reward"))


_ROUNDING = 0.005


def _outcomes(asked: TrajectoryFilter, found: FoundTrajectories) -> Element:
    """How many passed, failed and were excluded, each a filter."""
    if not found.attempts:
        return empty("Nothing was judged yet that these filters let through.")
    counts = {
        "passed": found.passed,
        "failed": found.attempts - found.passed - found.excluded,
        "excluded": found.excluded,
    }
    rows = [
        [
            el("span", el("span", {"class": f"dot {name}"}), name),
            el("a", {"href": _query(asked, outcome="" if asked.outcome == name else name)}, f"{count:,}"),
            f"{count / found.attempts:.1%}",
            el("progress", {"class": name, "max": found.attempts, "value": count, "aria-label": f"share {name}"}),
        ]
        for name, count in counts.items()
    ]
    return table(("outcome", "attempts", "share", ""), rows, ("attempts", "share"))


def ranges(rewards: Sequence[tuple[float, int]]) -> list[tuple[float, float, int]]:
    """Bars of a histogram: low, high and how many. Few different rewards have a bar each."""
    if len(rewards) <= _VALUES_MAX:
        return [(reward, reward, attempts) for reward, attempts in rewards]
    lowest, highest = rewards[0][0], rewards[-1][0]
    width = (highest - lowest) / _BARS
    counts = [0] * _BARS
    for reward, attempts in rewards:
        counts[min(_BARS - 1, int((reward - lowest) / width))] += attempts
    return [
        (round(lowest + place * width, 4), round(lowest + (place + 1) * width, 4), attempts)
        for place, attempts in enumerate(counts)
    ]


def _list(asked: TrajectoryFilter, found: FoundTrajectories, page: int) -> Element:
    if not found.rows:
        return empty(
            "No trajectory that has been judged passes these filters. Rollouts show here once all their scorers have."
        )
    names = ("outcome", "trajectory", "reward", "task", "answer", "turns", "version", "session", "ended by", "when")
    numbers = {"reward", "turns", "version"}
    head = el(
        "tr", [el("th", {"scope": "col", "class": "number" if name in numbers else None}, name) for name in names]
    )
    before = el("a", {"rel": "prev", "href": _query(asked, page=page - 1)}, "‹ newer")
    after = el("a", {"rel": "next", "href": _query(asked, page=page + 1)}, "older ›")
    told = f"{page * ROWS + 1:,}–{page * ROWS + len(found.rows):,}"
    return el(
        "div",
        el(
            "div",
            {"class": "scroll", "tabindex": 0},
            el("table", el("thead", head), el("tbody", [_row(asked.run_id, row) for row in found.rows])),
        ),
        el("div", {"class": "pages"}, before if page else None, told, after if found.more else None),
    )


def _row(run_id: str, row: Mapping[str, Any]) -> Element:
    outcome = outcome_of(row)
    target = address(addresses.TRAJECTORY, run_id, id=row["trajectory_id"], attempt=row["attempt_id"])
    group = address(addresses.GROUP, run_id, id=row["group_id"])
    version = "–" if row["policy_version"] is None else f"v{row['policy_version']}"
    return el(
        "tr",
        el("td", el("span", {"class": f"dot {outcome}"}), outcome),
        el(
            "td",
            el("a", {"href": target, "data-row": True}, str(row["trajectory_id"])[:8]),
            " ",
            el("a", {"href": group, "class": "soft"}, "group"),
        ),
        el("td", {"class": "number"}, number(row["reward"])),
        el("td", el("span", {"class": "short task"}, row.get("prompt") or "")),
        el("td", el("span", {"class": "short answer"}, row.get("answer") or "")),
        el("td", {"class": "number"}, row.get("turns", "–")),
        el("td", {"class": "number"}, version),
        el("td", row["session_id"] or row["purpose"] or "–"),
        el("td", row["ended_by"]),
        el("td", moment(row["timestamp"])[5:]),
    )


def outcome_of(row: Mapping[str, Any]) -> str:
    return "excluded" if row["excluded"] else "passed" if row["passed"] else "failed"
