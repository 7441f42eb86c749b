"""/replay · judge old trajectories again: choose runs and scorers, try it dry, start it, watch it, see what changed.

Without a run it is for choosing; `?source=&scorer=&failed=` is the choice. With `?run=` it is one replay. The page only
asks: `replayground requests` carries out what is asked for, since scorers are code (decision 0033).
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, duration, empty, moment, table, tiles
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import number
from replayground.consumers.dashboard.queries import operations, replays
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.dashboard.requests import about_worker, requested
from replayground.consumers.reports.runs import RunEntry
from replayground.schemas.errors import BadInput
from replayground.schemas.ids import now_microseconds
from replayground.streams.rules.runs import RunState
from replayground.streams.rules.scoring import BUILT_IN

_KINDS = ("practise", "eval")
"runs that have trajectories of their own"
_SOURCES_SHOWN = 12
_REQUESTS_SHOWN = 20
_REPLAYS_SHOWN = 20
_SUMS = (
    *("attempts", "agreed", "to_passed", "to_failed", "changed", "reward_before", "reward_after", "passed_before"),
    *("passed_after", "excluded_before", "excluded_after", "groups", "groups_gained", "groups_lost"),
)
"what a comparison says, as streams.rules.comparison names it"


def view(request: ViewRequest) -> ViewContent:
    if request.text("run"):
        run = request.run()
        if run.kind == "replay":
            return _one(request, run)
    entries = request.traces.runs()
    sources, scorers = request.texts("source"), request.texts("scorer")
    if request.text("run") and not sources:
        sources = [request.text("run")]
    states = [_source(request, source) for source in sources]
    is_failed_only = request.choice("failed", ("", "yes")) == "yes"
    body = [
        card("Choose", _choose(entries, states, scorers, is_failed_only)),
        card("What would be done", _proposal(request, states, scorers, is_failed_only)),
        card("Asked for on this page", _requests(request), name="requests"),
        card("Replays", _replays(entries), name="replays"),
    ]
    note = "Trajectories of runs are judged again, as a run of its own; the old rewards stay."
    return ViewContent("Replay", body, None, 3.0, note=note)


def _source(request: ViewRequest, run_id: str) -> RunState:
    """Raises BadInput, UnknownRun."""
    state = request.traces.find(run_id)
    if state.kind not in _KINDS:
        raise BadInput(f"{state.run_id} is of kind {state.kind} and has no trajectories of its own: choose its sources")
    return state


def _choose(entries: Sequence[RunEntry], states: Sequence[RunState], scorers: Sequence[str], failed: bool) -> Element:
    runs = [entry for entry in entries if entry.kind in _KINDS]
    if not runs:
        told = "No run has played yet, so there is nothing to judge again. "
        return empty(told, el("code", "replayground run"), " starts one.")
    chosen = [state.run_id for state in states]
    shown = [entry for place, entry in enumerate(runs) if place < _SOURCES_SHOWN or entry.run_id in chosen]
    # Without those that ask people: a replay asks nobody.
    asking = {question.scorer for state in states for question in state.questions}
    names = sorted({name for state in states for name in state.scorers} - asking | {scorer.name for scorer in BUILT_IN})
    return el(
        "form",
        {"method": "get", "action": addresses.REPLAY},
        el("h3", "Runs"),
        [
            _tick("source", entry.run_id, entry.run_id in chosen, f" {entry.run_id} · {entry.job} · {entry.state}")
            for entry in shown
        ],
        el("h3", "Scorers; none ticked = those that the tasks name, as their code is now"),
        el("div", {"class": "ticks"}, [_tick("scorer", name, name in scorers, f" {name}") for name in names]),
        el("h3", "Attempts"),
        _tick("failed", "yes", failed, " only those that have not passed"),
        el("p", el("button", {"class": "first"}, "Show")),
    )


def _tick(name: str, value: str, is_ticked: bool, told: str) -> Element:
    box = {"type": "checkbox", "name": name, "value": value, "checked": is_ticked}
    return el("div", el("label", {"class": "tick-box"}, el("input", box), told))


def _proposal(request: ViewRequest, states: Sequence[RunState], scorers: Sequence[str], failed: bool) -> list[Element]:
    if not states:
        return [empty("Choose a run above.")]
    parts = [f"--run {shlex.quote(state.run_id)}" for state in states]
    parts += [f"--scorer {shlex.quote(name)}" for name in scorers] + ["--failed-only"] * failed
    command = f"replayground rescore {' '.join(parts)}"
    shown: list[Element] = [
        el("p", "By command, which also takes scorers from a file, conditions in SQL, times and selections:"),
        el("pre", {"tabindex": 0}, f"{command} --dry-run\n{command}"),
    ]
    if not request.may_act:
        return [*shown, empty("From the page replays are started by operators, while the log is being read.")]
    listed = [("sources", state.run_id) for state in states] + [("scorers", name) for name in scorers]
    fields = [
        el("input", {"type": "hidden", "data-kind": "list", "name": name, "value": value}) for name, value in listed
    ]
    failed_only = el("input", {"type": "checkbox", "name": "failed_only", "checked": failed, "hidden": True})
    dry = {"name": "is_dry_run", "data-kind": "flag"}
    form = el(
        "form",
        {"class": "post", "action": "/api/replays", "data-then": address(addresses.REPLAY)},
        *(fields, failed_only),
        el(
            "div",
            {"class": "filters row"},
            el("button", dry | {"class": "first", "value": "yes"}, "Dry run"),
            el("button", dry | {"value": "no"}, "Start"),
            about_worker(request),
        ),
        el("output", {"class": "problem", "role": "status"}),
    )
    return [*shown, form]


def _requests(request: ViewRequest) -> Element:
    rows = operations.requests(request.store, "ReplayRequested", _REQUESTS_SHOWN)
    if not rows:
        return empty("Nothing yet. A dry run compares without writing a run, and is shown here.")
    return el("div", [_request(row) for row in rows])


def _request(row: Mapping[str, Any]) -> Element:
    scorers = f" by {', '.join(row['asked_scorers'])}" if row["asked_scorers"] else ""
    told = f"{row['kind']} of {', '.join(row['source_runs'])}{scorers}{', failed only' if row['where_sql'] else ''}"
    replay = el("a", {"href": address(addresses.REPLAY, row["run"])}, row["run"]) if row["run"] else None
    figures = el("details", {"id": f"figures-{row['id']}"}, el("summary", "what changed"), _figures(row["figures"]))
    return requested(row, told, replay, figures if row["figures"] else None)


def _replays(entries: Sequence[RunEntry]) -> Element:
    found = [entry for entry in entries if entry.kind == "replay"]
    if not found:
        return empty("No replay has been started on this field yet.")
    rows = [
        [
            el("a", {"href": address(addresses.REPLAY, entry.run_id), "data-row": True}, entry.run_id),
            el("span", el("i", {"class": f"dot {entry.state}"}), entry.state),
            entry.started_by,
            moment(entry.started_at),
            duration((entry.ended_at or now_microseconds()) - entry.started_at),
        ]
        for entry in found[:_REPLAYS_SHOWN]
    ]
    return table(("replay", "state", "started by", "started", "lasted"), rows)


def _one(request: ViewRequest, run: RunState) -> ViewContent:
    """One replay: how far it is, and what it changed."""
    judged, total = replays.progress(request.store, run)
    found = replays.differences(request.traces.answers, run.run_id, run.sources)
    changes = replays.greatest_changes(request.traces.answers, run.run_id, run.sources)
    sources = [(el("a", {"href": address(addresses.FLOW, source)}, source), " ") for source in run.sources]
    body = [
        card(
            "Progress", _progress(run, judged, total), el("p", {"class": "soft"}, "sources: ", sources), name="progress"
        ),
        card("What changed", _figures(found), name="differences"),
        card("Changed most", _changes(run, changes), name="changes"),
    ]
    scorers = ", ".join(f"{name}@{version}" for name, version in run.scorers.items())
    trail = (("Replay", addresses.REPLAY),)
    note = f"started by {run.started_by} · judged by {scorers or 'scorers of an older release'}"
    return ViewContent(f"Replay {run.run_id}", body, run, 2.0 if run.is_active else 0.0, note, trail)


def _progress(run: RunState, judged: int, total: int) -> Element:
    done = f"{min(judged, total):,} / {total:,}" if total else f"{judged:,}"
    lasted = (run.ended_at or now_microseconds()) - run.started_at
    figures: list[tuple[str, object]] = [
        ("attempts judged", done),
        ("state", run.reason or "running"),
        ("attempts a second", number(judged / (lasted / 1e6) if lasted >= 1e6 else None)),
        ("lasted", duration(lasted)),
    ]
    share = (
        el("progress", {"max": total, "value": min(judged, total), "aria-label": "attempts judged"}) if total else None
    )
    return el("div", share, tiles(figures), el("p", run.detail) if run.detail else None)


def _figures(told: Mapping[str, float]) -> Element:
    # What another release reports may lack some of them.
    found = dict.fromkeys(_SUMS, 0.0) | dict(told)
    count = found["attempts"]
    if not count:
        return empty("No attempt has both an old and a new reward yet.")

    def mean(name: str) -> str:
        return number(found[name] / count)

    rows = [
        ["reward, mean", mean("reward_before"), mean("reward_after")],
        ["passed", f"{found['passed_before'] / count:.1%}", f"{found['passed_after'] / count:.1%}"],
        ["excluded", f"{found['excluded_before']:,.0f}", f"{found['excluded_after']:,.0f}"],
    ]
    agreed = (
        f"{count:,.0f} attempts; they agree on {found['agreed'] / count:.2%}. {found['to_passed']:,.0f} now pass, "
        f"{found['to_failed']:,.0f} now fail, {found['changed']:,.0f} have another reward."
    )
    groups = (
        f"Of {found['groups']:,.0f} groups {found['groups_gained']:,.0f} gained a learning signal and "
        f"{found['groups_lost']:,.0f} lost it."
    )
    return el(
        "div",
        table(("", "before", "after"), rows, ("before", "after")),
        el("p", agreed),
        el("p", groups) if found["groups"] else None,
    )


def _changes(run: RunState, changes: Sequence[Mapping[str, Any]]) -> Element:
    if not changes:
        return empty("No attempt has another reward than before.")
    rows = [
        [
            el(
                "a",
                {
                    "href": address(
                        addresses.TRAJECTORY, run.run_id, id=row["trajectory_id"], attempt=row["attempt_id"]
                    ),
                    "data-row": True,
                },
                str(row["trajectory_id"])[:36],
            ),
            number(row["reward_before"]),
            number(row["reward_after"]),
            _passed(row),
        ]
        for row in changes
    ]
    return table(("trajectory", "before", "after", ""), rows, ("before", "after"))


def _passed(row: Mapping[str, Any]) -> Element | str:
    if row["passed_before"] == row["passed_after"]:
        return ""
    return el(
        "span",
        {"class": f"mark-word {'good' if row['passed_after'] else 'bad'}"},
        "now passes" if row["passed_after"] else "now fails",
    )
