"""The recorded policy: what one run said, another says again, id by id, and what nobody said is an error that says so."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replayground.producers.policy import PolicyFailed, Turn, TurnRequest
from replayground.producers.recorded import RecordedPolicy, RecordedTurns, read_recording, recorded_run
from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
    Event,
    Meta,
    Position,
    RolloutEnded,
    RolloutStarted,
    RunStarted,
    Sampling,
    ToolObserved,
    TurnGenerated,
    VersionSpan,
)
from replayground.schemas.packed import pack_logprobs, pack_tokens
from tests.producers.field import a_log, events_on, published
from tests.producers.test_rollouts import SETTINGS, Field, scripted
from tests.producers.test_scheduler import tasks

TASK = tasks(1)[0].task


def said(recording: RecordedTurns, tokens: list[int], seed: int = 1) -> list[int] | None:
    turn = recording.turn(tokens, seed)
    return None if turn is None else turn.tokens


def started(attempt: str, seed: int, *prompt: int) -> RolloutStarted:
    return RolloutStarted(
        meta=_meta(attempt),
        task=TASK,
        index=0,
        seed=seed,
        worker="w",
        isolation="none",
        prompt_tokens=pack_tokens(list(prompt)),
        template_hash="",
        tools_hash="",
        world_hash="",
    )


def turned(attempt: str, *tokens: int, context: int = 0) -> TurnGenerated:
    return TurnGenerated(
        meta=_meta(attempt),
        agent="agent",
        text="",
        tokens=pack_tokens(list(tokens)),
        logprobs=pack_logprobs([-0.5] * len(tokens)),
        versions=[VersionSpan(version=3, start=0, end=len(tokens))],
        sampling=Sampling(),
        finish_reason="length",
        milliseconds=0.0,
        context=context,
    )


def observed(attempt: str, *tokens: int, context: int = 0) -> ToolObserved:
    return ToolObserved(
        meta=_meta(attempt),
        call_id="call-1",
        tool="sql",
        content="",
        is_error=False,
        error_kind=None,
        milliseconds=0.0,
        blobs=[],
        perturbation=None,
        tokens=pack_tokens(list(tokens)),
        context=context,
    )


def _meta(attempt: str) -> Meta:
    return Meta(id="m", run_id="r", attempt_id=attempt, category="", topic="messages", sender="w", timestamp=0)


def recording_of(*events: Event) -> RecordedTurns:
    recording = RecordedTurns()
    for event in events:
        recording.note(event)
    return recording


def turn_request(tokens: list[int], tokens_max: int = 10) -> TurnRequest:
    return TurnRequest(TASK, 1, tokens, [], Sampling(), tokens_max, None)


async def test_a_turn_is_found_by_all_that_was_read_before_it() -> None:
    recording = recording_of(
        started("a", 1, 10, 11), turned("a", 20, 21), observed("a", 30), turned("a", 40), turned("unknown", 50)
    )
    assert said(recording, [10, 11]) == [20, 21]
    assert said(recording, [10, 11, 20, 21, 30]) == [40]
    assert said(recording, [10, 11, 20, 21]) is None
    assert recording.turns == 2
    turn = await RecordedPolicy(recording).next_turn(turn_request([10, 11]))
    assert turn == Turn([20, 21], [-0.5, -0.5], [VersionSpan(version=3, start=0, end=2)], "length")


def test_members_of_a_group_say_what_they_said_though_they_read_the_same() -> None:
    recording = recording_of(
        started("a", 1, 10), started("b", 2, 10), turned("b", 22), turned("a", 21), started("c", 1, 10), turned("c", 21)
    )
    assert [said(recording, [10], seed) for seed in (1, 2)] == [[21], [22]]
    assert {tuple(said(recording, [10], seed) or ()) for seed in (3, 4)} == {(21,), (22,)}
    assert recording.turns == 2, "a second attempt that said the same is not kept twice"


def test_contexts_of_several_agents_are_kept_apart() -> None:
    recording = recording_of(
        started("a", 1, 10), turned("a", 20), observed("a", 60, context=1), turned("a", 70, context=1), turned("a", 21)
    )
    assert said(recording, [60]) == [70]
    assert said(recording, [10, 20]) == [21]


async def test_what_was_never_read_or_is_too_long_is_refused() -> None:
    policy = RecordedPolicy(recording_of(started("a", 1, 10), turned("a", 20, 21)))
    with pytest.raises(PolicyFailed, match="nothing is recorded after these 1 token ids"):
        await policy.next_turn(turn_request([11]))
    with pytest.raises(PolicyFailed, match="2 token ids, but only 1 are allowed"):
        await policy.next_turn(turn_request([10], tokens_max=1))


def test_an_attempt_that_ended_is_let_go_of() -> None:
    ended = RolloutEnded(
        meta=_meta("a"),
        ended_by="answered",
        answer=None,
        reason=None,
        turns=1,
        tokens_sampled=1,
        tokens_read=1,
        milliseconds=0.0,
        cost=0.0,
    )
    recording = recording_of(started("a", 1, 10), turned("a", 20), ended)
    assert not recording._attempts
    assert said(recording, [10]) == [20]


def test_servers_that_cannot_stand_together_are_refused() -> None:
    assert recorded_run(["http://127.0.0.1:8000"]) is None
    assert recorded_run(["recorded:run-1"]) == "run-1"
    for servers in (["recorded:run-1", "http://127.0.0.1:8000"], ["recorded:"]):
        with pytest.raises(BadInput, match=re.escape("[rollouts] servers")):
            recorded_run(servers)


def test_a_run_without_turns_is_refused(tmp_path: Path) -> None:
    field = Field(tmp_path)
    with pytest.raises(BadInput, match="no turn of a run"):
        read_recording(field.log, "nobody")


def test_a_worker_plays_a_recorded_run_again(tmp_path: Path) -> None:
    """Once by the teacher, once by the recording: the same ids, calls and answers; with another tool answer, an error."""
    first = Field(tmp_path)
    first.log.append(published(0, first.blobs))
    requests = first.ask(30)
    _played(first, scripted())
    again = _another_run(tmp_path, first, "again", requests)
    _played(again, scripted(), servers=[f"recorded:{first.run.run_id}"])
    assert _words(again, "again") == _words(first, first.run.run_id)
    assert len(_words(again, "again")) == 30

    other = _another_run(tmp_path, first, "other", requests)
    _played(other, scripted(sql=lambda a: "9999", kv=lambda a: "9999"), servers=[f"recorded:{first.run.run_id}"])
    ends = [end for end in other.ends() if end.meta.run_id == "other"]
    assert {end.ended_by for end in ends} == {"answered", "infra_error"}
    assert any("nothing is recorded" in (end.reason or "") for end in ends)


def _another_run(folder: Path, first: Field, run_id: str, requests: list[Any]) -> Field:
    field = Field(folder)
    field.run = msgspec.structs.replace(first.run, run_id=run_id)
    field.log, field.blobs = first.log, first.blobs
    for event in (published(0, first.blobs), *requests):
        changes = {"run_id": run_id} | ({"purpose": "train"} if event in requests else {})
        field.log.append(msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, **changes)))
    return field


def _played(field: Field, backend: Any, servers: list[str] | None = None) -> None:
    field.start(backend, msgspec.structs.replace(SETTINGS, servers=servers or []))
    group = f"rollouts-{field.run.run_id}"
    field.until(lambda: field.log.group_lags(group, ["rollouts"])["rollouts"].lag == 0)
    field.finish()


def _words(field: Field, run_id: str) -> dict[str | None, list[bytes | str | None]]:
    """Every id that was sampled and every answer, by trajectory."""
    words: dict[str | None, list[bytes | str | None]] = {}
    for event in events_on(field.log, "messages"):
        if event.meta.run_id == run_id and isinstance(event, TurnGenerated | RolloutEnded):
            words.setdefault(event.meta.trajectory_id, []).append(
                event.tokens if isinstance(event, TurnGenerated) else event.answer
            )
    return words


def run_started(run_id: str, positions: list[Position]) -> RunStarted:
    return RunStarted(
        meta=Meta(id=run_id, run_id=run_id, category="run", topic="runs", sender="cli", timestamp=0),
        kind="practise",
        config="{}",
        files=[],
        seed=0,
        code_version="",
        packages={},
        positions=positions,
        started_by="",
    )


def test_a_recording_is_read_from_where_its_run_began(tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    for event in (started("early", 1, 10), turned("early", 20)):
        log.append(msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, trajectory_id="t")))
    log.append(run_started("r", log.end_positions(["messages"])))
    with pytest.raises(BadInput, match="no turn"):
        read_recording(log, "r")
    for event in (started("late", 1, 11), turned("late", 21)):
        log.append(msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, trajectory_id="t")))
    recording = read_recording(log, "r")
    assert (said(recording, [10]), said(recording, [11])) == (None, [21])
