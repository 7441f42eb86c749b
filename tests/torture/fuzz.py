"""Bytes that no program of ours would write, between good messages: no stage may crash, stop or lose a good one."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import Undecodable
from replayground.schemas.events import Event, EventRejected
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.hops.groups_to_batches import CutGroups
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Log
from tests.flow.synthetic import groups

RUN_ID = "fuzzed"
INPUT_TOPICS = ("messages", "trajectories", "rewards", "groups")


@dataclass(frozen=True)
class Fuzzed:
    """What came of it."""

    mutated: int
    rejected: int
    unaddressed: int
    "rejects that do not name an address where their bytes stand"
    vanished: int
    "messages that cannot be read, that name no other run and of which no reject tells"
    left: int
    "messages that cannot be read and name another run: the traces program rejects them (fuzz_programs)"
    good_expected: int
    good_found: int

    @property
    def holds(self) -> bool:
        nothing_amiss = self.unaddressed == self.vanished == 0
        something = self.rejected > 0 and self.left > 0
        return something and nothing_amiss and self.good_found == self.good_expected


def fuzz(mutated_per_topic: int, seed: int) -> Fuzzed:
    """Mutations of good messages of every topic, on every topic, in between the good messages of ten groups."""
    chance = random.Random(seed)
    good = [event for rollout in groups(10, run_id=RUN_ID) for event in rollout]
    quiet = _log()
    for event in good:
        quiet.append(event)
    _drive(quiet)
    seeds = [d.value for topic in INPUT_TOPICS for d in quiet.reader([topic]).poll(10**6, 0.0)]
    log = _log()
    mutated = 0
    waiting = iter(good)
    for number in range(mutated_per_topic):
        for topic in INPUT_TOPICS:
            value, _ = harmless(log.codec, topic, RUN_ID, chance, seeds)
            log.append_bytes(topic, chance.randbytes(4), value)
            mutated += 1
        if number % max(1, mutated_per_topic // len(good)) == 0 and (following := next(waiting, None)) is not None:
            log.append(following)
    for event in waiting:
        log.append(event)
    _drive(log)
    rejects = [event for event in _events(log, "dead-letters") if isinstance(event, EventRejected)]
    there = {d.address: d for topic in INPUT_TOPICS for d in log.reader([topic]).poll(10**7, 0.0)}
    unaddressed = sum(r.origin not in there or there[r.origin].value != r.original for r in rejects)
    told = {reject.origin for reject in rejects}
    untold = [d for d in there.values() if d.event is None and d.address not in told]
    left = sum(names_another(log.codec, d.value, RUN_ID) for d in untold)
    vanished = len(untold) - left
    expected = {event.meta.id for topic in INPUT_TOPICS for event in _events(quiet, topic)}
    found = {event.meta.id for topic in INPUT_TOPICS for event in _events(log, topic)}
    return Fuzzed(mutated, len(rejects), unaddressed, vanished, left, len(expected), len(expected & found))


def harmless(
    codec: Codec,
    topic: str,
    run_id: str,
    chance: random.Random,
    seeds: list[bytes],
    unknown_ids: set[int] | None = None,
) -> tuple[bytes, bool]:
    """A mutation that is no event of this run any more, and whether it can be read at all: one that still is an event of
    the run cannot be told from a good one. For unknown_ids see Codec.decode."""
    while True:
        value = mutation(chance, seeds)
        try:
            if codec.decode(value, topic, unknown_ids).meta.run_id != run_id:
                return value, True
        except Undecodable:
            return value, False


def names_another(codec: Codec, value: bytes, run_id: str) -> bool:
    """Whether the programs of a run leave a message to another run."""
    return codec.run_of(value) not in (None, run_id)


def mutation(chance: random.Random, seeds: list[bytes]) -> bytes:
    """A good message after an accident."""
    value = bytearray(chance.choice(seeds))
    match chance.randrange(6):
        case 0:  # cut off
            return bytes(value[: chance.randrange(len(value))])
        case 1:  # bits turned
            for _ in range(chance.randint(1, 8)):
                value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
        case 2:  # another schema
            value[1:5] = chance.randrange(40).to_bytes(4)
        case 3:  # two messages run together
            value += chance.choice(seeds)[chance.randrange(5) :]
        case 4:  # a stretch lost in the middle
            start = chance.randrange(5, len(value))
            del value[start : start + chance.randint(1, 20)]
        case _:  # noise
            return chance.randbytes(chance.randrange(200))
    return bytes(value)


def _log() -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))


def _drive(log: Log) -> None:
    """All hops and the cutter's; a stage that refuses nearly everything is what is wanted here."""
    cut = CutGroups(RUN_ID, groups_per_batch=2, staleness_max=4, first_version=0)
    driver = Driver(log, [*hops((), "standardised"), cut], RUN_ID, rejects_share_max=1.0)
    driver.run_until_caught_up()
    driver.close()


def _events(log: MemoryLog, topic: str) -> Iterator[Event]:
    return (d.event for d in log.reader([topic]).poll(10**7, 0.0) if d.event is not None)
