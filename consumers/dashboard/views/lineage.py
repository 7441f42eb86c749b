"""/lineage · where a weight version comes from and what it led to, as a graph from left to right.

sampled by v5, v6 ─► batch 6 ─► step v7 ─► servers that loaded v7 ─► batches with rollouts of v7
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, counted, duration, empty, hidden, moment
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import number
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.reports.runs import UnknownRun
from replayground.streams.rules.runs import RunState

_AHEAD_MAX = 200
"versions after this one whose batches are searched for its rollouts"
_NODES_MAX = 12
_BATCH = """
SELECT index, members, groups, policy_floor, timestamp, member_trajectories FROM events
WHERE run_id = {run:String} AND type = 'BatchCut' AND base_version = {version:Int64} - 1 ORDER BY offset LIMIT 1
"""
_SAMPLED_BY = """
SELECT policy_version_oldest AS version, uniqExact(assumeNotNull(trajectory_id)) AS trajectories FROM events
WHERE run_id IN {runs:Array(String)} AND type = 'AttemptEnded' AND trajectory_id IN {ids:Array(String)}
GROUP BY version ORDER BY version
"""
_WEIGHTS = """
SELECT kind, base_version, size_bytes, files, timestamp, copied_from_run, copied_from_version FROM events
WHERE run_id = {run:String} AND type = 'WeightsPublished' AND version = {version:Int64} ORDER BY offset LIMIT 1
"""
_STEP = """
SELECT kind, metrics, stage_seconds, timestamp FROM events
WHERE run_id = {run:String} AND type = 'StepTaken' AND version = {version:Int64} ORDER BY offset LIMIT 1
"""
_SERVERS = """
SELECT server, min(timestamp) AS first, anyIf(loaded.refusal, isNotNull(loaded.refusal)) AS refusal,
       countIf(isNull(loaded.refusal)) AS loads
FROM events AS loaded WHERE run_id = {run:String} AND type = 'WeightsLoaded' AND version = {version:Int64}
GROUP BY server ORDER BY server LIMIT 50
"""
_LED_TO = f"""
SELECT base_version + 1 AS version, count() AS trajectories FROM
(
    SELECT base_version, arrayJoin(member_trajectories) AS id FROM events
    WHERE run_id = {{run:String}} AND type = 'BatchCut'
      AND base_version BETWEEN {{version:Int64}} AND {{version:Int64}} + {_AHEAD_MAX}
)
WHERE id IN
(
    SELECT assumeNotNull(trajectory_id) FROM events
    WHERE run_id = {{run:String}} AND type = 'AttemptEnded' AND policy_version_oldest = {{version:Int64}}
)
GROUP BY version ORDER BY version LIMIT {_NODES_MAX}
"""
_NEWEST = "SELECT max(version) AS version FROM events WHERE run_id = {run:String} AND type = 'WeightsPublished' GROUP BY run_id"


@dataclass(frozen=True)
class _Node:
    name: str
    about: str
    href: str | None = None
    is_chosen: bool = False


def view(request: ViewRequest) -> ViewContent:
    run = request.run()
    version = request.optional_number("version")
    if version is None:
        newest = request.ask(_NEWEST, run=run.run_id)
        if not newest:
            told = "No weights were published yet, so there is nothing to trace back."
            return ViewContent("Lineage", [el("div", {"id": "none", "data-live": True}, empty(told))], run, 3.0)
        version = int(newest[0]["version"])
    weights = request.ask(_WEIGHTS, run=run.run_id, version=version)
    if not weights:
        raise UnknownRun(f"run {run.run_id} has published no version {version}")
    columns = [*_before(request, run, version), *_made(request, run, version), *_after(request, run, version)]
    form = el(
        "form",
        {"method": "get", "action": addresses.LINEAGE},
        hidden(run=run.run_id),
        el("label", "version ", el("input", {"name": "version", "value": version, "inputmode": "numeric", "size": 6})),
        el("button", "Show"),
    )
    one = weights[0]
    size = f"{counted(one['files'], 'file')}, {one['size_bytes'] / 2**20:,.1f} MiB"
    note = f"{one['kind']} weights, {size}, published {moment(one['timestamp'])}"
    if one["copied_from_run"]:
        note += f"; a copy of v{one['copied_from_version']} of run {one['copied_from_run']}"
    body = [card("From rollouts to weights to rollouts", _graph(columns), _steps(run, version), more=form)]
    return ViewContent(f"Lineage of v{version}", body, run, note=note)


def _before(request: ViewRequest, run: RunState, version: int) -> list[tuple[str, list[_Node]]]:
    batches = request.ask(_BATCH, run=run.run_id, version=version)
    if not batches:
        return [("sampled by", []), ("batch", [])]
    batch = batches[0]
    ids = batch["member_trajectories"]
    rows = request.ask(_SAMPLED_BY, runs=[run.run_id, *run.sources], ids=ids)
    sampled = [
        _Node(
            "no weights" if row["version"] is None else f"v{row['version']}",
            f"{row['trajectories']} trajectories",
            None if row["version"] is None else address(addresses.LINEAGE, run.run_id, version=row["version"]),
        )
        for row in rows[-_NODES_MAX:]
    ]
    about = f"{batch['members']} members in {batch['groups']} groups"
    return [
        ("sampled by", sampled),
        ("batch", [_Node(f"batch {batch['index']}", about, address(addresses.BATCHES, run.run_id, step=version))]),
    ]


def _made(request: ViewRequest, run: RunState, version: int) -> list[tuple[str, list[_Node]]]:
    steps = [
        _Node(
            f"{row['kind']} step",
            f"reward {number(row['metrics'].get('reward_mean'))}, {duration(sum(row['stage_seconds'].values()) * 1e6)}",
            address(addresses.TRAJECTORIES, run.run_id, step=version),
        )
        for row in request.ask(_STEP, run=run.run_id, version=version)
    ]
    return [("step", steps), ("weights", [_Node(f"v{version}", "published", is_chosen=True)])]


def _after(request: ViewRequest, run: RunState, version: int) -> list[tuple[str, list[_Node]]]:
    servers = [
        _Node(row["server"], "loaded and verified" if row["loads"] else f"refused: {row['refusal']}"[:120])
        for row in request.ask(_SERVERS, run=run.run_id, version=version)
    ]
    led_to = [
        _Node(
            f"step v{row['version']}",
            f"{row['trajectories']} of its rollouts",
            address(addresses.LINEAGE, run.run_id, version=row["version"]),
        )
        for row in request.ask(_LED_TO, run=run.run_id, version=version)
    ]
    return [("served by", servers), ("its rollouts taught", led_to)]


def _graph(columns: Sequence[tuple[str, Sequence[_Node]]]) -> Element:
    return el(
        "div",
        {"class": "graph"},
        [
            el("div", {"class": "column"}, el("h3", name), [_node(one) for one in nodes] or empty("none"))
            for name, nodes in columns
        ],
    )


def _node(node: _Node) -> Element:
    kind = {"class": f"node{' chosen' if node.is_chosen else ''}"}
    told = (el("b", node.name), el("span", {"class": "soft"}, node.about))
    return el("a", kind | {"href": node.href, "data-row": True}, *told) if node.href else el("div", kind, *told)


def _steps(run: RunState, version: int) -> Element:
    before = el(
        "a", {"rel": "prev", "href": address(addresses.LINEAGE, run.run_id, version=version - 1)}, f"‹ v{version - 1}"
    )
    after = el(
        "a", {"rel": "next", "href": address(addresses.LINEAGE, run.run_id, version=version + 1)}, f"v{version + 1} ›"
    )
    return el("div", {"class": "pages"}, before if version else None, after)
