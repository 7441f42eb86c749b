"""All hops over the log in memory, under a seeded scheduler that kills and restarts programs, and an oracle.

    rollouts ─► messages ─► streams (assemble, score, group) ─► groups ─► cut ─► batches

One call of `simulate` is one run of the field with everything that may go wrong. The oracle takes the messages that the
run left, derives everything from them without any trouble, and compares fact by fact and byte by byte. What a disturbed
run adds are repetitions, and a fact that is repeated must say the same. Batches are cut again from the groups, and must
be the same bytes whoever was killed in between.
"""

import logging
import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import structlog

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import (
    Address,
    BatchCut,
    Event,
    GroupCompleted,
    RolloutStarted,
    SnapshotTaken,
    TrajectoryAssembled,
    TurnGenerated,
)
from replayground.schemas.job import Score
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.streams.config import CutSettings
from replayground.streams.cut import Cutter, batches_of, fold_batches, restore_state
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.hops.groups_to_batches import CutGroups
from replayground.streams.log.memory import MemoryLog
from replayground.streams.rules.staleness import is_admitted, oldest_version
from replayground.streams.stage import Change, Stage
from tests.flow.synthetic import rollout
from tests.simulation.troubled_log import Fate, Killed, Nothing, TroubledLog, TroubledReader

RUN_ID = "simulated"
GROUPS = 24
GROUPS_AT_ONCE = 3
"the scheduler paces: work begins on so many groups before the first of them has ended"
GROUP_SIZE = 2
GROUPS_PER_BATCH = 2
SNAPSHOT_BATCHES = 2
SNAPSHOT_GROUPS = 5
"read without a batch"
NOT_TAKEN_REMEMBERED = 2
"of a partition: most of what a batch passes over is forgotten before it is cut"
STALENESS_MAX = 2
TRAJECTORIES_REMEMBERED = 1
GROUPS_REMEMBERED = 3
"""of a partition, after they have ended: little enough that most are forgotten before the run is over. Fewer groups would be
less than what a killed score stage repeats"""
BLOCK_ENTRIES = 2
STATES_MAX = 24
"of a hop when all has ended; there are 48 trajectories and 24 groups"
RUN = Run(run_id=RUN_ID, seed=0, job=JobSettings(), log=LogSettings(), blobs_url="memory://", program="cut")


class RememberingCodec(Codec):
    """Decodes the same bytes once: a disturbed run and its oracle read every message many times, and events never change."""

    def __init__(self) -> None:
        super().__init__(MemoryRegistry(), Blobs("memory://"))
        self._remembered = lru_cache(maxsize=20_000)(super().decode)

    def decode(self, data: bytes, topic: str | None = None, unknown_ids: set[int] | None = None) -> Event:
        return self._remembered(data, topic)


_CODEC = RememberingCodec()


class Program:
    """One life of a program. `advance` does a little work; it raises Nothing when there is none."""

    def __init__(self, log: TroubledLog) -> None:
        self.log = log

    def advance(self) -> None: ...


class Rollouts(Program):
    """Plays what has not ended, message by message; a killed attempt is played again as another attempt."""

    def __init__(self, log: TroubledLog, plays: "Plays") -> None:
        super().__init__(log)
        self._plays = plays
        self._messages: Iterator[Event] = iter(())
        self._playing: tuple[int, int] | None = None

    def advance(self) -> None:
        message = next(self._messages, None)
        if message is not None:
            self.log.append(message)
            return
        self.log.flush()
        if self._playing is not None and not self._plays.is_broken:
            self._plays.ended.add(self._playing)  # as a committed offset of the request would say
        self._playing = self._plays.next_unended()
        if self._playing is None:
            raise Nothing
        self._messages = iter(self._plays.attempt(*self._playing))


@dataclass
class Plays:
    """What was asked for, and which of it has ended."""

    chance: random.Random
    ended: set[tuple[int, int]]
    attempts: int = 0
    solved_from: int = GROUPS
    "from this group on every answer is right, so that nothing teaches"
    is_broken: bool = False
    "the newest attempt has a message that assemble refuses: it never ends, and the member is asked for again"

    def next_unended(self) -> tuple[int, int] | None:
        left = [(g, m) for g in range(GROUPS) for m in range(GROUP_SIZE) if (g, m) not in self.ended]
        return self.chance.choice(left[: GROUPS_AT_ONCE * GROUP_SIZE]) if left else None

    def attempt(self, group: int, member: int) -> list[Event]:
        self.attempts += 1
        answer = self.chance.choice(("7", "8")) if group < self.solved_from else "7"
        started, turn, *rest = rollout(
            group,
            member,
            attempt=self.attempts,
            answer=answer,
            group_size=GROUP_SIZE,
            run_id=RUN_ID,
            version=group // 8,
        )
        assert isinstance(started, RolloutStarted)
        assert isinstance(turn, TurnGenerated)
        if self.chance.random() < 0.1:
            task = msgspec.structs.replace(started.task, scorers=[self.chance.choice(("misspelt", "failing"))])
            started = msgspec.structs.replace(started, task=task)
        self.is_broken = self.chance.random() < 0.1
        if self.is_broken:
            turn = msgspec.structs.replace(turn, logprobs=b"1234")
        return [started, turn, *rest]


class Failing:
    """A scorer that is no good."""

    name = "failing"
    version = "1"

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        raise ArithmeticError(trajectory.meta.id)


class Streams(Program):
    """What the Faust app does with its stages: take, and now and then commit."""

    remembered = (TRAJECTORIES_REMEMBERED, GROUPS_REMEMBERED)
    stage_class: type[Stage] = Stage

    def __init__(self, log: TroubledLog, stores: dict[str, dict[bytes, bytes]]) -> None:
        super().__init__(log)
        self._stores = stores
        self._at_work: list[tuple[Stage, TroubledReader]] = []
        for hop in hops((Failing(),), "standardised", *self.remembered):
            reader = log.reader([hop.reads], f"streams-{hop.name}", run_id=RUN_ID)
            assert isinstance(reader, TroubledReader)
            stage = self.stage_class(
                hop, RUN_ID, stores.setdefault(hop.name, {}).get, now=lambda: 0, block_entries=BLOCK_ENTRIES
            )
            self._at_work.append((stage, reader))

    def advance(self) -> None:
        fate = self.log.fate
        idle = 0
        for stage, reader in self._at_work:
            if fate.happens(0.05):
                stage.forget(reader.go_back())
            try:
                for delivery in reader.poll(100, 0.0):
                    for fact in stage.take(delivery):
                        self.log.append(fact)
            except Nothing:
                idle += 1
        if fate.happens(0.3) or idle == len(self._at_work):
            self.commit()
        if idle == len(self._at_work):
            raise Nothing

    def commit(self) -> None:
        """In the order of streams.stage."""
        self.log.flush()
        self.write_states()
        self.commit_offsets()

    def write_states(self) -> None:
        for stage, _ in self._at_work:
            stage.begin_commit()
            stage.write_states(self._writer(self._stores[stage.hop.name]))

    def commit_offsets(self) -> None:
        for stage, reader in self._at_work:
            reader.commit()
            stage.end_commit()

    def _writer(self, store: dict[bytes, bytes]) -> Callable[[bytes, Change], None]:
        def write(key: bytes, change: Change) -> None:
            self.log.fate.may_kill()
            if (encoded := change.encoded) is None:
                store.pop(key, None)
            else:
                store[key] = encoded

        return write


class Cut(Program):
    """The cutter itself, for as long as there is something to read."""

    def __init__(self, log: TroubledLog, hop: CutGroups, cutter: type[Cutter] = Cutter) -> None:
        super().__init__(log)
        spoil_snapshots(log.beneath, log.fate)
        settings = CutSettings(snapshot_batches=SNAPSHOT_BATCHES, snapshot_groups=SNAPSHOT_GROUPS)
        self._cutter = cutter(log, hop, RUN, settings, ProgramMetrics())
        check_snapshot(log.beneath, hop)

    def advance(self) -> None:
        self._cutter.run_until(threading.Event())


def spoil_snapshots(log: MemoryLog, fate: Fate) -> None:
    """Now and then they are gone, or another version of the code has written them."""
    snapshots = log._partitions["snapshots", 0]
    if fate.happens(0.1):
        snapshots.clear()
    elif fate.happens(0.1):
        for event in _events(log, "snapshots"):
            assert isinstance(event, SnapshotTaken)
            log.append(msgspec.structs.replace(event, code_version="another"))


def check_snapshot(log: MemoryLog, hop: CutGroups) -> None:
    """Snapshot and tail are the fold of all batches, and of the groups since the last of them, byte for byte."""
    found = restore_state(log, hop, RUN).state
    whole = fold_batches(hop, batches_of(log, RUN, ()))
    for address, group in _groups(log):
        if address.offset < found.positions.get(f"{address.topic}/{address.partition}", 0):
            outcome = hop.step(whole, group, address)
            assert not outcome.events, "a snapshot holds groups that a batch is to be cut from"
            whole = outcome.state
    encode = msgspec.msgpack.Encoder(order="deterministic").encode
    assert encode(found) == encode(whole), "snapshot and tail are not the fold of all batches and groups"


def cutting(kind: type[CutGroups] = CutGroups) -> CutGroups:
    return kind(RUN_ID, GROUPS_PER_BATCH, STALENESS_MAX, first_version=0, not_taken_remembered=NOT_TAKEN_REMEMBERED)


@dataclass
class Simulated:
    """What a simulation left behind."""

    log: MemoryLog
    fate: Fate
    attempts: int
    stores: dict[str, dict[bytes, bytes]]
    "states by hop and key"


def simulate(
    seed: int, streams: type[Streams] = Streams, cut: type[CutGroups] = CutGroups, cutter: type[Cutter] = Cutter
) -> Simulated:
    """One run of the field with trouble, until everything has ended and nothing is left to read."""
    chance = random.Random(seed)
    fate = Fate(chance, kill_share=chance.choice((0.0, 0.005, 0.02, 0.06)))
    log = MemoryLog(_CODEC)
    plays = Plays(chance, set(), solved_from=chance.choice((GROUPS, GROUPS, GROUPS // 2, 0)))
    stores: dict[str, dict[bytes, bytes]] = {}
    births: list[Callable[[TroubledLog], Program]] = [
        lambda troubled: Rollouts(troubled, plays),
        lambda troubled: streams(troubled, stores),
        lambda troubled: Cut(troubled, cutting(cut), cutter),
    ]
    lives: list[Program | None] = [None] * len(births)
    idle = 0
    while idle < 40:  # most likely, every program has said several times that it has nothing to do
        which = chance.randrange(len(births))
        troubled = TroubledLog(log, fate)
        try:
            program = lives[which]
            if program is None:
                program = lives[which] = births[which](troubled)
            troubled = program.log
            for _ in range(chance.randint(1, 10)):
                program.advance()
                idle = 0
        except Nothing:
            idle += 1
        except Killed:
            troubled.die()
            lives[which] = None
            idle = 0
    _finish(log, fate, births, lives)
    return Simulated(log, fate, plays.attempts, stores)


def _finish(
    log: MemoryLog,
    fate: Fate,
    births: Sequence[Callable[[TroubledLog], Program]],
    lives: Sequence[Program | None],
) -> None:
    """What was left waiting by chance has its turn, in the order of the flow."""
    fate.at_peace = True
    for birth, life in zip(births, lives, strict=True):
        program = life or birth(TroubledLog(log, fate))
        with suppress(Nothing):
            while True:
                program.advance()


def simulate_and_check(seeds: range) -> tuple[int, int]:
    """Kills, and places where one could have been, over all seeds. A seed that fails names itself."""
    kills = places = 0
    for seed in seeds:
        simulated = simulate(seed)
        try:
            check(simulated)
        except AssertionError as error:
            error.add_note(f"seed {seed}: python -m tests.simulation {seed}")
            raise
        kills, places = kills + simulated.fate.kills, places + simulated.fate.places
    return kills, places


def simulate_on_all_cores(seeds: range) -> tuple[int, int]:
    """The same in as many processes as there are cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), initializer=only_errors) as processes:
        portions = (seeds[start : start + 50] for start in range(0, len(seeds), 50))
        counted = list(processes.map(simulate_and_check, portions))
    return sum(kills for kills, _ in counted), sum(places for _, places in counted)


def only_errors() -> None:
    """For this process: programs tell of every batch and version, which is a line for every few milliseconds here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def check(simulated: Simulated) -> None:
    """The oracle. Raises AssertionError."""
    quiet = MemoryLog(_CODEC)
    for delivery in simulated.log.reader(["messages"]).poll(10**6, 0.0):
        quiet.append_bytes("messages", delivery.key or b"", delivery.value)
    Driver(quiet, hops((Failing(),), "standardised"), RUN_ID, now=lambda: 0).run_until_caught_up()
    for topic in ("trajectories", "attempts", "rewards", "groups", "dead-letters"):
        found, expected = facts(simulated.log, topic), facts(quiet, topic)
        assert found == expected, f"{topic}: {len(found)} facts where {len(expected)} follow from the messages"
    ended = {event.meta.group_id for event in _events(simulated.log, "groups")}
    assert ended == {f"g{group}" for group in range(GROUPS)}, "a group never ends"
    sizes = {name: sum(not key.startswith(b"\0") for key in store) for name, store in simulated.stores.items()}
    assert max(sizes.values()) <= STATES_MAX, f"hops forget too little: {sizes}"
    _check_batches(simulated.log)


def facts(log: MemoryLog, topic: str) -> dict[str, bytes]:
    """Every fact of a topic by id. Addresses are replaced by what stands there: repetitions move them."""
    found: dict[str, bytes] = {}
    for delivery in log.reader([topic]).poll(10**6, 0.0):
        assert delivery.event is not None, delivery.undecodable
        said = msgspec.json.encode(_without_addresses(log, delivery.event))
        assert found.setdefault(delivery.event.meta.id, said) == said, f"{topic}: a repetition that says otherwise"
    return found


def _without_addresses(log: MemoryLog, event: Event) -> object:
    def replaced(value: object) -> object:
        match value:
            case {"topic": str(topic), "partition": int(partition), "offset": int(offset), **rest} if not rest:
                (there,) = log.read_at([Address(topic, partition, offset)])
                return there.meta.id
            case dict():
                return {name: replaced(inner) for name, inner in value.items()}
            case list():
                return [replaced(inner) for inner in value]
        return value

    return replaced(msgspec.to_builtins(event))


def _check_batches(log: MemoryLog) -> None:
    """Every group that teaches is in one batch or waits for the next; batches are whole, once each and in order."""
    groups = {e.meta.group_id or "": e for e in _events(log, "groups") if isinstance(e, GroupCompleted)}
    batches = [event for event in _events(log, "batches") if isinstance(event, BatchCut)]
    assert [batch.index for batch in batches] == list(range(len(batches)))
    cut = [group for batch in batches for group in batch.groups]
    assert len(cut) == len(set(cut)), "a group is in two batches"
    live = {group_id for group_id, group in groups.items() if group.dropped_because is None}
    assert set(cut) <= live
    stale = {group for batch in batches for group in batch.groups_stale}
    waiting = [
        group_id
        for group_id in live - set(cut) - stale
        if is_admitted(len(batches), oldest_version(groups[group_id]), STALENESS_MAX)
    ]
    assert len(waiting) < GROUPS_PER_BATCH, "groups wait although a batch could be cut"
    for batch in batches:
        assert len(batch.groups) == GROUPS_PER_BATCH
        wanted = [member.trajectory_id for group in batch.groups for member in groups[group].members if member.valid]
        assert [member.trajectory_id for member in batch.members] == wanted
    before = restore_state(log, cutting(), RUN)
    state = before.state
    assert state.index_next == len(batches)
    remembered = {
        group
        for batch in batches
        for group in (*batch.groups, *batch.groups_stale, *batch.groups_passed)
        if is_admitted(len(batches), batch.policy_ceiling, STALENESS_MAX)
    }
    not_taken = [group.group_id for newest in state.not_taken.values() for group in newest]
    open_work = {*not_taken, *(group.meta.group_id or "" for group in state.waiting)}
    assert set(state.seen) == remembered | open_work, (
        "the cutter remembers what it may forget, or forgets what it may not"
    )
    assert all(len(newest) <= NOT_TAKEN_REMEMBERED for newest in state.not_taken.values())
    reader = log.reader(["groups"], start=before.groups_from)
    assert len(reader.poll(10**6, 0.0)) < SNAPSHOT_GROUPS, "a restart of the cutter reads ever more groups"
    check_snapshot(log, cutting())
    again = [log.codec.encode(batch) for batch in cutting().cut_again(_groups(log), batches)]
    assert again == [log.codec.encode(batch) for batch in batches], "batches: cut again, they are others"


def _groups(log: MemoryLog) -> list[tuple[Address, GroupCompleted]]:
    """In the order of each partition."""
    deliveries = log.reader(["groups"]).poll(10**6, 0.0)
    return [(each.address, each.event) for each in deliveries if isinstance(each.event, GroupCompleted)]


def _events(log: MemoryLog, topic: str) -> list[Event]:
    return [d.event for d in log.reader([topic]).poll(10**6, 0.0) if d.event is not None]
