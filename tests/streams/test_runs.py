"""The fold of run facts: starts, ends, repeats and takeovers."""

import itertools
import json

from replayground.schemas.events import EndReason, Event, Meta, Position, RunEnded, RunResumed, RunStarted
from replayground.streams.rules.runs import RunState, apply, fold

CONFIG = json.dumps({"job": {"module": "examples.job", "steps": 5}})


def meta(run_id: str, at: int) -> Meta:
    return Meta(id=f"{run_id}-{at}", run_id=run_id, category="run", topic="runs", sender="test", timestamp=at)


def started(run_id: str = "a", at: int = 10, config: str = CONFIG) -> RunStarted:
    return RunStarted(
        meta=meta(run_id, at),
        kind="practise",
        config=config,
        files=[],
        seed=3,
        code_version="one",
        packages={"torch": "2"},
        positions=[Position(topic="tasks", partition=0, offset=7)],
        started_by="ann@here",
    )


def resumed(start: int, at: int, run_id: str = "a") -> RunResumed:
    return RunResumed(meta=meta(run_id, at), start=start, code_version="two", packages={}, started_by="bob@there")


def ended(start: int, at: int, reason: EndReason = "stopped", run_id: str = "a") -> RunEnded:
    return RunEnded(meta=meta(run_id, at), reason=reason, detail="why", start=start)


def state_after(*events: Event) -> RunState:
    state: RunState | None = None
    for event in events:
        state = apply(state, event)
    assert state is not None
    return state


def test_a_started_run_is_active_and_has_what_its_config_says() -> None:
    state = state_after(started())
    assert state.is_active
    assert (state.job, state.steps_target, state.seed, state.starts) == ("examples.job", 5, 3, 0)
    assert state.positions == (Position(topic="tasks", partition=0, offset=7),)
    assert (state.started_at, state.resumed_at, state.ended_at) == (10, 10, None)


def test_an_end_has_its_reason_and_the_first_one_counts() -> None:
    state = state_after(started(), ended(0, 20, "failed"), ended(0, 30, "stopped"))
    assert (state.reason, state.ended_at, state.detail, state.is_active) == ("failed", 20, "why", False)


def test_a_resumed_run_is_active_again_and_keeps_its_config_and_positions() -> None:
    state = state_after(started(), ended(0, 20), resumed(1, 30))
    assert state.is_active
    assert (state.starts, state.started_by, state.code_version, state.started_at) == (1, "bob@there", "two", 10)
    assert (state.resumed_at, state.ended_at, state.config) == (30, None, CONFIG)
    assert state.positions


def test_the_end_of_a_start_that_was_taken_over_does_not_end_the_run() -> None:
    assert state_after(started(), resumed(1, 20), ended(0, 30, "taken_over")).is_active


def test_of_two_resumes_with_one_number_the_first_on_the_log_counts() -> None:
    state = state_after(started(), ended(0, 20), resumed(1, 30), resumed(1, 31))
    assert state.start_id == "a-30"


def test_repeats_change_nothing() -> None:
    events = [started(), ended(0, 20), resumed(1, 30), ended(1, 40, "finished")]
    once = state_after(*events)
    assert once.is_finished
    assert state_after(*itertools.chain.from_iterable((event, event) for event in events)) == once
    assert state_after(*events, *events) == once


def test_facts_of_a_run_that_never_started_are_passed_over() -> None:
    assert apply(None, ended(0, 20)) is None
    assert apply(None, resumed(1, 20)) is None


def test_runs_are_told_apart_and_listed_in_the_order_of_their_starts() -> None:
    states = fold([started("b", 1), started("a", 2), ended(0, 3, "finished", "b")])
    assert list(states) == ["b", "a"]
    assert [state.is_active for state in states.values()] == [False, True]


def test_a_config_of_another_release_is_no_error() -> None:
    assert state_after(started(config="no JSON")).job == ""
    assert state_after(started(config='{"job": 3}')).steps_target == 0
