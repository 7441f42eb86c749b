"""Scorers that are slow, hang or are async, in the main thread and in others."""

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Score, Scorer
from replayground.schemas.registry import MemoryRegistry
from replayground.scoring import scorer
from replayground.streams.bounded_scoring import bounded, call_in_thread, score_within, time_limit
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.memory import MemoryLog
from replayground.streams.rules.judges import HumanVerdict, LlmJudge, judges_of
from replayground.streams.rules.scorers.numeric import NumericTolerance
from replayground.streams.rules.scoring import needs_of, score_trajectory, scorers_by_name, version_of
from tests.flow.synthetic import RUN_ID, rollout
from tests.streams.scored_attempts import attempt
from tests.streams.test_hops import append, on, with_scorers


class Endless:
    """A scorer that never returns, in a way that the test says."""

    name = "endless"
    weight = 0.5
    pass_mark = None
    needs = "trajectory"

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        self._act()
        return Score(score=1.0)


def spin() -> None:
    while True:
        pass


def catch_everything() -> None:
    while True:
        try:
            spin()
        except Exception:
            continue


def backtrack() -> None:
    re.match("(a+)+b", "a" * 60)


@pytest.mark.parametrize("act", [spin, catch_everything, backtrack, threading.Event().wait])
def test_a_scorer_that_never_returns_excludes_with_the_reason(act: Callable[[], Any]) -> None:
    (limited,) = bounded([Endless(act)], 0.05)
    score = score_trajectory(attempt("x"), "endless", {"endless": limited})
    assert score.excluded_because == "scorer failed: TimeoutError: it has not returned after 0.05 s"


def test_the_limit_holds_in_other_threads_too() -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            score_within(Endless(threading.Event().wait), attempt("x"), 0.05)
        except TimeoutError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_a_group_with_a_scorer_that_hangs_completes(tmp_path: Path) -> None:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs((tmp_path / "blobs").as_uri())))
    for index in range(4):
        append(log, with_scorers(rollout(0, index), ["exact_match", "endless"]))
    Driver(log, hops(bounded([Endless(spin)], 0.02), "centred"), RUN_ID).run_until_caught_up()
    hung = [reward for reward in on(log, "rewards") if reward.scorer == "endless"]
    assert [reward.verdict for reward in hung] == ["excluded"] * 4
    assert len(on(log, "groups")) == 1


def test_a_bounded_scorer_is_the_same_scorer() -> None:
    (limited,) = bounded([Endless(lambda: None)])
    assert limited.score(attempt("x")).score == 1.0
    assert (limited.weight, limited.pass_mark) == (0.5, None)  # type: ignore[attr-defined]
    assert needs_of(limited) == "trajectory"
    assert version_of(limited) == version_of(Endless(lambda: None))
    numeric = NumericTolerance(relative=0.5)
    assert scorers_by_name(bounded([numeric]))["numeric"] is numeric


def test_a_limit_restores_the_timer_of_others() -> None:
    fired: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: fired.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(TimeoutError), time_limit(0.01):
            spin()
        with time_limit(5.0):
            pass
        while not fired:
            time.sleep(0.01)
        assert fired == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_an_error_of_the_scorer_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        score_within(Endless(lambda: 1 / 0), attempt("x"), 5.0)
    with pytest.raises(ZeroDivisionError):
        call_in_thread(lambda: 1 / 0, 5.0)


@scorer(needs="trajectory")
async def patient(trajectory: TrajectoryAssembled) -> float:
    await asyncio.sleep(0)
    return float(trajectory.answer == "7")


@scorer(timeout_seconds=0.05)
async def forgetful(trajectory: TrajectoryAssembled) -> float:
    await asyncio.Event().wait()
    return 1.0


@scorer(timeout_seconds=0.05)
async def stubborn(trajectory: TrajectoryAssembled) -> float:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(3.0)
    return 1.0


def judged(own: Scorer) -> Score:
    return score_trajectory(attempt("7"), own.name, {own.name: own})


async def in_a_loop(own: Scorer) -> Score:
    return judged(own)


def test_an_async_scorer_is_run_to_its_end_inside_of_a_loop_and_outside() -> None:
    for score in (judged(patient), asyncio.run(in_a_loop(patient))):
        assert (score.score, score.excluded_because) == (1.0, None)


def test_an_async_scorer_that_waits_for_ever_is_given_up() -> None:
    for score in (judged(forgetful), asyncio.run(in_a_loop(forgetful))):
        assert (score.excluded_because or "").startswith("scorer failed: TimeoutError")
    (limited,) = bounded([stubborn], 0.2)
    assert (asyncio.run(in_a_loop(limited)).excluded_because or "").startswith("scorer failed: TimeoutError")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"weight": "2"}, "weight '2' is not a number"),
        ({"pass_mark": float("nan")}, "pass_mark nan is not"),
        ({"needs": "all"}, "needs 'all' is unknown"),
    ],
)
def test_a_wrong_setting_is_refused_where_it_stands(settings: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        scorer(**settings)(lambda trajectory: 1.0)


def test_only_functions_are_decorated() -> None:
    with pytest.raises(TypeError, match="takes a function, not NumericTolerance"):
        scorer(NumericTolerance())  # type: ignore[call-overload]


def test_judges_are_left_to_their_program_all_the_same() -> None:
    """Wrapped, they would be scored by the hop, which excludes."""
    judges: tuple[Scorer, ...] = (
        LlmJudge(name="polite", model="m", rubric="r"),
        HumanVerdict(name="helpful", question="q"),
    )
    assert set(judges_of(bounded(judges))) == {"polite", "helpful"}
