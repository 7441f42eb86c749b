"""/sql · the SQL console: completion, saved statements, charts. The address holds the statement, so an answer can be shared.

dashboard.routes runs the statement before this view is called, outside the threads that serve the page.
"""

from collections.abc import Sequence
from typing import Any

from replayground.consumers.clickhouse.migrations import TABLES
from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, empty, hidden, select
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import Bar, Curve, bar_plot, line_plot
from replayground.consumers.dashboard.queries.operations import SavedQuery, saved_queries
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.dashboard.web import SqlResult

_ROWS_SHOWN = 500
_CELL_MAX = 400
_POINTS_MAX = 1000
_BARS_MAX = 40
_SERIES_MAX = 8
_CHARTS = (("", "table alone"), ("line", "lines"), ("bar", "bars"))
EXAMPLES: tuple[tuple[str, str], ...] = (
    ("Events by type", "SELECT type, count() AS events FROM events GROUP BY type ORDER BY events DESC"),
    (
        "Reward by step of every run",
        "SELECT new_version, run_id, metrics['reward_mean'] AS reward FROM steps\n"
        "WHERE kind = 'grpo' ORDER BY new_version, run_id",
    ),
    (
        "Held-out pass@1",
        "SELECT run_id, session_id, count() AS attempts, avg(passed) AS pass_at_1 FROM outcomes\n"
        "WHERE purpose = 'eval' AND ended_by != 'infra_error' GROUP BY run_id, session_id ORDER BY session_id, run_id",
    ),
    (
        "Tools by error rate",
        "SELECT tool, count() AS calls, avg(is_error) AS errors, quantile(0.95)(milliseconds) AS p95_ms\n"
        "FROM observations GROUP BY tool ORDER BY errors DESC",
    ),
    (
        "How attempts ended",
        "SELECT ended_by, count() AS attempts FROM attempts GROUP BY ended_by ORDER BY attempts DESC",
    ),
)


def view(request: ViewRequest) -> ViewContent:
    statement = request.text("sql")
    chart = request.choice("chart", [name for name, _ in _CHARTS])
    run = request.run() if request.text("run") else None
    body = [
        card(
            "One SELECT",
            _form(request, statement or EXAMPLES[0][1], chart),
            more=el("span", {"class": "soft"}, "Ctrl-Enter asks"),
        ),
        _answer(request, chart),
        el("div", {"class": "grid"}, card("Saved", _saved(request)), card("Examples", _examples(request))),
    ]
    note = f"over run {run.run_id} alone" if run else "over all runs of the field"
    return ViewContent("SQL", [*body, _words()], run, note=note, scripts=("sql",))


def _form(request: ViewRequest, statement: str, chart: str) -> Element:
    lines = min(16, max(4, statement.count("\n") + 2))
    box = {
        "id": "sql",
        "name": "sql",
        "rows": lines,
        "spellcheck": "false",
        "autocomplete": "off",
        "aria-label": "statement",
    }
    run_id = request.text("run")
    only = {"type": "checkbox", "name": "run", "value": run_id, "checked": True}
    return el(
        "form",
        {"method": "get", "action": addresses.SQL, "id": "console"},
        el("div", {"class": "editor"}, el("textarea", box, statement), el("ul", {"id": "completions", "hidden": True})),
        el(
            "div",
            {"class": "filters row"},
            el("button", {"class": "first"}, "Ask"),
            select("chart", "show as", _CHARTS, chart),
            el("label", {"class": "tick-box"}, el("input", only), f"run {run_id} alone") if run_id else None,
            el("a", {"href": address(addresses.ALERTS, sql=statement)}, "watch its number"),
        ),
        el(
            "details", el("summary", f"{len(TABLES)} tables and views"), el("div", {"class": "text"}, ", ".join(TABLES))
        ),
    )


def _answer(request: ViewRequest, chart: str) -> Element | None:
    found = request.statement
    if found is None:
        return None
    if isinstance(found, str):
        return card("Answer", el("p", {"class": "problem"}, found[:1000]))
    more = (
        f", the first {min(len(found.rows), _ROWS_SHOWN):,} shown"
        if found.truncated or len(found.rows) > _ROWS_SHOWN
        else ""
    )
    told = f"{len(found.rows):,} rows in {found.seconds} s{more}"
    return card(
        "Answer", _chart(found, chart) if chart else None, _table(found), more=el("span", {"class": "soft"}, told)
    )


def _table(found: SqlResult) -> Element:
    if not found.rows:
        return empty("No rows.")
    numbers = [_is_number(found.rows[0][place]) for place in range(len(found.columns))]
    kind = [{"class": "number"} if number else {} for number in numbers]
    head = el("tr", [el("th", {"scope": "col"} | one, name) for one, name in zip(kind, found.columns, strict=True)])
    rows = [
        el("tr", [el("td", one, _cell(cell)) for one, cell in zip(kind, row, strict=True)])
        for row in found.rows[:_ROWS_SHOWN]
    ]
    return el("div", {"class": "scroll tall", "tabindex": 0}, el("table", el("thead", head), el("tbody", rows)))


def _cell(cell: Any) -> object:
    # A cell may hold a whole event, and a table of them would be too large for the browser.
    text = "" if cell is None else str(cell)
    if len(text) <= 60:
        return text
    return el(
        "span",
        {"class": "short", "title": text[:_CELL_MAX]},
        text if len(text) <= _CELL_MAX else f"{text[:_CELL_MAX]}…",
    )


def _is_number(cell: Any) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _chart(found: SqlResult, chart: str) -> Element:
    """The first column is x, columns of numbers are y; a second column of text tells series apart."""
    if not found.rows or len(found.columns) < 2:
        return empty("A chart needs rows with two columns: x first, then a number.")
    values = [place for place in range(1, len(found.columns)) if _is_number(found.rows[0][place])]
    if not values:
        return empty("A chart needs a column of numbers after the first one.")
    if chart == "bar":
        bars = [
            Bar(str(row[0])[:24], float(row[values[0]] or 0))
            for row in found.rows[:_BARS_MAX]
            if _is_number(row[values[0]])
        ]
        return el("div", {"class": "histogram"}, bar_plot(found.columns[values[0]], bars))
    if not _is_number(found.rows[0][0]):
        return empty("Lines need numbers in the first column; bars take any.")
    return line_plot(found.columns[values[0]], _lines(found, values), x_label=found.columns[0])


def _lines(found: SqlResult, values: Sequence[int]) -> list[Curve]:
    rows = [row for row in found.rows[:_POINTS_MAX] if _is_number(row[0])]
    has_series = values[0] > 1
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for place in values[:1] if has_series else values:
            if _is_number(row[place]):
                name = str(row[1])[:40] if has_series else found.columns[place]
                series.setdefault(name, []).append((float(row[0]), float(row[place])))
    return [Curve(name, sorted(points), slot) for slot, (name, points) in enumerate(list(series.items())[:_SERIES_MAX])]


def _saved(request: ViewRequest) -> Element:
    queries = saved_queries(request.store).values()
    none = empty("None yet. A saved statement is there for everybody; a queue is one whose trajectories people judge.")
    rows = [el("li", _link(query.name, query.sql), _mark(query)) for query in queries]
    return el("div", el("ul", {"id": "saved", "class": "plain"}, rows) if rows else none, _save(request))


def _link(name: str, statement: str, run_id: str = "") -> Element:
    form = {"method": "get", "action": addresses.SQL, "class": "inline"}
    return el("form", form, hidden(sql=statement, run=run_id), el("button", {"class": "link"}, name))


def _mark(query: SavedQuery) -> Element | None:
    target = {
        "queue": address(addresses.VERDICTS, queue=query.name),
        "alert": address(addresses.ALERTS, name=query.name),
    }
    return el("a", {"class": "mark-word", "href": target[query.use]}, query.use) if query.use in target else None


def _save(request: ViewRequest) -> Element | None:
    """Keeps the statement in the box above; assets/sql.js takes it from there."""
    if not request.may_act:
        return None
    name = {
        "name": "name",
        "required": True,
        "pattern": "[a-z0-9][a-z0-9_\\-]{0,63}",
        "size": 16,
        "placeholder": "name",
    }
    uses = [el("option", {"value": use, "selected": request.text("use") == use}, told) for use, told in _USES]
    return el(
        "form",
        {"class": "post", "id": "save", "action": "/api/queries"},
        hidden(sql=" "),
        el(
            "div",
            {"class": "filters row"},
            el("input", name | {"aria-label": "name", "title": "small letters, digits, - and _"}),
            el("select", {"name": "use", "aria-label": "use"}, uses),
            el("button", "Save"),
        ),
        el("output", {"class": "problem", "role": "status"}),
    )


_USES = (("question", "as a question"), ("queue", "as a queue for verdicts"), ("removed", "no more: remove the name"))


def _examples(request: ViewRequest) -> Element:
    rows = [el("li", _link(name, statement, request.text("run"))) for name, statement in EXAMPLES]
    return el("ul", {"class": "plain"}, rows)


def _words() -> Element:
    """What completion offers; assets/sql.js reads it."""
    return el("datalist", {"id": "words"}, [el("option", {"value": word}) for word in _WORDS])


_KEYWORDS = (
    "SELECT DISTINCT FROM WHERE GROUP BY HAVING ORDER BY LIMIT OFFSET WITH AS AND OR NOT IN LIKE ILIKE BETWEEN CASE WHEN THEN "
    "ELSE END INNER LEFT JOIN ON USING ASC DESC UNION ALL INTERVAL NULL IS"
)
_FUNCTIONS = (
    "count countIf sum sumIf avg avgIf min max any argMin argMax uniq uniqExact quantile quantiles median groupArray round if "
    "multiIf ifNull toStartOfMinute toStartOfHour dateDiff now length lower substring position concat has arrayJoin arrayMap "
    "arrayFilter arraySum mapKeys mapValues JSONExtractString JSONExtractInt JSONExtractFloat"
)
_COLUMNS = (
    "run_id session_id task_id group_id trajectory_id attempt_id time timestamp purpose policy_version topic partition offset "
    "seq type reward passed excluded ended_by score verdict scorer scorer_set evidence tool is_error error_kind content "
    "milliseconds tokens tokens_sampled turns text prompt answer reference transcript metrics new_version base_version"
)
_WORDS = tuple(dict.fromkeys([*TABLES, *_COLUMNS.split(), *_KEYWORDS.split(), *_FUNCTIONS.split()]))
