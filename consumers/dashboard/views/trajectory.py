"""/trajectory · one trajectory as a timeline: turns, tool calls, observations, screenshots, messages, rewards with evidence.

Paged by the number of the message in its attempt: a page reads its own stretch alone, so 10,000 turns open as fast as ten.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, counted, duration, empty, hidden, moment
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import Span, number, span_plot
from replayground.consumers.dashboard.queries.trajectory import (
    MESSAGES,
    TEXT_MAX,
    FoundTrajectory,
    find_trajectory,
    messages_of,
    place_in_batch,
    rewards_of,
    task_of,
)
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.reports.runs import UnknownRun
from replayground.schemas.errors import BadInput
from replayground.streams.rules.runs import RunState

_KINDS = {"TurnGenerated": "assistant", "ToolObserved": "tool", "AgentMessaged": "message", "ToolCalled": "call"}


def view(request: ViewRequest) -> ViewContent:
    run, trajectory_id = request.run(), request.text("id")
    if not trajectory_id:
        raise BadInput("this address names no trajectory: ?id= is missing")
    found = find_trajectory(request.store, run, trajectory_id, request.text("attempt"))
    if found is None:
        raise UnknownRun(f"there is no trajectory {trajectory_id[:60]} in run {run.run_id}")
    first = _first(request, found)
    messages = messages_of(request.store, found, first)
    rewards = el("div", {"id": "rewards"}, _rewards(found, rewards_of(request.store, run, found)))
    pages = _pages(request, run, found, first)
    # Judged after the last message: there they stand on the timeline, and on other pages below it.
    is_last = first + MESSAGES >= found.messages
    body = [
        _facts(request, run, found),
        card("Timeline", timeline(found, messages), rewards if is_last else None, pages, name="timeline"),
        None if is_last else card("Rewards", rewards, name="judged"),
    ]
    is_live = run.is_active and not found.attempt["ended_by"]
    trail = (("Trajectories", address(addresses.TRAJECTORIES, run.run_id)),)
    return ViewContent(f"Trajectory {trajectory_id[:8]}", body, run, 1.0 if is_live else 0.0, _note(found), trail)


def _first(request: ViewRequest, found: FoundTrajectory) -> int:
    """Number of the first message of the page, which is never behind the last page."""
    last_page = (found.messages - 1) // MESSAGES * MESSAGES
    return min(request.number("from"), last_page)


def _note(found: FoundTrajectory) -> str:
    attempt = found.attempt
    ended = f"ended by {attempt['ended_by']}" if attempt["ended_by"] else "still running"
    parts = [attempt["session_id"] or attempt["purpose"] or "", ended, counted(found.messages, "message")]
    return " · ".join([*filter(None, parts), duration(attempt["newest"] - attempt["began"])])


def _facts(request: ViewRequest, run: RunState, found: FoundTrajectory) -> Element:
    attempt, task = found.attempt, task_of(request.store, found)
    place = place_in_batch(request.store, run, found)
    known: list[tuple[str, object]] = [
        ("task", el("div", {"class": "text tall"}, task["prompt"])),
        ("reference", el("div", {"class": "text"}, task["reference"] or "–")),
        ("answer", el("div", {"class": "text"}, task["answer"] if task["answered"] else "–")),
    ]
    if attempt["reason"]:
        known.append(("reason", el("div", {"class": "text"}, attempt["reason"])))
    known += [
        ("turns", f"{attempt['turns']:,} with {attempt['tokens_sampled']:,} sampled tokens"),
        ("played by", f"{attempt['worker'] or '–'}, {attempt['isolation'] or 'no'} sandbox, seed {attempt['seed']}"),
        ("advantage", _advantage(run, place)),
        ("see", _neighbours(run, found)),
    ]
    if len(found.attempts) > 1:
        known.append(("attempts", [_attempt(run, found, one) for one in found.attempts]))
    return card("Task", el("dl", {"class": "facts"}, [(el("dt", name), el("dd", told)) for name, told in known]))


def _advantage(run: RunState, place: Mapping[str, Any] | None) -> object:
    if place is None:
        return "in no batch of this run"
    step = place["base_version"] + 1
    link = el("a", {"href": address(addresses.BATCHES, run.run_id, step=step)}, f"batch {place['index']}, step v{step}")
    return [number(place["advantage"]), " in ", link]


def _neighbours(run: RunState, found: FoundTrajectory) -> list[object]:
    attempt, trajectory_id = found.attempt, found.trajectory_id
    return [
        el("a", {"href": address(addresses.GROUP, run.run_id, id=attempt["group_id"])}, "its group"),
        " · ",
        el("a", {"href": address(addresses.TOKENS, run.run_id, id=trajectory_id, attempt=attempt["attempt_id"])}, "its tokens"),
        " · ",
        el("a", {"href": address(addresses.COMPARE, run.run_id, left=trajectory_id)}, "beside another"),
        " · ",
        "sampled by no weights of a run"
        if attempt["policy_version"] is None
        else el("a", {"href": address(addresses.LINEAGE, run.run_id, version=attempt["policy_version"])}, "its weights"),
    ]  # fmt: skip


def _attempt(run: RunState, found: FoundTrajectory, one: Mapping[str, Any]) -> Element:
    target = address(addresses.TRAJECTORY, run.run_id, id=found.trajectory_id, attempt=one["attempt_id"])
    is_shown = one["attempt_id"] == found.attempt["attempt_id"]
    told = f"{moment(one['began'])[11:]} {one['ended_by'] or 'running'}"
    return el("div", el("b", told) if is_shown else el("a", {"href": target}, told))


def _pages(request: ViewRequest, run: RunState, found: FoundTrajectory, first: int) -> Element | None:
    if found.messages <= MESSAGES:
        return None

    def at(seq: int) -> str:
        return address(
            addresses.TRAJECTORY, run.run_id, id=found.trajectory_id, attempt=request.text("attempt"), **{"from": seq}
        )

    last_page = (found.messages - 1) // MESSAGES * MESSAGES
    jump = {"name": "from", "value": first, "inputmode": "numeric", "size": 7, "aria-label": "first message"}
    return el(
        "form",
        {"class": "pages", "method": "get", "action": addresses.TRAJECTORY},
        hidden(run=run.run_id, id=found.trajectory_id, attempt=request.text("attempt")),
        el("a", {"href": at(0)}, "first") if first else None,
        el("a", {"rel": "prev", "href": at(max(0, first - MESSAGES))}, "‹ earlier") if first else None,
        el("label", "message ", el("input", jump), f" of {found.messages:,}"),
        el("a", {"rel": "next", "href": at(first + MESSAGES)}, "later ›") if first < last_page else None,
        el("a", {"href": at(last_page)}, "last") if first < last_page else None,
    )


def timeline(found: FoundTrajectory, messages: Sequence[Mapping[str, Any]]) -> Element:
    """Messages of an attempt, one below the other."""
    if not messages:
        return empty("No message of this stretch is in the store.")
    spans = span_plot("Where the time went", [_span(found, one) for one in messages if one["type"] in _LANES])
    return el("div", {"class": "timeline"}, spans, [_message(found, message) for message in messages])


_LANES = {"TurnGenerated": ("turns", 0), "ToolObserved": ("tools", 1), "AgentMessaged": ("messages", 3)}


def _span(found: FoundTrajectory, message: Mapping[str, Any]) -> Span:
    """These events are written when what they tell is over."""
    lane, slot = _LANES[message["type"]]
    end = (message["timestamp"] - found.attempt["began"]) / 1e6
    took = (message["milliseconds"] or 0.0) / 1e3
    told = f"{message['seq']} · {who_said(message)}: {duration(took * 1e6)} until +{duration(end * 1e6)}"
    return Span(lane, max(0.0, end - took), end, told, 4 if message["is_error"] else slot, f"#m{message['seq']}")


def _message(found: FoundTrajectory, message: Mapping[str, Any]) -> Element:
    kind = _KINDS.get(message["type"], "")
    return el(
        "article",
        {
            "class": f"say {kind}{' wrong' if message['is_error'] else ''}",
            "id": f"m{message['seq']}",
            "data-row": True,
            "tabindex": -1,
        },
        el(
            "div",
            {"class": "who"},
            el("b", f"{message['seq']} · {who_said(message)}"),
            _marks(message),
            _when(found, message),
            raw_link(found.run_id, message),
        ),
        _utterance(found.run_id, message),
        [_screenshot(uri) for uri in message["blobs"]],
    )


def who_said(message: Mapping[str, Any]) -> str:
    """Who said or did it, in a few words."""
    match message["type"]:
        case "TurnGenerated":
            return f"turn · {message['agent']}"
        case "ToolCalled":
            return f"calls {message['tool']}"
        case "ToolObserved":
            return f"result of {message['tool']}"
        case "AgentMessaged":
            return f"{message['sender']}: {message['kind']}"
        case "RolloutStarted":
            return "the attempt begins"
        case _:
            return f"the attempt ends: {message['ended_by']}"


def _marks(message: Mapping[str, Any]) -> list[Element]:
    marks = []
    if message["is_error"]:
        marks.append(el("span", {"class": "mark-word bad"}, f"error of the {message['error_kind'] or 'tool'}"))
    if message["perturbation"]:
        told = f"perturbed on purpose: {message['perturbation'][:200]}"
        marks.append(el("span", {"class": "mark-word odd", "title": told}, "perturbed"))
    if message["type"] == "TurnGenerated":
        version = "" if message["policy_version"] is None else f", v{message['policy_version']}"
        marks.append(el("span", f"{message['tokens']} tokens{version}"))
        if message["finish_reason"] not in ("", "stop"):
            marks.append(el("span", {"class": "mark-word odd"}, message["finish_reason"]))
    return marks


def _when(found: FoundTrajectory, message: Mapping[str, Any]) -> Element:
    took = f", took {duration(message['milliseconds'] * 1000)}" if message["milliseconds"] else ""
    return el(
        "span",
        {"title": moment(message["timestamp"])},
        f"+{duration(message['timestamp'] - found.attempt['began'])}{took}",
    )


def raw_link(run_id: str, message: Mapping[str, Any]) -> Element:
    """The address on the log, with a link to the event as it stands there."""
    place = {name: message[name] for name in ("type", "topic", "partition", "offset")}
    told = f"{message['topic']}/{message['partition']}@{message['offset']}"
    return el("a", {"class": "soft", "href": address(addresses.EVENT, run_id, **place)}, told)


def _utterance(run_id: str, message: Mapping[str, Any]) -> list[Element]:
    said = message["answer"] if message["type"] == "RolloutEnded" else message["said"]
    if message["type"] == "ToolCalled":
        said = _indented(said)
    if not said:
        return []
    parts = [el("div", {"class": "text tall", "tabindex": 0 if len(said) > 1500 else None}, said)]
    if message["said_length"] > TEXT_MAX:
        place = {name: message[name] for name in ("type", "topic", "partition", "offset")}
        link = el("a", {"href": address(addresses.EVENT, run_id, **place)}, "all of it")
        parts.append(el("p", {"class": "soft"}, f"{TEXT_MAX:,} of {message['said_length']:,} characters; ", link))
    return parts


def _indented(arguments: str) -> str:
    """JSON in lines; what cannot be read stays as the agent wrote it."""
    try:
        return msgspec.json.format(arguments, indent=2)
    except msgspec.DecodeError:
        return arguments


def _screenshot(uri: str) -> Element:
    return el(
        "img",
        {
            "class": "shot",
            "loading": "lazy",
            "alt": "a file that the tool returned",
            "src": address(addresses.BLOB, uri=uri),
        },
    )


def _rewards(found: FoundTrajectory, rewards: Sequence[Mapping[str, Any]]) -> Element:
    if not rewards:
        return empty("Nobody has judged it yet.")
    return el("div", [_reward(found, reward) for reward in rewards])


def _reward(found: FoundTrajectory, reward: Mapping[str, Any]) -> Element:
    by = {"JudgementMade": f"judge {reward['scorer']}", "VerdictGiven": f"{reward['annotator']} for {reward['scorer']}"}
    parts = ", ".join(f"{name} {number(value)}" for name, value in reward["parts"].items())
    if reward["verdict"] == "excluded":
        mark = el("span", {"class": "mark-word odd"}, f"excluded: {reward['excluded_because']}")
    elif reward["passed"] is not None:
        mark = el(
            "span",
            {"class": f"mark-word {'good' if reward['passed'] else 'bad'}"},
            "passed" if reward["passed"] else "failed",
        )
    else:
        mark = None
    return el(
        "article",
        {"class": "say reward"},
        el(
            "div",
            {"class": "who"},
            el("b", by.get(reward["type"], reward["scorer"])),
            el("b", number(reward["score"])),
            mark,
            el("span", f"weight {number(reward['weight'])}") if reward["weight"] not in (None, 1.0) else None,
            el("span", f"version {reward['scorer_version']}"),
            el("span", parts) if parts else None,
            el("span", f"+{duration(reward['timestamp'] - found.attempt['began'])}"),
            raw_link(reward["run_id"], reward),
        ),
        el("div", {"class": "text tall"}, reward["evidence"]) if reward["evidence"] else None,
    )
