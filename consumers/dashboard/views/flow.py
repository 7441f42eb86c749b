"""/flow · the run from left to right: each topic with its events, rate and partitions, and how far its reader is behind."""

from collections.abc import Mapping
from dataclasses import dataclass

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.flow import FLOW, FlowTopic
from replayground.consumers.dashboard.frame import card, duration, empty, mebibytes, share, table, tiles
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.queries.flow import PARTITIONS, RATE_SECONDS, RATES
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.reports.evaluations import newest_pass_at_1
from replayground.consumers.reports.overview import Overview, ServerStatus
from replayground.schemas.ids import now_microseconds

_MAIN = ("tasks", "rollouts", "messages", "trajectories", "rewards", "groups", "batches", "steps", "weights", "serving")
"from left to right; the other topics stand beside the flow"
# A lag above this many messages colours the topic.
_LAGGING = 100


@dataclass(frozen=True)
class _Figures:
    overview: Overview
    events: Mapping[str, Mapping[int, int]]
    "by topic and partition"
    rates: Mapping[str, float]
    "events a second by topic"
    lags: Mapping[str, Mapping[int, int]]
    "by stage and partition"


def view(request: ViewRequest) -> ViewContent:
    run = request.run()
    figures = _figures(request, run.run_id)
    overview = figures.overview
    resumed = f" · resumed {overview.starts}x" if overview.starts else ""
    ended = f" · {overview.detail}" if overview.detail else ""
    note = f"{run.job} · {run.kind} · seed {run.seed} · started by {run.started_by}{resumed}{ended}"
    body = [
        el("div", {"id": "figures", "data-live": True}, tiles(_tiles(overview))),
        _flow(figures, request.traces.follows),
        _servers(overview),
        _programs(overview),
    ]
    return ViewContent("Flow", body, run, 1.0 if overview.state == "running" else 20.0, note)


def _figures(request: ViewRequest, run_id: str) -> _Figures:
    answers, overview = request.traces.answers, request.traces.overview(run_id)
    events: dict[str, dict[int, int]] = {}
    for topic, partition, count in answers.ask(PARTITIONS, {"run": run_id}).rows:
        events.setdefault(topic, {})[partition] = count
    rates: dict[str, float] = {}
    if overview.state == "running":
        since = now_microseconds() - RATE_SECONDS * 1_000_000
        rows = answers.ask(RATES, {"run": run_id, "since": since}).rows
        rates = {topic: count / RATE_SECONDS for topic, count in rows}
    return _Figures(overview, events, rates, request.traces.partition_lags(run_id))


def _tiles(overview: Overview) -> list[tuple[str, object]]:
    figures: list[tuple[str, object]] = [
        ("phase", overview.phase.replace("_", " ")),
        ("steps", f"{overview.steps} / {overview.steps_target or '∞'}"),
        ("batch reward", share(overview.reward_mean)),
        ("held-out pass@1", share(newest_pass_at_1(overview.heldout_pass_at_1, "sampled"))),
    ]
    if overview.state == "running":
        figures += [
            ("tokens a second", f"{overview.tokens_per_second:,.0f}"),
            ("rollouts running", f"{overview.rollouts_running:,}"),
        ]
    elif overview.ended_at is not None:
        figures.append(("lasted", duration(overview.ended_at - overview.started_at)))
    rejects = el("a", {"href": address(addresses.REJECTS, overview.run_id)}, f"{overview.rejects:,}")
    figures.append(("rejects", rejects))
    if overview.infra_error_alarm is not None:
        told = f"{overview.infra_error_alarm:.0%} of the newest version"
        figures.append(("infra errors rise", el("span", {"class": "mark-word bad"}, told)))
    if overview.rejects_field:
        figures.append(("unreadable on the field", f"{overview.rejects_field:,}"))
    return figures


def _flow(figures: _Figures, follows: bool) -> Element:
    topics = {topic.topic: topic for topic in FLOW}
    stations = [_topic(topics[name], figures) for name in _MAIN]
    beside = [_topic(topic, figures) for topic in FLOW if topic.topic not in _MAIN]
    about = el("span", {"class": "soft"}, _about_lags(figures.overview, follows))
    return card(
        "From tasks to served weights",
        el("div", {"class": "flow"}, stations),
        el("h3", "Beside the flow"),
        el("div", {"class": "flow beside"}, beside),
        el("details", {"id": "partitions"}, el("summary", "By partition"), _by_partition(figures)),
        name="flow",
        more=about,
    )


def _topic(topic: FlowTopic, figures: _Figures) -> Element:
    partitions = figures.events.get(topic.topic, {})
    lags = figures.lags.get(topic.stage, {}) if topic.stage else {}
    behind = figures.overview.lag.get(topic.stage) if topic.stage else None
    rate = figures.rates.get(topic.topic)
    about = f"written by {', '.join(topic.writers) or 'nobody'}; read by {', '.join(topic.readers) or 'traces alone'}"
    return el(
        "div",
        {"class": f"station{' lagging' if (behind or 0) > _LAGGING else ''}", "title": about},
        el("span", {"class": "name"}, topic.topic),
        el("b", f"{sum(partitions.values()):,}"),
        el("span", {"class": "soft"}, f"{rate:,.1f}/s") if rate else None,
        _partitions(partitions, lags),
        el("span", {"class": "who"}, _reader(topic)),
        None if behind is None else el("span", {"class": f"lag{' some' if behind else ''}"}, f"lag {behind:,}"),
    )


def _reader(topic: FlowTopic) -> str:
    """Who reads it next; the title of the station names all readers."""
    if topic.stage is not None:
        return f"→ {topic.stage}"
    if not topic.readers:
        return "→ traces alone"
    return f"→ {topic.readers[0]}" + (f" +{len(topic.readers) - 1}" if len(topic.readers) > 1 else "")


def _by_partition(figures: _Figures) -> Element:
    """Events and lags of each partition as numbers, for those who cannot point at the bars."""
    topics = {topic.topic: topic for topic in FLOW}
    rows = [
        [topic, topics[topic].stage or "–", partition, f"{count:,}", _lag(figures, topics[topic].stage, partition)]
        for topic in topics
        for partition, count in sorted(figures.events.get(topic, {}).items())
    ]
    if not rows:
        return empty("No event of this run is in the store yet.")
    return table(("topic", "stage that reads it", "partition", "events", "lag"), rows, ("partition", "events", "lag"))


def _lag(figures: _Figures, stage: str | None, partition: int) -> str:
    lag = figures.lags.get(stage, {}).get(partition) if stage else None
    return "–" if lag is None else f"{lag:,}"


def _partitions(events: Mapping[int, int], lags: Mapping[int, int]) -> Element | None:
    if len(events) < 2:
        return None
    most = max(events.values())
    bars = []
    for place, (partition, count) in enumerate(sorted(events.items())):
        height = max(1.5, round(20 * count / most, 1))
        look = {"class": f"bar {'s2' if lags.get(partition) else 's0'}", "x": 8 * place, "width": 6, "rx": 1}
        bars.append(el("rect", look | {"y": 20 - height, "height": height}))
    told = "; ".join(
        f"partition {partition}: {count:,}" + (f", lag {lags[partition]:,}" if partition in lags else "")
        for partition, count in sorted(events.items())
    )
    shape = {"class": "partitions", "viewBox": f"0 0 {8 * len(events)} 20", "role": "img", "aria-label": told}
    return el("svg", shape, el("title", told), bars)


def _about_lags(overview: Overview, follows: bool) -> str:
    if not follows:
        return "no lags: the field is down, this is what the store has"
    if overview.state not in ("running", "lost"):
        return "no lags: the run is over"
    return "lag = messages of all runs that a stage has yet to read" if overview.lag else "lags are not known yet"


def _servers(overview: Overview) -> Element:
    if not overview.servers:
        return card("Servers", empty("No server has loaded weights of this run yet."), name="servers")
    rows = [
        [
            server.server,
            el("a", {"href": address(addresses.LINEAGE, overview.run_id, version=server.version)}, f"v{server.version}")
            if server.version is not None
            else "–",
            _about_version(overview, server),
        ]
        for server in overview.servers
    ]
    columns = ("server", "serves" if overview.state == "running" else "served", "")
    return card("Servers", table(columns, rows), name="servers")


def _about_version(overview: Overview, server: ServerStatus) -> Element:
    if server.refusal:
        return el("span", {"class": "mark-word bad"}, f"refused: {server.refusal[:300]}")
    newest = overview.version_published
    if newest is None or server.version is None or server.version >= newest:
        return el("span", {"class": "mark-word good"}, "newest")
    return el("span", {"class": "mark-word odd"}, f"newest is v{newest}")


def _programs(overview: Overview) -> Element:
    more = el("a", {"href": address(addresses.MACHINES, overview.run_id)}, "all machines")
    if not overview.programs:
        told = "No program of this run has been heard of in the last minute."
        return card("Programs", empty(told), name="programs", more=more)
    now = now_microseconds()
    rows = [
        [
            program.worker,
            program.role,
            mebibytes(program.load.get("memory_bytes")),
            f"{max(0.0, (now - program.seen) / 1e6):.0f} s ago",
        ]
        for program in overview.programs
    ]
    columns = ("worker", "role", "memory", "seen")
    return card("Programs", table(columns, rows, ("memory", "seen")), name="programs", more=more)
