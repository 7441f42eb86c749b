"""Reward and passing in SQL are those of streams.rules.reward, on random rewards in a real chDB."""

import math
import random
from collections import defaultdict

import msgspec
import pytest

from replayground.consumers.clickhouse.queries import SESSIONS_OF_RUNS, TELLING, TRANSCRIPTS
from replayground.consumers.clickhouse.rows import event_row
from replayground.consumers.clickhouse.store import Store
from replayground.schemas.events import (
    Address,
    EndedBy,
    Event,
    Meta,
    RewardAssigned,
    Sampling,
    Task,
    TaskSubmitted,
    TrajectoryAssembled,
    Verdict,
)
from replayground.schemas.ids import derived_id
from replayground.streams.rules.reward import has_passed, is_valid, reward_of
from tests.consumers.synthetic_run import SyntheticRun, run_of
from tests.consumers.test_migrations import released_store

RUN_ID = "run-1"
SCORES = (0.0, 0.3, 0.5, 0.999_999_5, 0.99, 1.0, 1.5, -2.0, 1e9, 2e9, math.nan, math.inf)
WEIGHTS = (1.0, 0.5, -0.25, 0.0, 1e9, math.nan, -math.inf)


def reward(
    attempt: str,
    scorer: str,
    *,
    score: float = 1.0,
    weight: float = 1.0,
    passed: bool | None = True,
    verdict: Verdict = "scored",
    scorer_set: str = "a:1",
    scorers: tuple[str, ...] = ("a",),
    ended_by: EndedBy = "answered",
    trajectory: str | None = None,
    timestamp: int = 1,
    run_id: str = RUN_ID,
) -> RewardAssigned:
    return RewardAssigned(
        meta=Meta(
            id=derived_id("RewardAssigned", run_id, attempt, scorer, scorer_set),
            run_id=run_id,
            session_id="eval-v0001-sampled",
            task_id=f"task-{attempt}",
            group_id=f"group-{attempt}",
            trajectory_id=trajectory or f"trajectory-{attempt}",
            attempt_id=attempt,
            category="reward",
            topic="rewards",
            sender="score",
            timestamp=timestamp,
            purpose="eval",
            policy_version=1,
        ),
        trajectory=Address("trajectories", 0, 0),
        index=0,
        group_size=1,
        scorers=list(scorers),
        scorer=scorer,
        scorer_version="1",
        score=score,
        parts={},
        evidence="",
        verdict=verdict,
        excluded_because=None if verdict == "scored" else "a reason",
        ended_by=ended_by,
        tokens_sampled=1,
        policy_version_oldest=1,
        scorer_set=scorer_set,
        weight=weight,
        passed=passed,
    )


def random_attempt(chance: random.Random, number: int) -> list[RewardAssigned]:
    """Rewards of one attempt: one to three scorers, of a new or an old event, some of them what nobody should write."""
    names = ("a", "b", "c")[: chance.randint(1, 3)]
    is_old = chance.random() < 0.3
    return [
        reward(
            f"attempt-{number}",
            name,
            score=chance.choice(SCORES if chance.random() < 0.3 else SCORES[:8]),
            weight=1.0 if is_old else chance.choice(WEIGHTS if chance.random() < 0.2 else WEIGHTS[:4]),
            passed=None if is_old else chance.choice((True, True, True, False, None)),
            verdict="excluded" if chance.random() < 0.1 else "scored",
            scorer_set="" if is_old else "+".join(f"{name}:1" for name in names),
            scorers=names,
        )
        for name in names
    ]


def insert(store: Store, events: list[Event], first: int = 0) -> None:
    store.insert([event_row(Address(event.meta.topic, 0, first + at), event) for at, event in enumerate(events)])


def test_sql_and_python_agree(store: Store) -> None:
    chance = random.Random(7)
    attempts = [random_attempt(chance, number) for number in range(3000)]
    rewards: list[Event] = [reward for attempt in attempts for reward in attempt]
    # Twice: a derived event may be on the log twice.
    insert(store, rewards)
    insert(store, rewards, first=len(rewards))
    found = {row["attempt_id"]: row for row in store.ask("SELECT * FROM outcomes").dicts()}
    expected = {str(attempt[0].meta.attempt_id): attempt for attempt in attempts}
    assert found.keys() == expected.keys()
    for attempt_id, judged in expected.items():
        row = found[attempt_id]
        assert bool(row["passed"]) == has_passed(judged), judged
        assert bool(row["excluded"]) == (not is_valid(judged)), judged
        assert row["reward"] == pytest.approx(reward_of(judged), rel=1e-12, abs=1e-12), judged
        assert row["scorer_set"] == judged[0].scorer_set
    kinds = {(bool(row["passed"]), bool(row["excluded"]), row["scorer_set"] == "") for row in found.values()}
    assert len(kinds) == 6, "passed, failed and excluded, each old and new: the sample has them all"


def test_an_attempt_is_there_when_all_its_scorers_have_judged_it(store: Store) -> None:
    both = ("a", "judge")
    insert(store, [reward("one", "a", scorers=both, scorer_set="a:1+judge:1")])
    assert store.ask("SELECT * FROM outcomes").rows == []
    insert(store, [reward("one", "judge", scorers=both, scorer_set="a:1+judge:1", passed=False)], first=1)
    assert store.ask("SELECT passed FROM outcomes").rows == [(0,)]


def test_each_scorer_set_and_each_run_has_a_row_of_its_own(store: Store) -> None:
    insert(
        store,
        [
            reward("one", "a"),
            reward("one", "b", score=0.0, passed=False, scorer_set="b:1", scorers=("b",)),
            reward("one", "a", score=0.5, passed=False, run_id="run-2"),
        ],
    )
    assert store.ask("SELECT run_id, scorer_set, reward, passed FROM outcomes ORDER BY run_id, scorer_set").rows == [
        ("run-1", "a:1", 1.0, 1),
        ("run-1", "b:1", 0.0, 0),
        ("run-2", "a:1", 0.5, 0),
    ]


def test_pass_at_1_is_the_share_of_first_attempts_that_passed(store: Store) -> None:
    """0.6 is no pass where the mark is 1; an excluded and a cancelled one count as failed; a retry is not looked at."""
    insert(
        store,
        [
            *(submitted(f"task-{number}") for number in range(4)),
            *(assembled(name) for name in ("first", "second", "third", "fourth")),
            reward("lost", "a", ended_by="infra_error", trajectory="first", verdict="excluded", timestamp=1),
            reward("good", "a", trajectory="first", timestamp=2),
            reward("late", "a", trajectory="first", passed=False, timestamp=3),
            reward("partial", "a", trajectory="second", score=0.6, passed=False),
            reward("unclear", "a", trajectory="third", verdict="excluded", passed=None),
            reward("cancelled", "a", trajectory="fourth", verdict="excluded", ended_by="cancelled", passed=None),
        ],
    )
    (session,) = store.ask(SESSIONS_OF_RUNS, {"runs": [RUN_ID]}).dicts()
    assert (session["tasks"], session["ended"], session["pass_at_1"]) == (4, 4, 0.25)
    asked = {"run": RUN_ID, "purpose": "", "session": "", "rows": 10}
    passed = store.ask(TRANSCRIPTS, asked | {"outcome": "passed"}).dicts()
    failed = store.ask(TRANSCRIPTS, asked | {"outcome": "failed"}).dicts()
    assert [row["attempt_id"] for row in passed] == ["good"]
    assert {row["attempt_id"] for row in failed} == {"lost", "late", "partial", "unclear", "cancelled"}
    telling = {"run": RUN_ID, "session": "eval-v0001-sampled"}
    assert store.ask(TELLING, telling | {"passed": 1}).rows == [("first",)]
    assert store.ask(TELLING, telling | {"passed": 0}).rows == [("second",)]


def test_a_store_of_an_older_release_opens_and_has_outcomes(store: Store) -> None:
    """Without the columns that were added since, with rows that were inserted before."""
    events = list(SyntheticRun(run_of(steps=1, demonstrations=2), evaluation_tasks=2).events())
    rows = [event_row(Address(event.meta.topic, 0, at), event) for at, event in enumerate(events)]
    store = Store(store._dsn, released_store(store, 1, rows), threads=1)
    rewards = [event for event in events if isinstance(event, RewardAssigned)]
    attempts: dict[str, list[RewardAssigned]] = defaultdict(list)
    for event in rewards:
        attempts[str(event.meta.attempt_id)].append(event)
    found = dict(store.ask("SELECT attempt_id, passed FROM outcomes").rows)
    assert {attempt: bool(passed) for attempt, passed in found.items()} == {
        attempt: has_passed(judged) for attempt, judged in attempts.items()
    }
    insert(store, [reward("new", "a")], first=len(events))
    assert store.ask("SELECT passed FROM outcomes WHERE attempt_id = 'new'").rows == [(1,)]
    store.close()


TASK = Task(
    prompt="?", reference="1", agent="agent", toolset=[], world="", scorers=["a"], group_size=1, split="heldout"
)


def submitted(task_id: str) -> TaskSubmitted:
    meta = msgspec.structs.replace(reward(task_id, "a").meta, topic="tasks", trajectory_id=None, attempt_id=None)
    return TaskSubmitted(meta=meta, task=TASK, sampling=Sampling())


def assembled(trajectory_id: str) -> TrajectoryAssembled:
    """The attempt of a trajectory that counts."""
    meta = reward(f"of-{trajectory_id}", "a", trajectory=trajectory_id).meta
    return TrajectoryAssembled(
        meta=msgspec.structs.replace(meta, topic="trajectories"),
        task=TASK,
        index=0,
        seed=0,
        tokens=b"",
        loss_mask=b"",
        logprobs=b"",
        segments=[],
        transcript=[],
        answer=None,
        ended_by="answered",
        reason=None,
        turns=1,
        tokens_sampled=1,
        policy_version_oldest=1,
        template_hash="",
        tools_hash="",
        world_hash="",
        cost=0.0,
    )
