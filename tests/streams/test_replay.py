"""Replay over the log in memory: what is judged again, however often the replay is stopped. With processes and on a real
broker: tests/deploy/test_rescore.py."""

import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput, LogUnavailable
from replayground.schemas.events import (
    BatchCut,
    Event,
    GroupCompleted,
    Meta,
    Position,
    RewardAssigned,
    TrajectoryAssembled,
)
from replayground.schemas.job import Score
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import Run
from replayground.schemas.topics import PARTITIONS
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.memory import MemoryLog, MemoryTransactor
from replayground.streams.log.protocol import Reader, Tombstone
from replayground.streams.replay.copying import CopyRule, copy_batches
from replayground.streams.replay.cutting import cut_replay
from replayground.streams.replay.rescoring import (
    Judges,
    PartitionRange,
    PartitionState,
    Rescoring,
    rescore_partition,
    rescore_partitions,
)
from replayground.streams.replay.selection import (
    TOPIC,
    PartitionSelection,
    addresses_of,
    by_partition,
    find_selection,
    selected_event,
)
from replayground.streams.rules.comparison import Comparison, compare, judgements
from replayground.streams.rules.scoring import scorers_by_name
from tests.consumers.synthetic_run import run_of
from tests.flow.synthetic import RUN_ID, rollout

REPLAY: Run = replace(run_of(steps=1, demonstrations=1), run_id="again", program="replay", start=())
GROUPS = 30


class Shortest:
    """1 for an answer of one digit: another order than exact_match gives."""

    name = "shortest"
    version = "1"

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        return Score(score=float(len(trajectory.answer or "") == 1))


@pytest.fixture
def log(tmp_path: Path) -> MemoryLog:
    return recorded(new_log(tmp_path))


def new_log(folder: Path, kind: type[MemoryLog] = MemoryLog) -> MemoryLog:
    return kind(Codec(MemoryRegistry(), Blobs((folder / "blobs").as_uri())))


def recorded(log: MemoryLog, run_id: str = RUN_ID) -> MemoryLog:
    """A log with a run: some members answer 7, which is right, some 12 or 8; one attempt fails and is made again."""
    for group in range(GROUPS):
        chance = random.Random(group)
        for index in range(4):
            if (group, index) == (3, 1):
                append(log, rollout(group, index, answer=None, ended_by="infra_error", run_id=run_id))
            answer = chance.choice(["7", "8", "12"])
            append(log, rollout(group, index, attempt=1, answer=answer, run_id=run_id))
    append(log, rollout(1000, 0, purpose="eval", group_size=1, run_id=run_id))
    Driver(log, hops((), "centred"), run_id).run_until_caught_up()
    return log


def append(log: MemoryLog, events: Sequence[Event]) -> None:
    for event in events:
        log.append(event)


def on(log: MemoryLog, topic: str, run_id: str) -> list[Any]:
    events = [delivery.event for delivery in log.reader([topic]).poll(10**6, 0.0)]
    return [event for event in events if event is not None and event.meta.run_id == run_id]


def judges(*scorers: Any, names: tuple[str, ...] = (), sources: tuple[str, ...] = (RUN_ID,)) -> Judges:
    return Judges(REPLAY.run_id, frozenset(sources), scorers_by_name(scorers), names)


def rescored(
    log: MemoryLog,
    by: Judges,
    selections: dict[int, PartitionSelection] | None = None,
    trajectories_per_commit: int = 7,
) -> dict[int, PartitionState]:
    states: dict[int, PartitionState] = {}
    for end in log.end_positions([TOPIC]):
        chosen = None if selections is None else selections.get(end.partition, PartitionSelection.empty())
        start = replace(end, offset=0)
        wanted = PartitionRange(by.sources, start, partial(int, end.offset), trajectories_per_commit)
        state = rescore_partition(
            REPLAY, log, Rescoring(by, chosen), wanted, lambda partition, state: None, threading.Event()
        )
        assert state is not None
        states[end.partition] = state
    return states


def test_the_same_scorers_judge_the_same(log: MemoryLog) -> None:
    rescored(log, judges())
    old = {event.meta.attempt_id: event for event in on(log, "rewards", RUN_ID)}
    new = {event.meta.attempt_id: event for event in on(log, "rewards", REPLAY.run_id)}
    assert old.keys() == new.keys()
    assert all(new[key].score == old[key].score and new[key].trajectory == old[key].trajectory for key in old)
    assert {e.meta.id for e in old.values()}.isdisjoint({e.meta.id for e in new.values()})


def test_groups_are_those_of_the_source_with_other_ids(log: MemoryLog) -> None:
    rescored(log, judges())
    old = {event.meta.group_id: event for event in on(log, "groups", RUN_ID)}
    new = {event.meta.group_id: event for event in on(log, "groups", REPLAY.run_id)}
    assert old.keys() == new.keys()
    assert len(new) == GROUPS
    for key, group in new.items():
        assert group.members == old[key].members
        assert (group.meta.purpose, old[key].meta.purpose) == ("replay", "train")
        assert group.meta.id != old[key].meta.id


def test_another_scorer_gives_other_groups_and_leaves_the_old_ones(log: MemoryLog) -> None:
    before = on(log, "rewards", RUN_ID) + on(log, "groups", RUN_ID)
    rescored(log, judges(Shortest(), names=("shortest",)))
    assert on(log, "rewards", RUN_ID) + on(log, "groups", RUN_ID) == before
    rewards = on(log, "rewards", REPLAY.run_id)
    assert {(reward.scorer, reward.scorer_set) for reward in rewards} == {("shortest", "shortest:1")}
    assert {group.scorer_set for group in on(log, "groups", REPLAY.run_id)} == {"shortest:1"}


def test_evaluations_are_judged_and_not_grouped(log: MemoryLog) -> None:
    rescored(log, judges())
    (evaluated,) = [reward for reward in on(log, "rewards", REPLAY.run_id) if reward.meta.purpose == "eval"]
    assert evaluated.score == 1.0
    assert all(group.meta.group_id != evaluated.meta.group_id for group in on(log, "groups", REPLAY.run_id))


def test_other_runs_are_left_alone(log: MemoryLog) -> None:
    recorded(log, "another")
    rescored(log, judges())
    assert len(on(log, "rewards", REPLAY.run_id)) == len(on(log, "rewards", RUN_ID))
    assert len(on(log, "rewards", "another")) == len(on(log, "rewards", RUN_ID))


def test_a_trajectory_that_is_on_the_log_twice_counts_once(log: MemoryLog) -> None:
    append(log, on(log, "trajectories", RUN_ID)[-40:])
    states = rescored(log, judges())
    assert sum(state.counts.repeats for state in states.values()) == 40
    ids = [event.meta.id for topic in ("rewards", "groups") for event in on(log, topic, REPLAY.run_id)]
    assert len(ids) == len(set(ids))
    assert len(on(log, "groups", REPLAY.run_id)) == GROUPS


class Failing(MemoryLog):
    """A log whose transactions fail by a seeded chance, before or after they are done."""

    chance = random.Random(0)

    def transactor(self, name: str) -> MemoryTransactor:
        inner = super().transactor(name)
        return _FailingTransactor(self, inner)


class _FailingTransactor(MemoryTransactor):
    def __init__(self, log: Failing, inner: MemoryTransactor) -> None:
        super().__init__(log, inner._name, inner._epoch)
        self._chance, self._inner = log.chance, inner

    def commit(self, events: Sequence[Event], reader: Reader | None, tombstones: Sequence[Tombstone] = ()) -> None:
        if self._chance.random() < 0.3:
            raise LogUnavailable("aborted")
        self._inner.commit(events, reader, tombstones)
        if self._chance.random() < 0.3:
            raise LogUnavailable("in doubt")


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_that_fails_anywhere_ends_as_an_undisturbed_one(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayground.streams.replay.patience._RETRY_SECONDS", 0.0)
    monkeypatch.setattr("replayground.streams.replay.cutting._BATCHES_PER_COMMIT", 1)
    quiet, failing = recorded(new_log(tmp_path / "a")), recorded(new_log(tmp_path / "b", Failing))
    assert isinstance(failing, Failing)
    failing.chance = random.Random(seed)
    for log in (quiet, failing):
        rescored(log, judges(Shortest(), names=("shortest",)))
        cut_until_done(log)
    for topic in ("rewards", "groups", "batches"):
        again = on(failing, topic, REPLAY.run_id)
        assert [encoded(event) for event in again] == [encoded(event) for event in on(quiet, topic, REPLAY.run_id)]
        assert again


@pytest.mark.parametrize("seed", range(5))
def test_batches_are_copied_once_however_often_the_copying_fails(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayground.streams.replay.patience._RETRY_SECONDS", 0.0)
    monkeypatch.setattr("replayground.streams.replay.copying._BATCHES_PER_COMMIT", 1)
    log = recorded(new_log(tmp_path, Failing))
    assert isinstance(log, Failing)
    log.chance = random.Random(seed)
    rescored(log, judges(Shortest(), names=("shortest",)))
    count = cut_until_done(log)
    assert count > 1
    rule = CopyRule(run_id="copy", source=REPLAY.run_id, first_version=1)
    copied = copy_batches(replace(REPLAY, run_id="copy"), log, rule, (), lambda: True, threading.Event())
    assert copied is not None
    originals, copies = on(log, "batches", REPLAY.run_id), on(log, "batches", "copy")
    assert copied.index_next == len(copies) == count
    assert [(copy.index, copy.base_version, copy.members) for copy in copies] == [
        (batch.index, batch.base_version, batch.members) for batch in originals
    ]


def encoded(event: Event) -> bytes:
    return msgspec.json.encode(event)


def cut_until_done(log: MemoryLog) -> int:
    count = cut_replay(REPLAY, log, 3, 1, lambda count: None, threading.Event())
    assert count is not None
    return count


def test_batches_are_cut_in_one_order_of_all_partitions(log: MemoryLog) -> None:
    rescored(log, judges())
    count = cut_until_done(log)
    batches: list[BatchCut] = on(log, "batches", REPLAY.run_id)
    useful = [group.meta.group_id for group in merged(log) if group.dropped_because is None]
    assert count == len(batches) == len(useful) // 3
    assert [batch.base_version for batch in batches] == list(range(1, count + 1))
    for number, batch in enumerate(batches):
        assert sorted(batch.groups) == sorted(str(group_id) for group_id in useful[3 * number : 3 * number + 3])
        assert batch.scorer_sets == ["exact_match:1"]
    assert cut_until_done(log) == count, "cutting again adds nothing"
    assert len(on(log, "batches", REPLAY.run_id)) == count


def merged(log: MemoryLog) -> list[GroupCompleted]:
    """The earliest of the next groups of all partitions, again and again."""
    waiting: list[list[GroupCompleted]] = []
    for partition in range(PARTITIONS):
        events = [delivery.event for delivery in log.reader(["groups"], partitions=[partition]).poll(10**6, 0.0)]
        groups = [event for event in events if isinstance(event, GroupCompleted)]
        waiting.append([group for group in groups if group.meta.run_id == REPLAY.run_id])
    found: list[GroupCompleted] = []
    while any(waiting):
        first = min((groups for groups in waiting if groups), key=lambda groups: groups[0].meta.timestamp)
        found.append(first.pop(0))
    return found


def test_a_selection_makes_groups_of_what_was_chosen(log: MemoryLog) -> None:
    chosen = []
    for delivery in log.reader([TOPIC]).poll(10**6, 0.0):
        event = delivery.event
        assert isinstance(event, TrajectoryAssembled)
        if event.meta.group_id in ("g1", "g2") and event.index < 3:
            chosen.append((delivery.address.partition, delivery.address.offset, 3))
    event = selected_event(_meta(), "three", [RUN_ID], "index < 3", reversed(chosen))
    log.append(event)
    rescored(log, judges(), by_partition(find_selection(log, "three")))
    groups = on(log, "groups", REPLAY.run_id)
    assert sorted(group.meta.group_id for group in groups) == ["g1", "g2"]
    assert all([member.index for member in group.members] == [0, 1, 2] for group in groups)


def test_a_selection_is_found_by_name_and_checked(log: MemoryLog) -> None:
    first = selected_event(_meta("1"), "mine", [], "", [(0, 5, 1), (2, 1, 1)])
    second = selected_event(_meta("2"), "mine", [], "", [(0, 5, 1)])
    append(log, [first, second])
    assert find_selection(log, "mine") == second
    assert find_selection(log, "1") == first
    assert [(a.partition, a.offset) for a in addresses_of(first)] == [(0, 5), (2, 1)]
    with pytest.raises(BadInput, match="no selection other"):
        find_selection(log, "other")
    with pytest.raises(BadInput, match="damaged"):
        by_partition(replace(first, sha256=second.sha256))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200), st.integers(1, 9)), unique_by=lambda c: c[:2]))
def test_a_selection_holds_just_what_was_chosen(chosen: list[tuple[int, int, int]]) -> None:
    sets = by_partition(selected_event(_meta(), "any", [], "", chosen))
    sizes = {(partition, offset): size for partition, offset, size in chosen}
    for partition in range(PARTITIONS):
        found = sets.get(partition, PartitionSelection.empty())
        assert [found.group_size(offset) for offset in range(201)] == [
            sizes.get((partition, offset)) for offset in range(201)
        ]


def test_the_comparison_counts_what_changed(log: MemoryLog) -> None:
    rescored(log, judges(Shortest(), names=("shortest",)))
    total = Comparison()
    for partition in range(PARTITIONS):
        total += compare(
            judgements(rewards_of(log, RUN_ID, partition)),
            judgements(rewards_of(log, REPLAY.run_id, partition)),
            partition,
        )
    answers = {e.meta.attempt_id: e.answer for e in on(log, "trajectories", RUN_ID)}
    played = list(answers.values())
    assert total.attempts == len(played)
    assert total.to_passed == played.count("8")
    assert total.to_failed == 0
    assert total.agreed == len(played) - played.count("8")
    assert total.passed_before == played.count("7")
    assert total.reward_after == played.count("7") + played.count("8")
    assert len(total.changes) == 10
    assert {change.distance for change in total.changes} == {1.0}
    assert total.groups == GROUPS
    assert total.groups_reordered == 0, "8 rose to 7, and nothing that was better became worse"


def test_an_attempt_whose_rewards_were_cut_short_and_written_again_is_compared_once(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    for index in range(2):
        append(log, rollout(0, index, group_size=2))
    Driver(log, hops((), "centred"), RUN_ID).run_until_caught_up()
    one, two = (replace(event, scorers=["a", "b"]) for event in on(log, "rewards", RUN_ID))
    assert one.trajectory.offset < two.trajectory.offset
    a, b = ([replace(event, scorer=name) for event in (one, two)] for name in ("a", "b"))
    killed_between = [a[0], b[0], a[1], a[0], b[0], a[1], b[1]]
    assert [found.offset for found in judgements(killed_between)] == [one.trajectory.offset, two.trajectory.offset]


def test_an_attempt_that_a_judge_has_not_judged_is_not_compared(log: MemoryLog) -> None:
    judged_once = [reward for reward in rewards_of(log, RUN_ID, 0) if reward.verdict == "scored"]
    whole = [replace(reward, scorers=["exact_match", "polite"]) for reward in judged_once]
    late = [replace(reward, scorer="polite", score=0.5) for reward in whole[1:]]
    # In the order of the trajectories, as deploy.experience.rescoring reads the rewards of a run with judges.
    found = list(judgements(sorted([*whole, *late], key=lambda reward: reward.trajectory.offset)))
    assert [judged.offset for judged in found] == [reward.trajectory.offset for reward in whole[1:]]
    assert [judged.reward for judged in found] == [reward.score + 0.5 for reward in whole[1:]]


def rewards_of(log: MemoryLog, run_id: str, partition: int) -> list[RewardAssigned]:
    reader = log.reader(["rewards"], partitions=[partition])
    events = [delivery.event for delivery in reader.poll(10**6, 0.0)]
    return [event for event in events if isinstance(event, RewardAssigned) and event.meta.run_id == run_id]


def _meta(name: str = "0") -> Meta:
    return Meta(id=name, run_id="again", category="selection", topic="selections", sender="me", timestamp=0)


def test_a_partition_is_read_from_its_start_only(log: MemoryLog) -> None:
    (end, *_) = log.end_positions([TOPIC])
    start = Position(topic=TOPIC, partition=end.partition, offset=end.offset - 2)
    by = judges()
    wanted = PartitionRange(by.sources, start, lambda: end.offset)
    state = rescore_partition(REPLAY, log, Rescoring(by), wanted, lambda partition, state: None, threading.Event())
    assert state is not None
    assert (state.counts.trajectories, state.offset) == (2, end.offset)


def test_partitions_are_judged_one_after_another_and_none_after_a_stop(log: MemoryLog) -> None:
    by, stop = judges(), threading.Event()
    parts = [
        (Rescoring(by), PartitionRange(by.sources, replace(end, offset=0), partial(int, end.offset)))
        for end in log.end_positions([TOPIC])
    ]
    told: list[int] = []
    states = rescore_partitions(REPLAY, log, parts, lambda partition, state: told.append(partition), stop)
    assert next(states).offset == next(log_end.offset for log_end in log.end_positions([TOPIC]))
    stop.set()
    assert list(states) == []
    assert set(told) == {0}
    judged = len(on(log, "rewards", REPLAY.run_id))
    # The others go on where they were: nothing of the first partition is written again.
    rest = rescore_partitions(REPLAY, log, parts, lambda *_: None, threading.Event())
    assert [state.offset for state in rest] == [end.offset for end in log.end_positions([TOPIC])]
    ids = [reward.meta.id for reward in on(log, "rewards", REPLAY.run_id)]
    assert judged < len(ids) == len(set(ids)) == len(on(log, "rewards", RUN_ID))


def test_attempts_that_come_after_their_group_make_no_second_one(tmp_path: Path) -> None:
    """A worker that was taken for dead ends its attempts later, after the members were filled by others."""
    log = new_log(tmp_path)
    for attempt in (1, 2):
        for index, answer in enumerate(("7", "12")):
            append(log, rollout(0, index, attempt=attempt, answer=answer, group_size=2))
    Driver(log, hops((), "centred"), RUN_ID).run_until_caught_up()
    assert len(on(log, TOPIC, RUN_ID)) == 4
    assert len(on(log, "groups", RUN_ID)) == 1
    states = rescored(log, judges())
    (old,), (new,) = on(log, "groups", RUN_ID), on(log, "groups", REPLAY.run_id)
    assert [member.attempt_id for member in new.members] == [member.attempt_id for member in old.members]
    assert not any(state.groups for state in states.values())


def test_a_replay_of_another_release_is_not_begun_again(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots alone say what was written: a state that cannot be read must not count as none."""
    rescored(log, judges())
    before = len(on(log, "rewards", REPLAY.run_id))
    monkeypatch.setattr("replayground.streams.replay.rescoring.STATE_VERSION", "rescoring-of-tomorrow")
    with pytest.raises(BadInput, match="was begun by another release"):
        rescored(log, judges())
    cut_replay(REPLAY, log, 4, 1, lambda count: None, threading.Event())
    batches = len(on(log, "batches", REPLAY.run_id))
    monkeypatch.setattr("replayground.streams.replay.cutting.STATE_VERSION", "cutting-of-tomorrow")
    with pytest.raises(BadInput, match="was begun by another release"):
        cut_replay(REPLAY, log, 4, 1, lambda count: None, threading.Event())
    assert (len(on(log, "rewards", REPLAY.run_id)), len(on(log, "batches", REPLAY.run_id))) == (before, batches)
