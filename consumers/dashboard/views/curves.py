"""/curves · what a run learns: its figures over weight versions. A click on a step opens the rollouts of its batch."""

from collections.abc import Callable, Sequence

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, empty, moment, share, table, tiles
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import Curve, line_plot, number, stacked_plot
from replayground.consumers.dashboard.queries.curves import RunCurves, StepPoint, curves_of, interval
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.reports.evaluations import Evaluation
from replayground.schemas.ids import now_microseconds

_ROWS = 25
_STAGES_MAX = 7
_COLUMNS = ("version", "made", "reward", "passed", "entropy", "KL", "staleness", "gradient", "seconds", "")


def view(request: ViewRequest) -> ViewContent:
    run = request.run()
    overview = request.traces.overview(run.run_id)
    curves = curves_of(request.traces.answers, run.run_id, now_microseconds())
    note = f"{run.job} · seed {run.seed} · {overview.phase.replace('_', ' ')}" + (
        f" · {run.detail}" if run.detail else ""
    )
    refresh_seconds = 2.0 if overview.state == "running" else 30.0
    if not curves.steps and not curves.evaluations:
        told = empty(
            "No step was taken and no evaluation has ended yet. Until then the ",
            _link("flow", run.run_id),
            " shows what happens.",
        )
        return ViewContent("Curves", [el("div", {"id": "none", "data-live": True}, told)], run, refresh_seconds, note)
    body = [
        el("div", {"id": "figures", "data-live": True}, tiles(_figures(overview.steps, overview.steps_target, curves))),
        el(
            "div",
            {"class": "grid", "id": "plots", "data-live": True},
            [el("section", {"class": "card"}, one) for one in _plots(run.run_id, curves)],
        ),
        card("Steps", _steps(request, run.run_id, curves.steps), name="steps"),
        card("Held-out evaluations", _evaluations(run.run_id, curves.evaluations), name="evaluations"),
    ]
    return ViewContent("Curves", body, run, refresh_seconds, note)


def _link(name: str, run_id: str) -> Element:
    return el("a", {"href": address(addresses.FLOW, run_id)}, name)


def _figures(steps: int, target: int, curves: RunCurves) -> list[tuple[str, object]]:
    newest = curves.steps[-1].metrics if curves.steps else {}
    sampled, greedy = curves.complete("sampled"), curves.complete("greedy")
    return [
        ("steps", f"{steps} / {target or '∞'}"),
        ("batch reward", share(newest.get("reward_mean"))),
        ("held-out pass@1", _with_interval(sampled)),
        ("greedy", _with_interval(greedy)),
        ("staleness", number(newest.get("staleness_max"))),
        ("entropy", number(newest.get("entropy"))),
    ]


def _with_interval(evaluations: Sequence[Evaluation]) -> object:
    if not evaluations:
        return "–"
    low, high = interval(evaluations[-1].pass_at_1, evaluations[-1].ended)
    return [share(evaluations[-1].pass_at_1), " ", el("small", {"class": "soft"}, f"{low:.2f}–{high:.2f}")]


def _plots(run_id: str, curves: RunCurves) -> list[Element]:
    def rollouts(version: float) -> str:
        return address(addresses.TRAJECTORIES, run_id, step=int(version))

    def evaluation(version: float) -> str:
        return address(addresses.TRAJECTORIES, run_id, session=f"eval-v{int(version):04d}-sampled")

    def lines(title: str, *named: tuple[str, str], high: float | None = None) -> Element:
        drawn = [
            Curve(name, curves.points(metric), slot, is_dashed=slot > 0) for slot, (metric, name) in enumerate(named)
        ]
        return line_plot(title, drawn, y_high=high, link=rollouts)

    return [
        lines("Reward of each batch", ("reward_mean", "reward"), ("pass_rate", "passed")),
        _pass_at_1(curves, evaluation),
        lines("Entropy, nats a token", ("entropy", "entropy")),
        lines("KL to the sampling policy (k3), nats", ("k3", "k3")),
        lines("Staleness, versions", ("staleness_max", "oldest"), ("staleness_mean", "mean")),
        lines("Gradient norm", ("gradient_norm", "norm")),
        _seconds(curves.steps, rollouts),
        lines("Server and trainer disagree by, nats", ("logprob_gap_max", "largest"), ("logprob_gap_mean", "mean")),
    ]


def _pass_at_1(curves: RunCurves, link: Callable[[float], str]) -> Element:
    named = (("sampled", "sampled", 0), ("greedy", "greedy", 1))
    drawn = [
        Curve(name, curves.pass_at_1(kind), slot, marks=True, interval=curves.intervals(kind))
        for kind, name, slot in named
    ]
    return line_plot("Held-out pass@1, 95 % intervals", drawn, y_low=0.0, y_high=1.0, link=link)


def _seconds(steps: Sequence[StepPoint], link: Callable[[float], str]) -> Element:
    totals: dict[str, float] = {}
    for step in steps:
        for stage, seconds in step.seconds.items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    largest = sorted(totals, key=lambda stage: -totals[stage])[:_STAGES_MAX]
    drawn = [
        Curve(stage, [(float(step.version), step.seconds.get(stage, 0.0)) for step in steps], slot)
        for slot, stage in enumerate(largest)
    ]
    return stacked_plot("A step by stage, seconds", drawn, link=link)


def _steps(request: ViewRequest, run_id: str, steps: Sequence[StepPoint]) -> Element:
    if not steps:
        return empty("None yet.")
    page = request.number("page")
    newest_first = steps[::-1]
    shown = newest_first[page * _ROWS : (page + 1) * _ROWS]
    rows = [_step(run_id, step) for step in shown]
    before = el("a", {"rel": "prev", "href": address(addresses.CURVES, run_id, page=page - 1)}, "‹ newer")
    after = el("a", {"rel": "next", "href": address(addresses.CURVES, run_id, page=page + 1)}, "older ›")
    pages = el("div", {"class": "pages"}, before if page else None, after if (page + 1) * _ROWS < len(steps) else None)
    return el("div", table(_COLUMNS, rows, _COLUMNS[2:9]), pages)


def _step(run_id: str, step: StepPoint) -> list[object]:
    figures = [
        number(step.metrics.get(name))
        for name in ("reward_mean", "pass_rate", "entropy", "k3", "staleness_max", "gradient_norm")
    ]
    rollouts = address(addresses.TRAJECTORIES, run_id, step=step.version)
    return [
        el("a", {"href": address(addresses.BATCHES, run_id, step=step.version), "data-row": True}, f"v{step.version}"),
        moment(step.timestamp),
        *figures,
        number(sum(step.seconds.values())),
        el("a", {"href": rollouts}, "rollouts"),
    ]


def _evaluations(run_id: str, evaluations: Sequence[Evaluation]) -> Element:
    if not evaluations:
        return empty("None yet: the feeder submits the held-out tasks when a version is due for it.")
    rows = [
        [
            el("a", {"href": address(addresses.TRAJECTORIES, run_id, session=one.session)}, f"v{one.version}"),
            one.kind,
            _with_interval([one]) if one.ended else "–",
            f"{one.ended} of {one.tasks}",
            "" if one.complete else el("span", {"class": "mark-word odd"}, "not complete"),
        ]
        for one in reversed(evaluations[-100:])
    ]
    return table(("version", "kind", "pass@1", "tasks ended", ""), rows, ("pass@1", "tasks ended"))
