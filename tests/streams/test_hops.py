"""The hops over the in-memory log: what they make of messages, however often and in whatever company they arrive."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import (
    Address,
    AgentMessaged,
    AttemptEnded,
    BatchCut,
    Context,
    Event,
    EventRejected,
    GroupCompleted,
    RewardAssigned,
    RolloutStarted,
    Sampling,
    TrajectoryAssembled,
    TurnGenerated,
    VersionSpan,
)
from replayground.schemas.job import Score
from replayground.schemas.packed import pack_tokens, token_count, unpack_logprobs, unpack_tokens
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.hops.groups_to_batches import CutGroups, CutState
from replayground.streams.hops.messages_to_trajectories import AssembleTrajectories, AssemblyState
from replayground.streams.hops.rewards_to_groups import GroupRewards, GroupState
from replayground.streams.hops.trajectories_to_rewards import ScoreTrajectories
from replayground.streams.log.memory import MemoryLog
from replayground.streams.rules.dead_letter import TooManyRejects
from replayground.streams.rules.scoring import scorers_by_name
from tests.flow.synthetic import RUN_ID, groups, rollout


@pytest.fixture
def log(tmp_path: Path) -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), Blobs((tmp_path / "blobs").as_uri())))


def driven(log: MemoryLog, rejects_share_max: float = 1.0) -> None:
    cutter = CutGroups(RUN_ID, groups_per_batch=3, staleness_max=4, first_version=1)
    Driver(log, [*hops((), "standardised"), cutter], RUN_ID, rejects_share_max).run_until_caught_up()


def on(log: MemoryLog, topic: str) -> list[Any]:
    return [delivery.event for delivery in log.reader([topic]).poll(100_000, 0.0)]


def append(log: MemoryLog, events: list[Event]) -> None:
    for event in events:
        log.append(event)


def test_a_trajectory_is_the_exact_tokens_in_order(log: MemoryLog) -> None:
    messages: list[Any] = rollout(0, 0)
    append(log, messages)
    driven(log)
    (trajectory,) = on(log, "trajectories")
    assert isinstance(trajectory, TrajectoryAssembled)
    started, first, _, observed, second, _ = messages
    assert trajectory.tokens == started.prompt_tokens + first.tokens + observed.tokens + second.tokens
    sampled = [t for t, m in zip(unpack_tokens(trajectory.tokens), trajectory.loss_mask, strict=True) if m]
    assert sampled == unpack_tokens(first.tokens + second.tokens)
    logprobs = [p for p, m in zip(unpack_logprobs(trajectory.logprobs), trajectory.loss_mask, strict=True) if m]
    assert logprobs == unpack_logprobs(first.logprobs + second.logprobs)
    assert trajectory.tokens_sampled == len(sampled)
    assert trajectory.policy_version_oldest == 1
    assert [said.role for said in trajectory.transcript] == ["user", "assistant", "tool", "assistant"]


def test_segments_say_how_the_policy_sampled_them(log: MemoryLog) -> None:
    cold = Sampling(temperature=0.5, top_p=0.9)
    messages = [
        replace(m, sampling=cold) if isinstance(m, TurnGenerated) and m.meta.seq == 1 else m for m in rollout(0, 0)
    ]
    append(log, messages)
    driven(log)
    (trajectory,) = on(log, "trajectories")
    said = [s for s in trajectory.segments if s.policy_version is not None]
    assert [(segment.temperature, segment.top_p) for segment in said] == [(0.5, 0.9), (1.0, 1.0)]
    assert all((s.temperature, s.top_p) == (1, 1) for s in trajectory.segments if s.policy_version is None)


def test_an_attempt_that_ended_is_told_of_without_its_tokens(log: MemoryLog) -> None:
    append(log, rollout(0, 0, ended_by="deadline"))
    driven(log)
    (trajectory,), (ended,) = on(log, "trajectories"), on(log, "attempts")
    assert isinstance(ended, AttemptEnded)
    for name in ("group_id", "trajectory_id", "attempt_id", "causation_id", "purpose", "timestamp"):
        assert getattr(ended.meta, name) == getattr(trajectory.meta, name)
    for name in ("index", "ended_by", "reason", "tokens_sampled", "policy_version_oldest"):
        assert getattr(ended, name) == getattr(trajectory, name)
    assert ended.group_size == trajectory.task.group_size


def test_a_message_that_names_no_group_is_refused(log: MemoryLog) -> None:
    messages: list[Any] = [replace(event, meta=replace(event.meta, group_id=None)) for event in rollout(0, 0)]
    append(log, messages)
    driven(log)
    assert len(on(log, "dead-letters")) == len(messages)


def test_everything_delivered_twice_changes_nothing(log: MemoryLog, tmp_path: Path) -> None:
    once = MemoryLog(Codec(MemoryRegistry(), Blobs((tmp_path / "once").as_uri())))
    for messages in groups(12):
        append(once, messages)
        append(log, messages)
        append(log, messages[2:])
    append(log, [event for messages in groups(12) for event in messages])
    driven(once)
    driven(log)
    assert on(log, "trajectories") == on(once, "trajectories")
    assert on(log, "attempts") == on(once, "attempts")
    assert on(log, "rewards") == on(once, "rewards")
    assert on(log, "groups") == on(once, "groups")
    assert on(log, "batches") == on(once, "batches")
    assert on(log, "batches")


def test_derived_facts_repeated_by_a_crashed_worker_change_nothing(log: MemoryLog) -> None:
    for messages in groups(12):
        append(log, messages)
    driven(log)
    batches = on(log, "batches")
    for topic in ("trajectories", "rewards", "groups"):
        append(log, on(log, topic))
    driven(log)
    # a second life of all stages, from the beginning: batches repeat with the same ids and hold the same trajectories
    assert [batch.meta.id for batch in on(log, "batches")[len(batches) :]] == [batch.meta.id for batch in batches]


def test_a_hole_in_seq_is_refused_and_never_guessed(log: MemoryLog) -> None:
    messages = rollout(0, 0)
    append(log, messages[:2] + messages[3:])
    driven(log)
    assert on(log, "trajectories") == []
    rejects = on(log, "dead-letters")
    assert len(rejects) == 3
    assert all(isinstance(reject, EventRejected) and "missing" in reject.reason for reject in rejects)


def test_attempts_are_kept_apart_and_the_first_good_end_counts(log: MemoryLog) -> None:
    broken = rollout(0, 0, attempt=0, answer=None, ended_by="infra_error")
    good = rollout(0, 0, attempt=1, answer="7")
    late = rollout(0, 0, attempt=2, answer="8")
    interleaved = [event for pair in zip(broken, good, strict=True) for event in pair]
    append(log, interleaved + late)
    for index in (1, 2, 3):
        append(log, rollout(0, index, answer="8"))
    driven(log)
    assert len(on(log, "trajectories")) == 6
    (group,) = on(log, "groups")
    assert isinstance(group, GroupCompleted)
    assert [member.attempt_id for member in group.members] == ["g0-m0-a1", "g0-m1-a0", "g0-m2-a0", "g0-m3-a0"]
    assert [member.reward for member in group.members] == [1.0, 0.0, 0.0, 0.0]
    assert group.dropped_because is None


def test_a_cancelled_member_ends_the_group_without_counting(log: MemoryLog) -> None:
    append(log, rollout(0, 0, answer=None, ended_by="cancelled"))
    for index, answer in ((1, "7"), (2, "8"), (3, "7")):
        append(log, rollout(0, index, answer=answer))
    driven(log)
    (group,) = on(log, "groups")
    assert [member.valid for member in group.members] == [False, True, True, True]
    assert group.members[0].advantage == 0.0
    assert sum(member.advantage for member in group.members) == pytest.approx(0.0)


def test_a_group_without_variance_is_dropped_and_says_so(log: MemoryLog) -> None:
    for index in range(4):
        append(log, rollout(0, index, answer="8"))
    driven(log)
    assert [group.dropped_because for group in on(log, "groups")] == ["zero_variance"]
    assert on(log, "batches") == []


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Scripted:
    """A scorer of somebody's own that does what the test says."""

    name = "own"
    version = "1"

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        return cast(Score, self._act())


def raise_it(error: BaseException) -> Any:
    raise error


FAILING_SCORERS: list[tuple[str, Callable[[], Any]]] = [
    ("ZeroDivisionError", lambda: 1 / 0),
    ("SystemExit", lambda: raise_it(SystemExit(3))),
    ("Unprintable", lambda: raise_it(Unprintable())),
    ("returned NoneType", lambda: None),
    ("nan is not a number", lambda: Score(score=float("nan"))),
    ("inf is not a number", lambda: Score(score=0.0, parts={"part": float("inf")})),
    ("is not a number", lambda: Score(score=cast(float, "much"))),
    ("surrogates not allowed", lambda: Score(score=0.0, evidence="\ud800")),
    ("so it says", lambda: Score(score=0.0, excluded_because="so it says")),
]


@pytest.mark.parametrize(("reason", "act"), FAILING_SCORERS)
def test_whatever_a_scorer_does_the_group_completes_and_the_member_says_why(
    log: MemoryLog, reason: str, act: Callable[[], Any]
) -> None:
    append(log, [event for index in range(4) for event in with_scorers(rollout(0, index), ["exact_match", "own"])])
    Driver(log, hops([Scripted(act)], "centred"), RUN_ID).run_until_caught_up()
    (group,) = on(log, "groups")
    assert [member.valid for member in group.members] == [False] * 4
    assert group.dropped_because == "too_few_valid"
    rewards = [reward for reward in on(log, "rewards") if reward.scorer == "own"]
    assert [reward.verdict for reward in rewards] == ["excluded"] * 4
    assert all(reason in reward.excluded_because for reward in rewards)
    assert on(log, "dead-letters") == []


@pytest.mark.parametrize(("scorers", "reason"), [(["exact_macth"], "no scorer is called exact_macth"), ([], "none")])
def test_a_scorer_that_does_not_exist_excludes_the_member(log: MemoryLog, scorers: list[str], reason: str) -> None:
    for index, answer in enumerate("78"):
        append(log, rollout(0, index, answer=answer))
    append(log, with_scorers(rollout(0, 2), scorers))
    append(log, rollout(0, 3, answer="8"))
    driven(log)
    (group,) = on(log, "groups")
    assert [member.valid for member in group.members] == [True, True, False, True]
    (excluded,) = [reward for reward in on(log, "rewards") if reward.verdict == "excluded"]
    assert reason in excluded.excluded_because


def test_a_judgement_of_another_scorer_set_is_refused_and_not_taken_for_a_repeat(log: MemoryLog) -> None:
    """Nor does it join the group of the run's own set: rescore makes a run of its own for it."""
    for index in range(4):
        append(log, rollout(0, index, answer="78"[index % 2]))
    driven(log)
    (group,) = on(log, "groups")
    rewards: list[RewardAssigned] = on(log, "rewards")
    judged_again: list[Event] = [
        replace(reward, scorer_version="2", scorer_set="exact_match:2", meta=replace(reward.meta, id=f"again-{number}"))
        for number, reward in enumerate(rewards)
    ]
    append(log, judged_again)
    driven(log)
    # The second driver reads everything again: the same group has the same id.
    assert {event.meta.id for event in on(log, "groups")} == {group.meta.id}
    reasons = {event.reason for event in on(log, "dead-letters")}
    assert len(reasons) == 1
    assert "judged by exact_match:2, and this run is judged by exact_match:1" in reasons.pop()


def test_ids_of_rewards_and_groups_tell_runs_and_scorer_sets_apart(log: MemoryLog) -> None:
    """Of the same attempts, judged in two runs and by two sets."""
    for index in range(4):
        append(log, rollout(0, index, answer="78"[index % 2]))
    driven(log)
    trajectories: list[TrajectoryAssembled] = on(log, "trajectories")
    ids: list[set[str]] = []
    for run_id, version in ((RUN_ID, "1"), (RUN_ID, "2"), ("another", "1")):
        scorers = scorers_by_name([own_scorer(version)])
        score, group = ScoreTrajectories(scorers), GroupRewards()
        state, found = None, set[str]()
        for place, event in enumerate(trajectories):
            own = replace(event, meta=replace(event.meta, run_id=run_id), task=replace(event.task, scorers=["own"]))
            for reward in score.step(None, own, Address("trajectories", 0, place)).events:
                outcome = group.step(state, reward, Address("rewards", 0, place))
                state = outcome.state
                found |= {reward.meta.id, *(event.meta.id for event in outcome.events)}
        assert len(found) == 5
        ids.append(found)
    assert len(set.union(*ids)) == 15


def own_scorer(version: str) -> Any:
    return SimpleNamespace(
        name="own", version=version, score=lambda trajectory: Score(score=float(trajectory.index % 2))
    )


def test_a_scorer_that_speaks_of_infra_errors_does_not_leave_the_group_open(log: MemoryLog) -> None:
    for index in range(4):
        append(log, with_scorers(rollout(0, index), ["own"]))
    scorer = Scripted(lambda: Score(score=0.0, excluded_because="infra_error"))
    Driver(log, hops([scorer], "centred"), RUN_ID).run_until_caught_up()
    assert len(on(log, "groups")) == 1


def test_a_reward_of_others_that_is_no_number_is_not_counted(log: MemoryLog) -> None:
    for messages in groups(1):
        append(log, messages)
    driven(log)
    hop, state = GroupRewards("centred"), None
    for offset, reward in enumerate(on(log, "rewards")):
        spoilt = replace(reward, score=float("nan")) if reward.index == 1 else replace(reward, score=float(offset))
        outcome = hop.step(state, spoilt, Address("rewards", 0, offset))
        state = cast(GroupState, outcome.state)
    (group,) = outcome.events
    assert isinstance(group, GroupCompleted)
    assert [member.valid for member in group.members] == [True, False, True, True]
    assert math.isfinite(group.reward_mean)
    assert all(math.isfinite(member.advantage) for member in group.members)


def with_scorers(messages: list[Event], scorers: list[str]) -> list[Event]:
    """The same attempt at a task that names these scorers."""
    return [
        replace(event, task=replace(event.task, scorers=scorers)) if isinstance(event, RolloutStarted) else event
        for event in messages
    ]


def teamwork(group: int = 0, index: int = 0) -> list[Any]:
    """A rollout in which a leader asks a worker between its two turns: its messages, of two contexts, mixed."""
    started, first, called, observed, second, ended = cast("list[Any]", rollout(group, index))
    asked = AgentMessaged(meta=called.meta, kind="delegation", content="3+4?", tokens=pack_tokens([7, 8, 9]), context=1)
    worked = replace(second, meta=observed.meta, agent="worker", context=1)
    reply = AgentMessaged(meta=second.meta, kind="reply", content="7", tokens=observed.tokens)
    answered = replace(second, meta=ended.meta)
    later = replace(ended, meta=replace(ended.meta, id=f"{ended.meta.id}-last", seq=6))
    asked = replace(asked, context_because="first", meta=replace(asked.meta, sender="leader", receiver="worker"))
    return [started, replace(first, agent="leader"), asked, worked, reply, replace(answered, agent="leader"), later]


def test_contexts_are_laid_one_after_another(log: MemoryLog) -> None:
    messages = teamwork()
    append(log, messages)
    driven(log)
    (trajectory,) = on(log, "trajectories")
    started, first, asked, worked, reply, answered, _ = messages
    own = started.prompt_tokens + first.tokens + reply.tokens + answered.tokens
    assert trajectory.tokens == own + asked.tokens + worked.tokens
    start = token_count(own)
    assert trajectory.contexts == [
        Context(start=0, agent="agent"),
        Context(start=start, agent="worker", because="first"),
    ]
    sampled = [t for t, m in zip(unpack_tokens(trajectory.tokens), trajectory.loss_mask, strict=True) if m]
    assert sampled == unpack_tokens(first.tokens + answered.tokens + worked.tokens)
    logprobs = [p for p, m in zip(unpack_logprobs(trajectory.logprobs), trajectory.loss_mask, strict=True) if m]
    assert logprobs == unpack_logprobs(first.logprobs + answered.logprobs + worked.logprobs)
    by_agent: dict[str, list[int]] = {}
    for segment in trajectory.segments:
        by_agent.setdefault(segment.agent, []).extend(unpack_tokens(trajectory.tokens)[segment.start : segment.end])
    assert by_agent["leader"] == unpack_tokens(first.tokens + answered.tokens)
    assert by_agent["worker"] == unpack_tokens(worked.tokens)
    roles = [said.role for said in trajectory.transcript]
    assert roles == ["user", "assistant", "agent", "assistant", "agent", "assistant"]


def test_teamwork_delivered_twice_changes_nothing(log: MemoryLog) -> None:
    append(log, teamwork())
    append(log, teamwork()[2:])
    append(log, teamwork())
    driven(log)
    assert len(on(log, "trajectories")) == 1
    assert on(log, "dead-letters") == []


def broken_teamwork() -> list[tuple[str, int, dict[str, Any]]]:
    return [
        ("5 bytes of prompt tokens", 0, {"prompt_tokens": b"12345"}),
        ("context 2 of an attempt that has 1", 2, {"context": 2}),
        ("context -1", 2, {"context": -1}),
        ("no whole tokens", 2, {"tokens": b"12345"}),
        ("context 5 of an attempt that has 2", 3, {"context": 5}),
        ("context 2 of an attempt that has 2", 3, {"context": 2}),
        ("log-probabilities", 3, {"logprobs": b"1234"}),
        ("weight version", 3, {"versions": [VersionSpan(version=1, start=0, end=500)]}),
    ]


@pytest.mark.parametrize(("reason", "place", "change"), broken_teamwork())
def test_what_cannot_be_joined_is_refused(log: MemoryLog, reason: str, place: int, change: dict[str, Any]) -> None:
    messages = teamwork()
    messages[place] = replace(messages[place], **change)
    append(log, messages)
    driven(log)
    assert on(log, "trajectories") == []
    assert any(reason in reject.reason for reject in on(log, "dead-letters"))


def test_an_attempt_that_an_older_worker_began_is_finished() -> None:
    """State that was written before there were contexts is read, and comes to the same trajectory."""
    messages = rollout(0, 0)
    whole = [assembled for _, assembled in fold_batches(messages)][-1]
    state, _ = fold_batches(messages[:3])[-1]
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
    for attempt in raw["attempts"].values():
        for new in ("pieces", "contexts", "untaught"):
            del attempt[new]
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=AssemblyState)
    assert fold_batches(messages[3:], old)[-1][1] == whole


def fold_batches(messages: list[Event], state: AssemblyState | None = None) -> list[tuple[AssemblyState, list[Event]]]:
    hop = AssembleTrajectories()
    steps: list[tuple[AssemblyState, list[Event]]] = []
    for offset, event in enumerate(messages):
        outcome = hop.step(state, event, Address("messages", 0, offset))
        assert outcome.refused is None
        state = cast("AssemblyState", outcome.state)
        steps.append((state, list(outcome.events)))
    return steps


def test_what_a_teacher_said_never_enters_a_batch(log: MemoryLog) -> None:
    """Asked for as training, answered by a model without ids: groups of it are passed over, groups of the policy are cut."""
    taught: list[str] = []
    for group in range(40):
        for index in range(4):
            messages: list[Any] = rollout(group, index, answer="78"[index % 2])
            if group % 2 and index == 3:
                messages = [
                    replace(event, logprobs=b"", versions=[]) if isinstance(event, TurnGenerated) else event
                    for event in messages
                ]
                taught.append(str(messages[0].meta.trajectory_id))
            append(log, messages)
    driven(log)
    batches = on(log, "batches")
    assert batches
    cut = {member.trajectory_id for batch in batches for member in batch.members}
    assert cut
    assert not cut & set(taught)
    for trajectory in on(log, "trajectories"):
        if trajectory.meta.trajectory_id in taught:
            assert (trajectory.logprobs, trajectory.policy_version_oldest) == (b"", None)
            assert trajectory.tokens_sampled > 0  # it can be learned from, as a demonstration


def test_evaluations_are_scored_and_never_grouped(log: MemoryLog) -> None:
    append(log, rollout(0, 0, purpose="eval", group_size=1))
    driven(log)
    (reward,) = on(log, "rewards")
    assert isinstance(reward, RewardAssigned)
    assert (reward.score, reward.meta.purpose) == (1.0, "eval")
    assert on(log, "groups") == []


def test_a_batch_takes_fresh_groups_and_names_the_stale(log: MemoryLog) -> None:
    live = [rollout(g, i, answer="78"[i % 2], version=1 if g < 40 else 7) for g in range(60) for i in range(4)]
    for messages in live:
        append(log, messages)
    driven(log)
    batches = on(log, "batches")
    assert [batch.base_version for batch in batches] == list(range(1, len(batches) + 1))
    for batch in batches:
        assert isinstance(batch, BatchCut)
        assert batch.base_version - batch.policy_floor <= 4
        assert len(batch.groups) == 3
        assert len(batch.members) == 12
    cut = [group for batch in batches for group in batch.groups]
    stale = [group for batch in batches for group in batch.groups_stale]
    assert len(cut) == len(set(cut))
    assert not set(cut) & set(stale)
    assert stale


def test_the_cutter_reads_its_state_back_from_its_batches(log: MemoryLog) -> None:
    for messages in groups(40):
        append(log, messages)
    cutter = CutGroups(RUN_ID, groups_per_batch=3, staleness_max=100, first_version=1)
    Driver(log, hops((), "centred"), RUN_ID).run_until_caught_up()
    deliveries = log.reader(["groups"]).poll(1000, 0.0)
    whole: list[BatchCut] = []
    state = None
    for delivery in deliveries:
        assert delivery.event is not None
        outcome = cutter.step(state, delivery.event, delivery.address)
        state = outcome.state
        whole += [event for event in outcome.events if isinstance(event, BatchCut)]
    restarted: list[BatchCut] = []
    state, kept = None, whole[:2]
    for batch in kept:
        state = cutter.apply_batch(state, batch)
    consumed = {(p.topic, p.partition): p.offset for p in kept[-1].positions}
    for delivery in deliveries:
        place = (delivery.address.topic, delivery.address.partition)
        if delivery.address.offset >= consumed.get(place, 0) and delivery.event is not None:
            outcome = cutter.step(state, delivery.event, delivery.address)
            state = outcome.state
            restarted += [event for event in outcome.events if isinstance(event, BatchCut)]
    assert kept + restarted == whole


def test_groups_in_which_the_policy_said_nothing_are_passed_over(log: MemoryLog) -> None:
    for messages in groups(20):
        append(log, messages)
    Driver(log, hops((), "centred"), RUN_ID).run_until_caught_up()
    cutter = CutGroups(RUN_ID, groups_per_batch=3, staleness_max=100, first_version=1)
    state, passed = None, 0
    for number, group in enumerate(on(log, "groups")):
        assert isinstance(group, GroupCompleted)
        silent = replace(group, members=[replace(member, tokens_sampled=0) for member in group.members])
        outcome = cutter.step(state, silent, Address("groups", 0, number))
        assert outcome.events == ()
        state = cast(CutState, outcome.state)
        passed += group.dropped_because is None
    assert state is not None
    assert state.groups_dropped["nothing_sampled"] == passed >= 3


def test_garbage_becomes_rejects_and_good_messages_between_go_through(log: MemoryLog) -> None:
    chance = random.Random(0)
    written = 0
    for messages in groups(4):
        for event in messages:
            log.append(event)
            log.append_bytes("messages", b"garbage", chance.randbytes(chance.randrange(40)))
            written += 1
    driven(log)
    assert len(on(log, "trajectories")) == 16
    assert len(on(log, "dead-letters")) == written


def test_a_stage_that_rejects_too_much_stops(log: MemoryLog) -> None:
    for _ in range(200):
        log.append_bytes("messages", b"garbage", b"not an event")
    with pytest.raises(TooManyRejects, match="assemble rejected"):
        driven(log, rejects_share_max=0.5)


def test_a_busy_run_beside_it_does_not_hide_that_a_stage_rejects_everything(log: MemoryLog) -> None:
    for number in range(200):
        append(log, rollout(number, 0, run_id="other"))
        log.append_bytes("messages", b"garbage", b"not an event")
    with pytest.raises(TooManyRejects, match="assemble rejected"):
        driven(log, rejects_share_max=0.5)
