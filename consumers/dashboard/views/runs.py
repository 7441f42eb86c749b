"""/ · all runs of the field, live and past, and the curves of the chosen ones in one plot each."""

from collections.abc import Sequence

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, counted, duration, empty, hidden, moment, select, share
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import Curve, line_plot
from replayground.consumers.dashboard.queries.curves import RunCurves, curves_of
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.reports.runs import RunEntry
from replayground.schemas.ids import now_microseconds

_ROWS = 50
_COMPARED_MAX = 8
_COMPARED_AT_FIRST = 4
METRICS = (
    ("reward_mean", "reward"),
    ("pass_rate", "share that passed"),
    ("entropy", "entropy"),
    ("k3", "KL (k3)"),
    ("staleness_max", "staleness"),
    ("gradient_norm", "gradient norm"),
    ("loss", "loss"),
)


def view(request: ViewRequest) -> ViewContent:
    runs = request.traces.runs()
    if not runs:
        told = empty("No run has started on this field yet. ", el("code", "replayground run"), " starts one.")
        return ViewContent("Runs", [el("div", {"id": "none", "data-live": True}, told)], refresh_seconds=2.0)
    found = _found(runs, request.text("find"))
    metric = request.choice("metric", [name for name, _ in METRICS])
    compared = _compared(request, found)
    active = sum(run.state == "running" for run in runs)
    note = f"{counted(len(runs), 'run')} on this field, {active} of them running"
    body = [_plots(request, runs, compared, metric), _list(request, found, compared, metric)]
    return ViewContent("Runs", body, refresh_seconds=2.0 if active else 10.0, note=note)


def _found(runs: Sequence[RunEntry], text: str) -> list[RunEntry]:
    wanted = text.lower().split()
    return [
        run
        for run in runs
        if all(word in f"{run.run_id} {run.job} {run.state} {run.kind} {run.started_by}".lower() for word in wanted)
    ]


def _compared(request: ViewRequest, runs: Sequence[RunEntry]) -> list[str]:
    """Ids of the runs in the plots: the chosen ones, or the newest ones that have taken a step."""
    chosen = request.texts("compare")
    if not chosen:
        chosen = [run.run_id for run in runs if run.steps][:_COMPARED_AT_FIRST]
    return list(dict.fromkeys(chosen))[:_COMPARED_MAX]


def _plots(request: ViewRequest, runs: Sequence[RunEntry], compared: Sequence[str], metric: str) -> Element:
    known = {run.run_id for run in runs}
    now = now_microseconds()
    curves = {run_id: curves_of(request.traces.answers, run_id, now) for run_id in compared if run_id in known}
    name = dict(METRICS)[metric]
    chooser = el(
        "form",
        {"method": "get", "action": addresses.RUNS},
        hidden(find=request.text("find")),
        [el("input", {"type": "hidden", "name": "compare", "value": run_id}) for run_id in request.texts("compare")],
        select("metric", "figure ", METRICS, metric),
    )
    return el(
        "div",
        {"class": "grid"},
        card(f"{name[:1].upper()}{name[1:]} by step", _curves(curves, metric, name), name="metric-plot", more=chooser),
        card(
            "Held-out pass@1",
            _pass_at_1(curves),
            name="pass-plot",
            more=el("span", {"class": "soft"}, "95 % intervals"),
        ),
    )


def _curves(curves: dict[str, RunCurves], metric: str, name: str) -> Element:
    lines = [Curve(run_id, one.points(metric), slot) for slot, (run_id, one) in enumerate(curves.items())]
    return line_plot(name, lines)


def _pass_at_1(curves: dict[str, RunCurves]) -> Element:
    lines = [
        Curve(run_id, one.pass_at_1("sampled"), slot, marks=True, interval=one.intervals("sampled"))
        for slot, (run_id, one) in enumerate(curves.items())
    ]
    return line_plot("pass@1 at temperature 1", lines, y_low=0.0, y_high=1.0)


def _list(request: ViewRequest, runs: Sequence[RunEntry], compared: Sequence[str], metric: str) -> Element:
    page = request.number("page")
    shown = runs[page * _ROWS : (page + 1) * _ROWS]
    slots = {run_id: slot for slot, run_id in enumerate(compared)}
    form = {"method": "get", "action": addresses.RUNS}
    find = el(
        "input", {"type": "search", "name": "find", "value": request.text("find"), "placeholder": "id, job, state"}
    )
    return el(
        "form",
        form,
        hidden(metric=metric if metric != METRICS[0][0] else None),
        card(
            "All runs",
            _table(shown, slots) if shown else empty("No run has all of these words."),
            _pages(request, page, len(runs)),
            more=el("span", {"class": "find"}, find, el("button", "Show")),
        ),
    )


def _table(runs: Sequence[RunEntry], slots: dict[str, int]) -> Element:
    names = ("plot", "run", "state", "job", "steps", "reward", "pass@1", "started", "lasted", "by")
    head = el(
        "tr", [el("th", {"scope": "col", "class": "number" if name in _NUMBERS else None}, name) for name in names]
    )
    body = el("tbody", {"id": "runs", "data-live": True}, [_row(run, slots.get(run.run_id)) for run in runs])
    return el("div", {"class": "scroll", "tabindex": 0}, el("table", el("thead", head), body))


_NUMBERS = ("steps", "reward", "pass@1")
_TRAINING = ("practise", "retrain", "sft")
"kinds of runs that take steps"


def _row(run: RunEntry, slot: int | None) -> Element:
    number = {"class": "number"}
    box = {"type": "checkbox", "name": "compare", "value": run.run_id, "aria-label": f"show {run.run_id} in the plots"}
    lasted = duration((run.ended_at or now_microseconds()) - run.started_at) if run.started_at else "–"
    return el(
        "tr",
        el(
            "td",
            el("input", box | {"checked": slot is not None, "data-submit": True}),
            el("span", {"class": f"dot key s{slot % 8}", "aria-hidden": "true"}) if slot is not None else None,
        ),
        el("td", el("a", {"href": address(addresses.FLOW, run.run_id), "data-row": True}, run.run_id)),
        el("td", el("span", {"class": f"dot {run.state}"}), run.state.replace("_", " ")),
        el("td", el("span", {"class": "short", "title": f"{run.job}, seed {run.seed}, {run.kind}"}, run.job)),
        el("td", number, f"{run.steps} / {run.steps_target or '∞'}" if run.kind in _TRAINING else "–"),
        el("td", number, share(run.reward_mean)),
        el("td", number, share(run.pass_at_1)),
        el("td", moment(run.started_at)[:16]),
        el("td", lasted if run.ended_at or run.state == "running" else "–"),
        el("td", el("span", {"class": "short"}, run.started_by)),
    )


def _pages(request: ViewRequest, page: int, runs: int) -> Element | None:
    if runs <= _ROWS:
        return None
    kept = {"find": request.text("find")}
    before = el("a", {"rel": "prev", "href": address(addresses.RUNS, **kept, page=page - 1)}, "‹ newer")
    after = el("a", {"rel": "next", "href": address(addresses.RUNS, **kept, page=page + 1)}, "older ›")
    told = f"{page * _ROWS + 1}–{min(runs, (page + 1) * _ROWS)} of {runs:,}"
    return el("div", {"class": "pages"}, before if page else None, told, after if (page + 1) * _ROWS < runs else None)
