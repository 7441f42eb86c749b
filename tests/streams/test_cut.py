"""The cutter over the log in memory. On a real broker: test_app, test_trouble; under a seeded scheduler: tests/simulation."""

import threading

import msgspec
import pytest

from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.errors import LogBroken
from schemas.events import Address, GroupCompleted, GroupMember, Meta
from schemas.metrics import ProgramMetrics
from schemas.registry import MemoryRegistry
from schemas.topics import PARTITIONS
from streams.config import CutSettings
from streams.cut import Cutter, batches_of, restore_state
from streams.hops.groups_to_batches import STATE_VERSION, CutGroups
from streams.log.memory import MemoryLog
from streams.log.partitioner import partition_of
from streams.log.snapshots import newest_snapshot
from streams.rules.dead_letter import TooManyRejects
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
    assert restore_state(log, HOP, RUN).index_next == 200
    assert max(tails) <= 8 + 1
    assert max(states) <= 1.2 * states[0]


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
    with pytest.raises(LogBroken, match="batch 2 follows on the log where batch 1 is due"):
        restore_state(log, HOP, RUN)


def test_a_group_that_comes_again_after_it_was_forgotten_is_stale_and_not_trained_on(log: MemoryLog) -> None:
    for number in range(40):
        log.append(completed_group(number, version=number // 2))
    cut_all(log)
    assert NAMES[0] not in restore_state(log, HOP, RUN).seen
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
