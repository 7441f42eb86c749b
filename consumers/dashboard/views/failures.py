"""/failures · why attempts of a run fail: how they ended, which tools gave errors, what was excluded, dropped or refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from replayground.consumers.clickhouse.query_cache import CachedQuery
from replayground.consumers.clickhouse.views import outcomes
from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, empty, share, table
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import Bar, bar_plot, number
from replayground.consumers.dashboard.request import ViewContent, ViewRequest

_ENDINGS = CachedQuery(
    """
SELECT ended_by, ifNull(purpose, '') AS purpose, uniqExact(id) AS attempts FROM events
WHERE run_id = {run:String} AND type = 'AttemptEnded' GROUP BY ended_by, purpose ORDER BY attempts DESC
""",
    ("AttemptEnded",),
    seconds=5.0,
)
_RESULTS = CachedQuery(
    f"""
SELECT ifNull(purpose, '') AS purpose, ended_by, count() AS attempts, sum(passed) AS passed, sum(excluded) AS excluded
FROM ({outcomes("run_id = {run:String}")}) GROUP BY purpose, ended_by ORDER BY attempts DESC
""",
    ("RewardAssigned",),
    seconds=5.0,
)
_TOOLS = CachedQuery(
    """
SELECT tool, count() AS calls, countIf(is_error) AS errors, countIf(error_kind = 'agent') AS agent,
       countIf(error_kind = 'tool') AS tool_errors, countIf(error_kind = 'infra') AS infra,
       quantile(0.5)(milliseconds) AS median, quantile(0.95)(milliseconds) AS p95
FROM events WHERE run_id = {run:String} AND type = 'ToolObserved' GROUP BY tool ORDER BY errors DESC LIMIT 50
""",
    ("ToolObserved",),
    seconds=5.0,
)
# The newest ones alone: texts are long.
_ERRORS = CachedQuery(
    """
SELECT tool, error_kind, said, count() AS times, argMax(trajectory_id, timestamp) AS trajectory_id FROM
(
    SELECT tool, error_kind, substringUTF8(content, 1, 160) AS said, trajectory_id, timestamp FROM payloads
    WHERE run_id = {run:String} AND type = 'ToolObserved' AND is_error LIMIT 20000
)
GROUP BY tool, error_kind, said ORDER BY times DESC LIMIT 30
""",
    ("ToolObserved",),
    seconds=10.0,
)
_REASONS = CachedQuery(
    """
SELECT ended_by, substringUTF8(ifNull(reason, ''), 1, 200) AS why, count() AS times,
       argMax(trajectory_id, timestamp) AS trajectory_id
FROM events WHERE run_id = {run:String} AND type = 'AttemptEnded' AND ended_by != 'answered'
GROUP BY ended_by, why ORDER BY times DESC LIMIT 30
""",
    ("AttemptEnded",),
    seconds=5.0,
)
_EXCLUDED = CachedQuery(
    """
SELECT scorer, ifNull(excluded_because, '') AS why, uniqExact(id) AS times FROM events
WHERE run_id = {run:String} AND type = 'RewardAssigned' AND verdict = 'excluded'
GROUP BY scorer, why ORDER BY times DESC LIMIT 30
""",
    ("RewardAssigned",),
    seconds=5.0,
)
_DROPPED = CachedQuery(
    """
SELECT assumeNotNull(dropped_because) AS why, uniqExact(id) AS times FROM events
WHERE run_id = {run:String} AND type = 'GroupCompleted' AND isNotNull(dropped_because) GROUP BY why ORDER BY times DESC
""",
    ("GroupCompleted",),
    seconds=5.0,
)
_REFUSED = CachedQuery(
    """
SELECT server, version, substringUTF8(ifNull(refusal, ''), 1, 300) AS why, count() AS times FROM events
WHERE run_id = {run:String} AND type = 'WeightsLoaded' AND isNotNull(refusal)
GROUP BY server, version, why ORDER BY version DESC LIMIT 30
""",
    ("WeightsLoaded",),
)
# A share that rises from version to version means that the policy has found out how to be excused.
_INFRA = CachedQuery(
    """
SELECT intDiv(assumeNotNull(policy_version_oldest), {width:UInt32}) AS place,
       min(assumeNotNull(policy_version_oldest)) AS version,
       countIf(ended_by = 'infra_error') AS infra, countIf(ended_by != 'answered') AS unanswered, count() AS attempts
FROM events WHERE run_id = {run:String} AND type = 'AttemptEnded' AND isNotNull(policy_version_oldest)
GROUP BY place ORDER BY place LIMIT 60
""",
    ("AttemptEnded",),
    seconds=5.0,
)
_BARS = 30


def view(request: ViewRequest) -> ViewContent:
    run = request.run()

    def ask(question: CachedQuery, **more: Any) -> list[dict[str, Any]]:
        return request.traces.answers.ask(question, {"run": run.run_id} | more).dicts()

    endings = ask(_ENDINGS)
    if not endings:
        told = "No attempt of this run has ended yet."
        return ViewContent("Failures", [el("div", {"id": "none", "data-live": True}, empty(told))], run, 3.0)
    newest = request.traces.overview(run.run_id).version_published or 0
    body = [
        el(
            "div",
            {"class": "grid"},
            card("How attempts ended", _endings(run.run_id, endings), name="endings"),
            card(
                "By weight version", _by_version(ask(_INFRA, width=max(1, -(-(newest + 1) // _BARS)))), name="versions"
            ),
        ),
        card("Results", _results(run.run_id, ask(_RESULTS)), name="results"),
        card("Tools", _tools(ask(_TOOLS)), name="tools"),
        card("What tools answered when they failed", _errors(run.run_id, ask(_ERRORS)), name="errors"),
        card("Why attempts ended without an answer", _reasons(run.run_id, ask(_REASONS)), name="reasons"),
        el(
            "div",
            {"class": "grid"},
            card("Excluded by scorers", _excluded(run.run_id, ask(_EXCLUDED)), name="excluded"),
            card(
                "Groups that were dropped",
                _counts(ask(_DROPPED), "Every complete group may be trained on."),
                name="dropped",
            ),
        ),
        card("Weights that servers refused", _refused(ask(_REFUSED)), name="refused"),
    ]
    return ViewContent("Failures", body, run, 10.0 if run.is_active else 0.0)


def _endings(run_id: str, endings: Sequence[Mapping[str, Any]]) -> Element:
    totals: dict[str, int] = {}
    for row in endings:
        totals[row["ended_by"]] = totals.get(row["ended_by"], 0) + row["attempts"]
    bars = [
        Bar(name, count, address(addresses.TRAJECTORIES, run_id, ended=name), slot=0 if name == "answered" else 4)
        for name, count in sorted(totals.items(), key=lambda pair: -pair[1])
    ]
    return bar_plot("Attempts by ending", bars)


def _by_version(rows: Sequence[Mapping[str, Any]]) -> Element:
    bars = [Bar(f"v{row['version']}", 100 * row["unanswered"] / row["attempts"], slot=4) for row in rows]
    return bar_plot("Per cent without an answer", bars)


def _results(run_id: str, rows: Sequence[Mapping[str, Any]]) -> Element:
    if not rows:
        return empty("Nothing was judged yet.")
    shown = [
        [
            row["purpose"] or "–",
            row["ended_by"],
            el("a", {"href": _judged(run_id, row, "")}, f"{row['attempts']:,}"),
            el("a", {"href": _judged(run_id, row, "failed")}, f"{row['attempts'] - row['passed'] - row['excluded']:,}"),
            el("a", {"href": _judged(run_id, row, "excluded")}, f"{row['excluded']:,}"),
            share(row["passed"] / row["attempts"]),
        ]
        for row in rows
    ]
    columns = ("purpose", "ended by", "judged", "failed", "excluded", "share that passed")
    return table(columns, shown, columns[2:])


def _judged(run_id: str, row: Mapping[str, Any], outcome: str) -> str:
    return address(addresses.TRAJECTORIES, run_id, purpose=row["purpose"], ended=row["ended_by"], outcome=outcome)


def _tools(rows: Sequence[Mapping[str, Any]]) -> Element:
    if not rows:
        return empty("No tool was called.")
    shown = [
        [
            row["tool"],
            f"{row['calls']:,}",
            f"{row['errors']:,}",
            share(row["errors"] / row["calls"]),
            *(row[name] or "–" for name in ("agent", "tool_errors", "infra")),
            f"{number(row['median'])} ms",
            f"{number(row['p95'])} ms",
        ]
        for row in rows
    ]
    columns = ("tool", "calls", "errors", "share", "agent's", "tool's", "infra", "median", "95 %")
    return table(columns, shown, columns[1:])


def _errors(run_id: str, rows: Sequence[Mapping[str, Any]]) -> Element:
    if not rows:
        return empty("No tool has failed.")
    shown = [
        [row["tool"], row["error_kind"] or "–", f"{row['times']:,}", _example(run_id, row), _wide(row["said"])]
        for row in rows
    ]
    return _wide_table(("tool", "whose fault", "times", "one of them", "said"), shown)


def _reasons(run_id: str, rows: Sequence[Mapping[str, Any]]) -> Element:
    if not rows:
        return empty("All attempts have answered.")
    shown = [[row["ended_by"], f"{row['times']:,}", _example(run_id, row), _wide(row["why"] or "–")] for row in rows]
    return _wide_table(("ended by", "times", "one of them", "reason"), shown)


def _excluded(run_id: str, rows: Sequence[Mapping[str, Any]]) -> Element:
    if not rows:
        return empty("No scorer has excluded an attempt.")
    more = el("a", {"href": address(addresses.TRAJECTORIES, run_id, outcome="excluded")}, "all of them")
    shown = [[row["scorer"], _wide(row["why"] or "–"), f"{row['times']:,}"] for row in rows]
    return el("div", table(("scorer", "because", "times"), shown, ("times",)), more)


def _counts(rows: Sequence[Mapping[str, Any]], otherwise: str) -> Element:
    if not rows:
        return empty(otherwise)
    return table(("because", "times"), [[row["why"], f"{row['times']:,}"] for row in rows], ("times",))


def _refused(rows: Sequence[Mapping[str, Any]]) -> Element:
    if not rows:
        return empty("No server has refused any.")
    shown = [[row["server"], f"v{row['version']}", f"{row['times']:,}", _wide(row["why"])] for row in rows]
    return _wide_table(("server", "version", "times", "because"), shown)


def _example(run_id: str, row: Mapping[str, Any]) -> Element | str:
    if not row["trajectory_id"]:
        return "–"
    return el("a", {"href": address(addresses.TRAJECTORY, run_id, id=row["trajectory_id"])}, row["trajectory_id"][:8])


def _wide(text: str) -> Element:
    return el("span", {"class": "wide"}, text)


def _wide_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Element:
    return table(columns, rows, ("times",))
