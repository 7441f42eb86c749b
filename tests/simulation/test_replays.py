"""Replays of a simulated run: judged again, cut and copied by programs that are killed anywhere, beside rivals that do the
same. What is on the log in the end is what an undisturbed replay writes, byte for byte and once."""

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import pytest
from msgspec.structs import replace

from replayground.schemas.errors import Fenced
from replayground.schemas.events import Event, TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Log
from replayground.streams.replay.copying import CopyRule, copy_batches
from replayground.streams.replay.cutting import cut_replay
from replayground.streams.replay.rescoring import Judges, PartitionRange, Rescoring, rescore_partition
from replayground.streams.replay.selection import TOPIC
from replayground.streams.rules.scoring import scorers_by_name
from tests.simulation.simulator import _CODEC, RUN, RUN_ID, simulate
from tests.simulation.troubled_log import Fate, Killed, TroubledLog

REPLAY, COPY = (replace(RUN, run_id=name, program="replay", start=()) for name in ("again", "retrained"))
PARTITIONS = range(4)
SEEDS = 48


class Hostile:
    """Fails, answers nonsense, and is where its program may be killed."""

    name = "hostile"
    version = "1"

    def __init__(self, may_kill: Callable[[], None]) -> None:
        self._may_kill = may_kill

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        self._may_kill()
        place = int((trajectory.meta.group_id or "g0")[1:])
        match place % 8:
            case 0:
                raise ArithmeticError(place)
            case 1:
                return Score(score=float("nan"))
            case 2:
                return Score(score=1e9 * (-1) ** trajectory.index)
            case _:
                return Score(score=float(trajectory.index % 2))


def judge(log: Log, fate: Fate, start_rival: Callable[[], None]) -> None:
    """One life of the program that judges all partitions. Raises Killed, Fenced."""
    judges = Judges(REPLAY.run_id, frozenset({RUN_ID}), scorers_by_name([Hostile(fate.may_kill)]), ("hostile",))
    for end in log.end_positions([TOPIC]):
        wanted = PartitionRange(
            judges.sources, replace(end, offset=0), partial(int, end.offset), trajectories_per_commit=3
        )
        rescore_partition(REPLAY, log, Rescoring(judges), wanted, lambda *_: start_rival(), threading.Event())


def cut(log: Log) -> None:
    cut_replay(REPLAY, log, 2, 0, lambda count: None, threading.Event())


def copy(log: Log) -> None:
    rule = CopyRule(run_id=COPY.run_id, source=REPLAY.run_id, first_version=0)
    copy_batches(COPY, log, rule, (), lambda: True, threading.Event())


def replayed(log: MemoryLog, fate: Fate) -> None:
    """The whole replay, however many lives each program needs."""

    def rival() -> None:
        # It takes the partition over: the one that was there first is fenced at its next commit.
        if fate.happens(0.05):
            with suppress(Killed, Fenced):
                judge(TroubledLog(log, fate), fate, lambda: None)

    for program in (lambda troubled: judge(troubled, fate, rival), cut, copy):
        while True:
            with suppress(Killed, Fenced):
                program(TroubledLog(log, fate))
                break


def copied(log: MemoryLog) -> MemoryLog:
    """The same messages at the same addresses: batches name the positions of groups."""
    other = MemoryLog(_CODEC)
    for message in log.messages([TOPIC, "rewards", "groups", "batches"]):
        other.append_bytes(message.address.topic, message.key, message.value or b"")
    return other


def written(log: MemoryLog, topic: str, run_id: str) -> list[list[bytes]]:
    """Events of a run, by partition in their order."""
    found: list[list[bytes]] = []
    for partition in PARTITIONS if topic != "batches" else (0,):
        events: list[Event | None] = [
            delivery.event for delivery in log.reader([topic], partitions=[partition]).poll(10**6, 0.0)
        ]
        found.append([msgspec.json.encode(event) for event in events if event and event.meta.run_id == run_id])
    return found


@pytest.mark.parametrize("first", range(0, SEEDS, 12))
def test_trouble_changes_nothing_in_a_replay(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing comes while it waits.
    monkeypatch.setattr("replayground.streams.replay.rescoring._POLL_SECONDS", 0.0)
    monkeypatch.setattr("replayground.streams.replay.copying._POLL_SECONDS", 0.0)
    kills = batches = 0
    for seed in range(first, first + 12):
        simulated = simulate(seed)
        log, quiet = simulated.log, copied(simulated.log)
        before = [written(log, topic, RUN_ID) for topic in ("rewards", "groups", "batches")]
        fate = Fate(random.Random(seed), kill_share=0.05)
        replayed(log, fate)
        replayed(quiet, Fate(random.Random(0), kill_share=0.0, at_peace=True))
        for topic, run_id in (
            ("rewards", "again"),
            ("groups", "again"),
            ("batches", "again"),
            ("batches", "retrained"),
        ):
            assert written(log, topic, run_id) == written(quiet, topic, run_id), f"seed {seed}: {topic} of {run_id}"
        assert before == [written(log, topic, RUN_ID) for topic in ("rewards", "groups", "batches")]
        kills, batches = kills + fate.kills, batches + sum(map(len, written(quiet, "batches", "retrained")))
    assert kills > 20, "or this would prove nothing"
    assert batches > 20
