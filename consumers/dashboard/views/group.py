"""/group · the members of a group side by side: rewards, advantages, answers and last words."""

from collections.abc import Mapping, Sequence
from typing import Any

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, counted, empty, moment, tiles
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import number
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.reports.runs import UnknownRun
from replayground.schemas.errors import BadInput
from replayground.streams.rules.runs import RunState

_SHOWN_MAX = 64
_GROUPS = """
SELECT scorer_set, reward_mean, reward_deviation, dropped_because, timestamp, member_trajectories, member_attempts,
       member_rewards, member_advantages, member_valid, member_passed
FROM events WHERE run_id = {run:String} AND type = 'GroupCompleted' AND group_id = {group:String}
ORDER BY scorer_set, offset LIMIT 1 BY scorer_set LIMIT 8
"""
_PLAYED = f"""
SELECT trajectory_id, attempt_id, index, substringUTF8(prompt, 1, 2000) AS prompt, ended_by, turns, tokens_sampled,
       policy_version_oldest AS version, substringUTF8(ifNull(answer, ''), 1, 600) AS answer,
       substringUTF8(JSONExtractString(JSONExtractArrayRaw(transcript)[-1], 'content'), 1, 600) AS last
FROM payloads WHERE run_id IN {{runs:Array(String)}} AND type = 'TrajectoryAssembled' AND group_id = {{group:String}}
ORDER BY index, timestamp LIMIT 1 BY attempt_id LIMIT {2 * _SHOWN_MAX}
"""


def view(request: ViewRequest) -> ViewContent:
    run, group_id = request.run(), request.text("id")
    if not group_id:
        raise BadInput("this address names no group: ?id= is missing")
    groups = request.ask(_GROUPS, run=run.run_id, group=group_id)
    played = request.ask(_PLAYED, runs=[run.run_id, *run.sources], group=group_id)
    if not groups and not played:
        raise UnknownRun(f"there is no group {group_id[:60]} in run {run.run_id}, or none of its attempts has ended")
    by_attempt = {row["attempt_id"]: row for row in played}
    prompt = played[0]["prompt"] if played else ""
    body = [card("Task", el("div", {"class": "text tall"}, prompt)) if prompt else None]
    body += [_group(run, group, by_attempt) for group in groups]
    if not groups:
        told = "The group is not complete yet: rewards and advantages follow once all of its members have ended."
        body.append(
            card("Members so far", empty(told), _members([_of_played(run, row) for row in played]), name="members")
        )
    trail = (("Trajectories", address(addresses.TRAJECTORIES, run.run_id, group=group_id)),)
    refresh_seconds = 3.0 if run.is_active and not groups else 0.0
    return ViewContent(f"Group {group_id[:8]}", body, run, refresh_seconds, _note(groups, played), trail)


def _note(groups: Sequence[Mapping[str, Any]], played: Sequence[Mapping[str, Any]]) -> str:
    told = counted(len(played), "attempt")
    members = len(groups[0]["member_trajectories"]) if groups else 0
    # An attempt that an infra error ended is played again, so a member may have several.
    return f"{counted(members, 'member')}, {told}" if members else told


def _group(run: RunState, group: Mapping[str, Any], played: Mapping[str, Mapping[str, Any]]) -> Element:
    dropped = group["dropped_because"]
    figures: list[tuple[str, object]] = [
        ("mean reward", number(group["reward_mean"])),
        ("deviation", number(group["reward_deviation"])),
        ("completed", moment(group["timestamp"])[5:]),
        ("dropped because", dropped or "–"),
    ]
    highest = max((abs(advantage) for advantage in group["member_advantages"]), default=0.0)
    members = zip(
        *(group[f"member_{name}"] for name in ("trajectories", "attempts", "rewards", "advantages", "valid", "passed")),
        strict=True,
    )
    shown = [
        _member(run, played.get(attempt_id, {}), trajectory_id, attempt_id, reward, advantage, valid, passed, highest)
        for trajectory_id, attempt_id, reward, advantage, valid, passed in list(members)[:_SHOWN_MAX]
    ]
    return card(f"Judged by {group['scorer_set']}", tiles(figures), _members(shown))


def _members(shown: list[Element]) -> Element:
    return el("div", {"class": "members"}, shown)


def _member(
    run: RunState,
    played: Mapping[str, Any],
    trajectory_id: str,
    attempt_id: str,
    reward: float,
    advantage: float,
    valid: bool,
    passed: bool | None,
    highest: float,
) -> Element:
    outcome = "excluded" if not valid else "" if passed is None else "passed" if passed else "failed"
    return el(
        "article",
        {"class": "member"},
        el(
            "div",
            {"class": "who"},
            el("span", {"class": f"dot {outcome}"}),
            el(
                "a",
                {
                    "href": address(addresses.TRAJECTORY, run.run_id, id=trajectory_id, attempt=attempt_id),
                    "data-row": True,
                },
                trajectory_id[:8],
            ),
            el("b", f"reward {number(reward)}"),
        ),
        _advantage(advantage, highest),
        _words(played),
    )


def _of_played(run: RunState, row: Mapping[str, Any]) -> Element:
    target = address(addresses.TRAJECTORY, run.run_id, id=row["trajectory_id"], attempt=row["attempt_id"])
    link = el("a", {"href": target, "data-row": True}, str(row["trajectory_id"])[:8])
    return el("article", {"class": "member"}, el("div", {"class": "who"}, link), _words(row))


def _advantage(advantage: float, highest: float) -> Element:
    """A bar to the right or left of zero."""
    length = 48 * abs(advantage) / highest if highest else 0.0
    shape = {"class": f"bar s{1 if advantage >= 0 else 4}", "y": 1, "height": 8, "width": round(max(length, 0.5), 1)}
    left = 50 if advantage >= 0 else round(50 - length, 1)
    told = f"advantage {number(advantage)}"
    drawing = el(
        "svg",
        {
            "viewBox": "0 0 100 10",
            "class": "advantage",
            "role": "img",
            "aria-label": told,
            "preserveAspectRatio": "none",
        },
        el("line", {"class": "rule", "x1": 50, "x2": 50, "y1": 0, "y2": 10}),
        el("rect", shape | {"x": left}),
    )
    return el("div", {"class": "who"}, drawing, el("span", {"class": "soft"}, told))


def _words(played: Mapping[str, Any]) -> list[Element]:
    if not played:
        return [empty("Its trajectory is not in this run.")]
    version = "" if played["version"] is None else f" · v{played['version']}"
    about = f"{played['turns']} turns, {played['tokens_sampled']} tokens · {played['ended_by']}{version}"
    return [
        el("div", {"class": "soft small"}, about),
        el("div", {"class": "text"}, el("b", "answer "), played["answer"] or "–"),
        el("details", el("summary", "last words"), el("div", {"class": "text tall"}, played["last"])),
    ]
