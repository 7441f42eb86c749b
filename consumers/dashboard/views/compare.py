"""/compare · two trajectories side by side, aligned message by message; of one task also those of other versions."""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, empty, hidden, table
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import number
from replayground.consumers.dashboard.queries.trajectory import (
    FoundTrajectory,
    find_trajectory,
    messages_of,
    rewards_of,
)
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.dashboard.views.trajectory import who_said
from replayground.consumers.reports.runs import UnknownRun
from replayground.streams.rules.runs import RunState

_SHOWN_MAX = 1500
_SAME_TASK = """
SELECT trajectory_id, attempt_id, policy_version, ended_by, timestamp, session_id FROM events
WHERE run_id = {run:String} AND type = 'AttemptEnded' AND (task_id = {task:String} OR group_id = {group:String})
  AND trajectory_id != {id:String}
ORDER BY policy_version DESC, timestamp DESC LIMIT 1 BY trajectory_id LIMIT 60
"""
# Tasks are submitted anew for each evaluation: the same task of another version has the same prompt.
_SAME_PROMPT = """
SELECT trajectory_id, attempt_id, policy_version_oldest AS policy_version, ended_by, timestamp, session_id FROM payloads
WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND trajectory_id != {id:String} AND cityHash64(prompt) IN
(
    SELECT cityHash64(prompt) FROM payloads
    WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND trajectory_id = {id:String} LIMIT 1
)
ORDER BY policy_version DESC, timestamp DESC LIMIT 1 BY trajectory_id LIMIT 60
"""


def view(request: ViewRequest) -> ViewContent:
    run = request.run()
    left_id, right_id = request.text("left"), request.text("right")
    body: list[Element | None] = [_form(run, left_id, right_id)]
    left = _found(request, run, left_id)
    right = _found(request, run, right_id)
    trail = (("Trajectories", address(addresses.TRAJECTORIES, run.run_id)),)
    if left is not None and right is not None:
        body.append(
            card(
                "Aligned",
                _heads(request, run, left, right),
                _aligned(request, left, right),
                _pages(request, run, left, right),
            )
        )
    if left is not None:
        body.append(card("Others of the same task", _candidates(request, run, left)))
    else:
        body.append(empty("Choose a trajectory in the list of trajectories, then “beside another”."))
    return ViewContent("Compare", body, run, note="two trajectories, or one task under two versions", trail=trail)


def _form(run: RunState, left_id: str, right_id: str) -> Element:
    def box(name: str, value: str) -> Element:
        field = {"name": name, "value": value, "size": 38, "placeholder": "id of a trajectory", "spellcheck": "false"}
        return el("label", {"class": "wide"}, name, el("input", field))

    form = {"class": "filters", "method": "get", "action": addresses.COMPARE}
    return el(
        "form",
        form,
        hidden(run=run.run_id),
        box("left", left_id),
        box("right", right_id),
        el("button", {"class": "first"}, "Compare"),
    )


def _found(request: ViewRequest, run: RunState, trajectory_id: str) -> FoundTrajectory | None:
    if not trajectory_id:
        return None
    found = find_trajectory(request.store, run, trajectory_id, "")
    if found is None:
        raise UnknownRun(f"there is no trajectory {trajectory_id[:60]} in run {run.run_id}")
    return found


def _heads(request: ViewRequest, run: RunState, left: FoundTrajectory, right: FoundTrajectory) -> Element:
    return el("div", {"class": "compared"}, [_head(request, run, found) for found in (left, right)])


def _head(request: ViewRequest, run: RunState, found: FoundTrajectory) -> Element:
    attempt = found.attempt
    rewards = rewards_of(request.store, run, found)
    told = ", ".join(f"{reward['scorer']} {number(reward['score'])}" for reward in rewards) or "not judged"
    version = "no weights" if attempt["policy_version"] is None else f"v{attempt['policy_version']}"
    link = el("a", {"href": address(addresses.TRAJECTORY, run.run_id, id=found.trajectory_id)}, found.trajectory_id[:8])
    return el(
        "div", el("b", link), el("div", {"class": "soft"}, f"{version} · {attempt['ended_by'] or 'running'} · {told}")
    )


def _aligned(request: ViewRequest, left: FoundTrajectory, right: FoundTrajectory) -> Element:
    first = request.number("from")
    sides = [messages_of(request.store, found, first) for found in (left, right)]
    marks = [[(message["type"], message["tool"], _uttered(message)) for message in side] for side in sides]
    rows: list[Element] = []
    for kind, a, b, c, d in SequenceMatcher(None, marks[0], marks[1], autojunk=False).get_opcodes():
        pairs = _paired(sides[0][a:b], sides[1][c:d])
        for one, other in pairs:
            differs = "" if kind == "equal" else "differs" if one and other else "alone"
            rows += [_message(one, differs), _message(other, differs)]
    return el("div", {"class": "compared"}, rows)


def _paired(
    ones: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    """Messages of a stretch that differs, side by side where they are of the same kind."""
    pairs: list[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]] = []
    matched = SequenceMatcher(None, [one["type"] for one in ones], [other["type"] for other in others], autojunk=False)
    for kind, a, b, c, d in matched.get_opcodes():
        if kind == "equal":
            pairs += zip(ones[a:b], others[c:d], strict=True)
        else:
            pairs += [(one, None) for one in ones[a:b]] + [(None, other) for other in others[c:d]]
    return pairs


def _message(message: Mapping[str, Any] | None, differs: str) -> Element:
    if message is None:
        return el("div", {"class": "missing"})
    kind = {"TurnGenerated": "assistant", "ToolObserved": "tool", "AgentMessaged": "message"}.get(message["type"], "")
    return el(
        "div",
        {"class": f"say {kind} {differs}"},
        el("div", {"class": "who"}, f"{message['seq']} · {who_said(message)}"),
        el("div", {"class": "text tall"}, _uttered(message)[:_SHOWN_MAX]),
    )


def _uttered(message: Mapping[str, Any]) -> str:
    return str(message["answer"] if message["type"] == "RolloutEnded" else message["said"])


def _pages(request: ViewRequest, run: RunState, left: FoundTrajectory, right: FoundTrajectory) -> Element | None:
    first, shown = request.number("from"), 60
    kept = {"left": left.trajectory_id, "right": right.trajectory_id}
    before = el(
        "a",
        {"rel": "prev", "href": address(addresses.COMPARE, run.run_id, **kept, **{"from": max(0, first - shown)})},
        "‹ earlier",
    )
    after = el(
        "a",
        {"rel": "next", "href": address(addresses.COMPARE, run.run_id, **kept, **{"from": first + shown})},
        "later ›",
    )
    has_more = first + shown < max(left.messages, right.messages)
    return el("div", {"class": "pages"}, before if first else None, after if has_more else None)


def _candidates(request: ViewRequest, run: RunState, left: FoundTrajectory) -> Element:
    attempt = left.attempt
    asked = {"run": left.run_id, "id": left.trajectory_id}
    rows = request.ask(_SAME_TASK, **asked, task=attempt["task_id"] or "", group=attempt["group_id"] or "")
    known = {row["trajectory_id"] for row in rows}
    rows += [row for row in request.ask(_SAME_PROMPT, **asked) if row["trajectory_id"] not in known]
    if not rows:
        return empty("No other trajectory of this run had the same task.")
    shown = [
        [
            el(
                "a",
                {
                    "href": address(addresses.COMPARE, run.run_id, left=left.trajectory_id, right=row["trajectory_id"]),
                    "data-row": True,
                },
                row["trajectory_id"][:8],
            ),
            "–" if row["policy_version"] is None else f"v{row['policy_version']}",
            row["session_id"] or "–",
            row["ended_by"],
        ]
        for row in rows
    ]
    return table(("beside", "version", "session", "ended by"), shown)
