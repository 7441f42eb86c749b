"""The cutter over the log in memory. On a real broker: test_app, test_trouble; under a seeded scheduler: tests/simulation."""

import threading

import msgspec
import pytest

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import LogBroken
from replayground.schemas.events import Address, BatchCut, GroupCompleted, GroupMember, Meta
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.topics import PARTITIONS
from replayground.streams.config import CutSettings
from replayground.streams.cut import Cutter, batches_of, fold_batches, restore_state
from replayground.streams.hops.groups_to_batches import STATE_VERSION, CutGroups, CutState
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.partitioner import partition_of
from replayground.streams.log.snapshots import newest_snapshot
from replayground.streams.rules.dead_letter import TooManyRejects
from tests.consumers.synthetic_run import run_of

RUN = msgspec.structs.replace(run_of(steps=1, demonstrations=1), program="cut")
HOP = CutGroups(RUN.run_id, groups_per_batch=2, staleness_max=4, first_version=0)


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))


NAMES = [name for name in (f"g{number}" for number in range(4000)) if partition_of(name.encode(), PARTITIONS) == 0]
"of groups on one partition, which are read in their order"


class UntilAllIsCut(threading.Event):
    """Tells the cutter to stop when it has committed everything."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__()
        self._log = log
        self._looks = 0

    def is_set(self) -> bool:
        self._looks += 1
        assert self._looks < 10_000, "something is never cut"
        return self._log.group_lags(f"cut-{RUN.run_id}", ["groups"])["groups"].lag == 0


class UntilAllIsRead(UntilAllIsCut):
    """Tells the cutter to stop when it has read everything, whether it could cut it or not."""

    def __init__(self, log: MemoryLog, program_metrics: ProgramMetrics) -> None:
        super().__init__(log)
        self._program_metrics = program_metrics
        self.unread = len(log.reader(["groups"], start=restore_state(log, HOP, RUN).groups_from).poll(10**6, 0.0))

    def is_set(self) -> bool:
        return self._program_metrics.figures().get("events_read", 0) >= self.unread


def read_all(log: MemoryLog, snapshot_groups: int) -> int:
    """One life of a cutter; how many groups it read."""
    program_metrics = ProgramMetrics()
    settings = CutSettings(poll_seconds=0.01, snapshot_groups=snapshot_groups)
    cutter, stop = Cutter(log, HOP, RUN, settings, program_metrics), UntilAllIsRead(log, program_metrics)
    cutter.run_until(stop)
    return stop.unread


def cut_all(log: MemoryLog, snapshot_batches: int = 8) -> None:
    settings = CutSettings(poll_seconds=0.01, snapshot_batches=snapshot_batches)
    Cutter(log, HOP, RUN, settings, ProgramMetrics()).run_until(UntilAllIsCut(log))


def completed_group(number: int, version: int) -> GroupCompleted:
    """One that teaches something."""
    meta = Meta(
        id=f"group-{NAMES[number]}",
        run_id=RUN.run_id,
        group_id=NAMES[number],
        category="group",
        topic="groups",
        sender="group",
        timestamp=number,
        purpose="train",
    )
    members = [
        GroupMember(
            index=index,
            trajectory_id=f"{NAMES[number]}-m{index}",
            attempt_id=f"{NAMES[number]}-m{index}-a0",
            trajectory=Address("trajectories", 0, 2 * number + index),
            reward=float(index),
            advantage=index - 0.5,
            valid=True,
            tokens_sampled=3,
            policy_version_oldest=version,
        )
        for index in range(2)
    ]
    return GroupCompleted(
        meta=meta, scorer_set="s:1", members=members, reward_mean=0.5, reward_deviation=0.7, dropped_because=None
    )


def test_a_restart_reads_the_same_number_of_batches_however_long_the_run_is(log: MemoryLog) -> None:
    tails, states = [], []
    for first in range(0, 400, 100):
        for number in range(first, first + 100):
            log.append(completed_group(number, version=number // 2))
        cut_all(log)
        taken = newest_snapshot(log, RUN, STATE_VERSION)
        assert taken is not None
        tails.append(len(list(batches_of(log, RUN, taken.positions))))
        states.append(len(taken.state))
    assert restore_state(log, HOP, RUN).state.index_next == 200
    assert max(tails) <= 8 + 1
    assert max(states) <= 1.2 * states[0]


def solved_group(number: int, version: int = 0) -> GroupCompleted:
    """One whose members are all alike."""
    return msgspec.structs.replace(completed_group(number, version), dropped_because="zero_variance")


def test_while_nothing_teaches_neither_the_state_nor_what_a_restart_reads_grows(log: MemoryLog) -> None:
    log.append(completed_group(0, version=0))  # it waits for a second one
    read, states = [], []
    for first in range(1, 881, 220):
        for number in range(first, first + 220):
            log.append(solved_group(number))
        read.append(read_all(log, snapshot_groups=50))
        taken = newest_snapshot(log, RUN, STATE_VERSION)
        assert taken is not None
        states.append(len(taken.state))
    assert log.count(["batches"]) == {"batches": 0}
    assert read_all(log, snapshot_groups=50) < 50
    assert max(read) < 220 + 50
    assert states[2] == states[3], "the newest 256 of the partition are remembered"
    log.append(completed_group(881, version=0))
    read_all(log, snapshot_groups=50)
    (batch,) = batches_of(log, RUN, ())
    assert batch.groups == sorted([NAMES[0], NAMES[881]])
    assert batch.groups_dropped == {"zero_variance": 880}
    assert batch.groups_passed == sorted(NAMES[881 - 256 : 881])


def test_stale_groups_that_a_batch_does_not_name_are_counted(log: MemoryLog) -> None:
    for number in range(20):
        log.append(completed_group(number, version=number // 2))
    for number in range(20, 320):
        log.append(completed_group(number, version=0))
    for number in range(320, 322):
        log.append(completed_group(number, version=10))
    cut_all(log)
    *_, last = batches_of(log, RUN, ())
    assert last.groups_stale == sorted(NAMES[320 - 256 : 320])
    assert last.groups_stale_unnamed == 300 - 256


def test_a_snapshot_between_batches_that_is_ahead_of_the_log_is_refused(log: MemoryLog) -> None:
    for number in range(2):
        log.append(completed_group(number, version=0))
    for number in range(2, 40):
        log.append(solved_group(number))
    read_all(log, snapshot_groups=10)
    assert restore_state(log, HOP, RUN).state.index_next == 1
    (batch,) = log._partitions["batches", 0]
    foreign = msgspec.structs.replace(next(iter(batches_of(log, RUN, ()))), meta=other_run_meta())
    log.append(foreign)
    log._partitions["batches", 0].remove(batch)  # another run has written where it stood
    with pytest.raises(LogBroken, match="snapshot of the cutter was taken with batch 0, which is not on the log"):
        restore_state(log, HOP, RUN)
    log._partitions["batches", 0].clear()
    with pytest.raises(LogBroken):
        restore_state(log, HOP, RUN)


def other_run_meta() -> Meta:
    return Meta(id="foreign", run_id="another", category="batch", topic="batches", sender="cut", timestamp=0)


def test_groups_of_other_runs_are_not_read_again_and_again(log: MemoryLog) -> None:
    for number in range(100):
        group = solved_group(number)
        log.append(msgspec.structs.replace(group, meta=msgspec.structs.replace(group.meta, run_id="another")))
    assert read_all(log, snapshot_groups=30) == 100
    assert read_all(log, snapshot_groups=30) == 10


def test_a_group_that_is_delivered_again_below_the_positions_changes_nothing() -> None:
    hop = CutGroups(RUN.run_id, 2, staleness_max=4, first_version=0, not_taken_remembered=1)
    state = None
    for number in range(3):  # the first two are forgotten
        state = hop.step(state, solved_group(number), Address("groups", 0, number)).state
    before = msgspec.msgpack.encode(state)
    assert msgspec.msgpack.encode(hop.step(state, solved_group(0), Address("groups", 0, 0)).state) == before


def test_a_batch_after_a_snapshot_says_what_of_the_snapshot_was_forgotten_since() -> None:
    hop = CutGroups(RUN.run_id, 1, staleness_max=4, first_version=0, not_taken_remembered=2)
    state, between = None, b""
    batches: list[BatchCut] = []
    for number, group in enumerate([*(solved_group(number) for number in range(6)), completed_group(6, version=0)]):
        outcome = hop.step(state, group, Address("groups", 0, number))
        state = outcome.state
        batches += [event for event in outcome.events if isinstance(event, BatchCut)]
        if number == 2:
            between = msgspec.msgpack.encode(state)
    restored_between = msgspec.msgpack.decode(between, type=CutState)
    assert set(restored_between.seen) == {NAMES[1], NAMES[2]}
    assert fold_batches(hop, batches, restored_between) == fold_batches(hop, batches) == state
    assert set(fold_batches(hop, batches).seen) == {NAMES[4], NAMES[5], NAMES[6]}


def test_a_snapshot_that_is_ahead_of_the_log_is_refused(log: MemoryLog) -> None:
    for number in range(6):
        log.append(completed_group(number, version=0))
    cut_all(log, snapshot_batches=1)
    log._partitions["batches", 0].pop()
    with pytest.raises(LogBroken, match="snapshot of the cutter was taken with batch 2, which is not on the log"):
        restore_state(log, HOP, RUN)
    log._partitions["batches", 0].clear()
    with pytest.raises(LogBroken):
        restore_state(log, HOP, RUN)


def test_a_batch_that_is_missing_on_the_log_is_noticed(log: MemoryLog) -> None:
    for number in range(6):
        log.append(completed_group(number, version=0))
    cut_all(log)
    log._partitions["snapshots", 0].clear()
    del log._partitions["batches", 0][1]
    with pytest.raises(LogBroken, match="found batch 2, expected batch 1"):
        restore_state(log, HOP, RUN)


def test_a_group_that_comes_again_after_it_was_forgotten_is_stale_and_not_trained_on(log: MemoryLog) -> None:
    for number in range(40):
        log.append(completed_group(number, version=number // 2))
    cut_all(log)
    assert NAMES[0] not in restore_state(log, HOP, RUN).state.seen
    for number in (0, 1, 2, 40, 41):
        log.append(completed_group(number, version=number // 2))
    cut_all(log)
    batches = list(batches_of(log, RUN, ()))
    assert batches[-1].groups_stale == sorted(NAMES[:3])
    cut = [group for batch in batches for group in batch.groups]
    assert sorted(cut) == sorted(NAMES[:42])


def test_a_cutter_that_can_read_next_to_nothing_stops_with_an_alarm(log: MemoryLog) -> None:
    for number in range(200):
        log.append_bytes("groups", str(number).encode(), b"no group at all")
    cutter = Cutter(log, HOP, RUN, CutSettings(poll_seconds=0.01), ProgramMetrics())
    with pytest.raises(TooManyRejects, match="cut rejected 100 of the last 100"):
        cutter.run_until(threading.Event())
    assert log.count(["dead-letters"]) == {"dead-letters": 99}, "what was refused before the alarm is told of"
