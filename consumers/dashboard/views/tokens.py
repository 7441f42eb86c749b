"""/tokens · what the trainer gets: every token of an attempt, coloured by log-probability, mask, version or advantage."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, hidden, select, tiles
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import number
from replayground.consumers.dashboard.queries.trajectory import FoundTrajectory, find_trajectory, place_in_batch
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.reports.runs import UnknownRun
from replayground.schemas.packed import unpack_logprobs, unpack_tokens

_TOKENS = 1500
"tokens of one page"
_LEVELS = 9
_LOGPROB_LOW = -6.0
"log-probabilities from here down have the strongest colour"
_COLOURS = (
    ("logprob", "log-probability"),
    ("mask", "loss mask"),
    ("version", "weight version"),
    ("advantage", "advantage"),
)
_BODY = """
SELECT body FROM payloads WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND trajectory_id = {id:String}
  AND attempt_id = {attempt:String} ORDER BY offset LIMIT 1
"""


@dataclass(frozen=True)
class _Token:
    place: int
    token: int
    sampled: bool
    logprob: float | None
    version: int | None
    agent: str


def view(request: ViewRequest) -> ViewContent:
    run, trajectory_id = request.run(), request.text("id")
    found = find_trajectory(request.store, run, trajectory_id, request.text("attempt"))
    rows = [] if found is None else request.ask(
        _BODY, run=found.run_id, id=trajectory_id, attempt=found.attempt["attempt_id"]
    )  # fmt: skip
    if found is None or not rows:
        raise UnknownRun(
            f"trajectory {trajectory_id[:60]} is not assembled in run {run.run_id}, so it has no tokens yet"
        )
    colour = request.choice("colour", [name for name, _ in _COLOURS])
    tokens = _tokens(msgspec.json.decode(rows[0]["body"]))
    place = place_in_batch(request.store, run, found)
    advantage = None if place is None else float(place["advantage"])
    first = min(request.number("from"), max(0, len(tokens) - 1) // _TOKENS * _TOKENS)
    body = [
        tiles(_figures(tokens, advantage)),
        card(
            f"Tokens {first:,} to {min(len(tokens), first + _TOKENS):,} of {len(tokens):,}",
            _legend(colour, tokens),
            el("div", {"class": "tokens"}, _spans(tokens[first : first + _TOKENS], colour, advantage)),
            _pages(request, run.run_id, found, first, len(tokens)),
            more=_chooser(run.run_id, found, colour, first),
        ),
    ]
    trail = (
        ("Trajectories", address(addresses.TRAJECTORIES, run.run_id)),
        (f"Trajectory {trajectory_id[:8]}", address(addresses.TRAJECTORY, run.run_id, id=trajectory_id)),
    )
    note = "Numbers are token ids: what the model read and sampled. Text is never made into tokens again."
    return ViewContent(f"Tokens of {trajectory_id[:8]}", body, run, note=note, trail=trail)


def _tokens(body: Mapping[str, Any]) -> list[_Token]:
    ids = unpack_tokens(base64.b64decode(body["tokens"]))
    mask = base64.b64decode(body["loss_mask"])
    logprobs = unpack_logprobs(base64.b64decode(body["logprobs"]))
    versions: list[int | None] = [None] * len(ids)
    agents = [""] * len(ids)
    for segment in body["segments"]:
        for place in range(max(0, segment["start"]), min(segment["end"], len(ids))):
            versions[place], agents[place] = segment["policy_version"], segment["agent"]
    return [
        _Token(
            place,
            token,
            place < len(mask) and mask[place] == 1,
            logprobs[place] if place < len(logprobs) and place < len(mask) and mask[place] == 1 else None,
            versions[place],
            agents[place],
        )
        for place, token in enumerate(ids)
    ]


def _figures(tokens: Sequence[_Token], advantage: float | None) -> list[tuple[str, object]]:
    sampled = [token for token in tokens if token.sampled]
    logprobs = [token.logprob for token in sampled if token.logprob is not None]
    versions = sorted({token.version for token in tokens if token.version is not None})
    span = "–" if not versions else f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]} … v{versions[-1]}"
    return [
        ("tokens", f"{len(tokens):,}"),
        ("sampled by the policy", f"{len(sampled):,}"),
        ("mean log-probability", number(sum(logprobs) / len(logprobs)) if logprobs else "–"),
        ("weights", span),
        ("advantage", number(advantage)),
    ]


def _spans(tokens: Sequence[_Token], colour: str, advantage: float | None) -> list[Element]:
    class_of = _class_by(colour, tokens, advantage)
    return [el("span", {"class": class_of(token), "title": _tooltip(token)}, token.token) for token in tokens]


def _tooltip(token: _Token) -> str:
    parts = [f"token {token.place}", f"id {token.token}", "sampled" if token.sampled else "read"]
    if token.logprob is not None:
        parts.append(f"log-probability {number(token.logprob)}")
    if token.version is not None:
        parts.append(f"v{token.version}")
    return ", ".join([*parts, token.agent] if token.agent else parts)


def _class_by(colour: str, tokens: Sequence[_Token], advantage: float | None) -> Callable[[_Token], str]:
    if colour == "mask":
        return lambda token: "k5" if token.sampled else ""
    if colour == "version":
        slots = {
            version: slot % 8
            for slot, version in enumerate(sorted({t.version for t in tokens if t.version is not None}))
        }
        return lambda token: "" if token.version is None else f"v s{slots[token.version]}"
    if colour == "advantage":
        # One advantage for all of its sampled tokens.
        sign = "" if not advantage else "up" if advantage > 0 else "down"
        return lambda token: sign if token.sampled else ""
    return _class_of_logprob


def _class_of_logprob(token: _Token) -> str:
    if token.logprob is None:
        return ""
    return f"k{round(_LEVELS * min(max(token.logprob / _LOGPROB_LOW, 0.0), 1.0))}"


def _legend(colour: str, tokens: Sequence[_Token]) -> Element:
    told = {
        "logprob": "the stronger the colour, the less likely the token was; without colour: read, not sampled",
        "mask": "coloured tokens were sampled by the policy and are trained on; the others were read",
        "version": "a colour for each weight version that sampled",
        "advantage": "green tokens are made likelier, red ones less likely; without colour: read, or in no batch",
    }
    return el("p", {"class": "soft"}, told[colour])


def _chooser(run_id: str, found: FoundTrajectory, colour: str, first: int) -> Element:
    kept = hidden(run=run_id, id=found.trajectory_id, attempt=found.attempt["attempt_id"], **{"from": first or None})
    form = {"method": "get", "action": addresses.TOKENS}
    return el("form", form, kept, select("colour", "colour by ", _COLOURS, colour))


def _pages(request: ViewRequest, run_id: str, found: FoundTrajectory, first: int, count: int) -> Element | None:
    if count <= _TOKENS:
        return None

    def at(place: int) -> str:
        kept = {"id": found.trajectory_id, "attempt": request.text("attempt"), "colour": request.text("colour")}
        return address(addresses.TOKENS, run_id, **kept, **{"from": place})

    before = el("a", {"rel": "prev", "href": at(max(0, first - _TOKENS))}, "‹ earlier") if first else None
    after = el("a", {"rel": "next", "href": at(first + _TOKENS)}, "later ›") if first + _TOKENS < count else None
    return el("div", {"class": "pages"}, before, after)
