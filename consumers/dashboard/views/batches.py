"""/batches · what was cut into batches, and one batch with its members by advantage."""

from collections.abc import Mapping
from typing import Any

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, empty, moment, table, tiles
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import Bar, bar_plot, number
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.dashboard.views.trajectories import ranges
from replayground.consumers.reports.runs import UnknownRun
from replayground.streams.rules.runs import RunState

_ROWS = 50
_MEMBERS_MAX = 500
_COLUMNS = ("batch", "makes", "members", "groups", "reward", "tokens", "oldest", "stale", "dropped", "cut")
_LIST = f"""
SELECT index, base_version, members, groups, arrayAvg(member_rewards) AS reward, tokens_sampled, policy_floor, groups_stale,
       groups_dropped, timestamp
FROM events WHERE run_id = {{run:String}} AND type = 'BatchCut'
ORDER BY index DESC LIMIT {_ROWS + 1} OFFSET {{offset:UInt64}}
"""
_ONE = """
SELECT id, index, base_version, members, groups, tokens_sampled, policy_floor, groups_stale, groups_dropped, scorer_sets,
       timestamp, topic, partition, offset, member_trajectories, member_groups, member_rewards, member_advantages
FROM events WHERE run_id = {run:String} AND type = 'BatchCut' AND base_version = {step:Int64} - 1 ORDER BY offset LIMIT 1
"""


def view(request: ViewRequest) -> ViewContent:
    run = request.run()
    step = request.optional_number("step")
    return _list(request, run) if step is None else _one(request, run, step)


def _list(request: ViewRequest, run: RunState) -> ViewContent:
    page = request.number("page")
    rows = request.ask(_LIST, run=run.run_id, offset=page * _ROWS)
    if not rows:
        told = "No batch was cut yet: one is cut as soon as enough groups are complete and not stale."
        return ViewContent(
            "Batches", [card("Batches", empty(told), name="batches")], run, 3.0 if run.is_active else 0.0
        )
    before = el("a", {"rel": "prev", "href": address(addresses.BATCHES, run.run_id, page=page - 1)}, "‹ newer")
    after = el("a", {"rel": "next", "href": address(addresses.BATCHES, run.run_id, page=page + 1)}, "older ›")
    pages = el("div", {"class": "pages"}, before if page else None, after if len(rows) > _ROWS else None)
    shown = table(_COLUMNS, [_row(run, row) for row in rows[:_ROWS]], _COLUMNS[2:8])
    body = [card("Newest first", shown, pages, name="batches")]
    return ViewContent("Batches", body, run, 3.0 if run.is_active and not page else 0.0)


def _row(run: RunState, row: Mapping[str, Any]) -> list[object]:
    version = row["base_version"] + 1
    return [
        el("a", {"href": address(addresses.BATCHES, run.run_id, step=version), "data-row": True}, f"#{row['index']}"),
        el("a", {"href": address(addresses.LINEAGE, run.run_id, version=version)}, f"v{version}"),
        row["members"],
        row["groups"],
        number(row["reward"]),
        f"{row['tokens_sampled']:,}",
        f"v{row['policy_floor']}",
        row["groups_stale"] or "–",
        _dropped(row["groups_dropped"]),
        moment(row["timestamp"])[5:],
    ]


def _dropped(groups: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(groups.items())) or "–"


def _one(request: ViewRequest, run: RunState, step: int) -> ViewContent:
    rows = request.ask(_ONE, run=run.run_id, step=step)
    if not rows:
        raise UnknownRun(f"there is no batch from which version {step} of run {run.run_id} was made")
    row = rows[0]
    rewards = row["member_rewards"]
    figures: list[tuple[str, object]] = [
        ("members", row["members"]),
        ("groups", row["groups"]),
        ("mean reward", number(sum(rewards) / len(rewards) if rewards else None)),
        ("sampled tokens", f"{row['tokens_sampled']:,}"),
        ("oldest weights", f"v{row['policy_floor']}"),
        ("stale groups before", row["groups_stale"]),
    ]
    links = el(
        "p",
        el("a", {"href": address(addresses.TRAJECTORIES, run.run_id, step=step)}, "its rollouts as a list"),
        " · ",
        el("a", {"href": address(addresses.LINEAGE, run.run_id, version=step)}, "its lineage as a graph"),
        " · ",
        el("a", {"href": address(addresses.CURVES, run.run_id)}, "curves"),
    )
    plots = el(
        "div",
        {"class": "grid"},
        card("Rewards", _spread("Members by reward", rewards)),
        card("Advantages", _spread("Members by advantage", row["member_advantages"])),
    )
    trail = (("Batches", address(addresses.BATCHES, run.run_id)),)
    note = f"cut {moment(row['timestamp'])}, judged by {', '.join(row['scorer_sets']) or 'the scorers of the run'}"
    body = [tiles(figures), links, plots, card("Members by advantage", _members(run, row))]
    return ViewContent(f"Batch {row['index']}, step v{step}", body, run, note=note, trail=trail)


def _spread(title: str, values: list[float]) -> Element:
    counts: dict[float, int] = {}
    for value in values:
        counts[round(value, 2)] = counts.get(round(value, 2), 0) + 1
    bars = [
        Bar(number(low) if low == high else f"{number(low)} … {number(high)}", count)
        for low, high, count in ranges(sorted(counts.items()))
    ]
    return bar_plot(title, bars)


def _members(run: RunState, row: Mapping[str, Any]) -> Element:
    names = ("member_trajectories", "member_groups", "member_rewards", "member_advantages")
    members = sorted(zip(*(row[name] for name in names), strict=True), key=lambda member: -member[3])
    shown = [
        [
            el(
                "a",
                {"href": address(addresses.TRAJECTORY, run.run_id, id=trajectory_id), "data-row": True},
                trajectory_id[:8],
            ),
            el("a", {"href": address(addresses.GROUP, run.run_id, id=group_id)}, group_id[:8]),
            number(reward),
            number(advantage),
        ]
        for trajectory_id, group_id, reward, advantage in members[:_MEMBERS_MAX]
    ]
    columns = ("trajectory", "group", "reward", "advantage")
    left_out = len(members) - len(shown)
    more = empty(f"{left_out} more are in the list of its rollouts.") if left_out > 0 else None
    return el("div", table(columns, shown, columns[2:]), more)
