"""The Faust app and the cutter as programs on a real broker, over topics that are full of rubbish."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from replayground.schemas.errors import Undecodable
from replayground.schemas.events import Address, Event, EventRejected
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Log
from tests.flow.synthetic import groups
from tests.torture.fuzz import INPUT_TOPICS, harmless, names_another
from tests.torture.oracle import FactComparison, append, compared, events_of, undisturbed
from tests.torture.programs import Program, cut_program, streams_program
from tests.torture.scenario import GROUPS_PER_BATCH, kill_all, lag_of, taught_by, troubled_run
from tests.torture.stopping import await_that
from tests.torture.storm import READ_TOPICS

GROUPS = 40
ENDS_MAX = 2
"""how often a program may have ended and been started again, as a supervisor does. On a busy machine the broker takes the
partitions from a worker, which then ends and reads again. What rubbish ends would end at the same message each time"""


@dataclass(frozen=True)
class FuzzedPrograms:
    """What the programs made of it."""

    mutated: int
    rejected: int
    "messages on the dead letters, each with the bytes that stand at its address"
    unreadable: int
    "messages that cannot be read and name no other run"
    unaddressed: int
    facts: FactComparison
    batches: int
    ends: tuple[str, ...]
    "what programs ended of that were started again"

    @property
    def holds(self) -> bool:
        nothing_amiss = self.unaddressed == self.facts.lost == self.facts.foreign == 0
        return (
            nothing_amiss and len(self.ends) <= ENDS_MAX and self.rejected == self.unreadable > 0 and self.batches > 0
        )


def fuzz_on_broker(run: Run, folder: Path, mutated_per_topic: int, seed: int) -> FuzzedPrograms:
    """Mutated messages on every topic that the two programs read, in between the good messages of some groups. All must be
    read to the end. The broker must be fresh, since every message on it counts."""
    run = troubled_run(run, "fuzz")
    good = [event for rollout in groups(GROUPS, run_id=run.run_id) for event in rollout]
    quiet = undisturbed(good, run.run_id)
    facts = events_of(quiet, run.run_id, *INPUT_TOPICS)
    batches = len(taught_by(facts)) // GROUPS_PER_BATCH
    log = open_log(run)
    starts: tuple[Callable[[], Program], ...] = (
        lambda: streams_program(run, folder, rejects_share_max=1.0),
        lambda: cut_program(run, rejects_share_max=1.0),
    )
    programs, ends = [start() for start in starts], list[str]()

    def is_over() -> bool:
        ends.extend(_replace_ended(programs, starts))
        return len(ends) > ENDS_MAX or _is_done(log, run, bad, batches)

    try:
        bad = _spoil(log, run, good, [log.codec.encode(fact) for fact in facts], mutated_per_topic, seed)
        await_that(is_over, "everything is read")
        return _fuzzed(log, run, quiet, mutated_per_topic * len(INPUT_TOPICS), ends)
    finally:
        kill_all(programs)
        log.close()


def _is_done(log: KafkaLog, run: Run, bad: int, batches: int) -> bool:
    """All is read. The cutter commits with a batch: what it read since the last one is told by its rejects alone."""
    return (
        lag_of(log, f"streams-{run.run_id}", READ_TOPICS) == 0
        and log.group_lags(f"fuzz-{run.run_id}", ["dead-letters"])["dead-letters"].end >= bad
        and len(events_of(log, run.run_id, "batches")) >= batches
    )


def _spoil(
    log: KafkaLog, run: Run, good: Sequence[Event], seeds: list[bytes], mutated_per_topic: int, seed: int
) -> int:
    """Writes the good messages with mutated ones before each and on the other topics; how many this run has to reject."""
    chance = random.Random(seed)
    waiting = iter(good)
    bad = 0
    unknown_ids: set[int] = set()  # nobody registers anything meanwhile
    for number in range(mutated_per_topic):
        for topic in INPUT_TOPICS:
            value, is_readable = harmless(log.codec, topic, run.run_id, chance, seeds, unknown_ids)
            log.append_bytes(topic, chance.randbytes(4), value)
            bad += not is_readable and not names_another(log.codec, value, run.run_id)
        if number % max(1, mutated_per_topic // len(good)) == 0 and (following := next(waiting, None)) is not None:
            log.append(following)
    append(log, list(waiting))
    return bad


def _fuzzed(log: KafkaLog, run: Run, quiet: Log, mutated: int, ends: Sequence[str]) -> FuzzedPrograms:
    unreadable = dict(_unreadable(log, run.run_id))
    rejects = [event for event in events_of(log, run.run_id, "dead-letters") if isinstance(event, EventRejected)]
    unaddressed = sum(unreadable.get(reject.origin) != reject.original for reject in rejects)
    return FuzzedPrograms(
        mutated=mutated,
        rejected=len({reject.origin for reject in rejects}),
        unreadable=len(unreadable),
        unaddressed=unaddressed,
        facts=compared(log, quiet, run.run_id, INPUT_TOPICS),
        batches=len(events_of(log, run.run_id, "batches")),
        ends=tuple(ends),
    )


def _unreadable(log: KafkaLog, run_id: str) -> Iterator[tuple[Address, bytes]]:
    unknown_ids: set[int] = set()  # nobody writes any more
    for message in log.messages(INPUT_TOPICS):
        try:
            log.codec.decode(message.value or b"", message.address.topic, unknown_ids)
        except Undecodable:
            if not names_another(log.codec, message.value or b"", run_id):
                yield message.address, message.value or b""


def _replace_ended(programs: list[Program], starts: Sequence[Callable[[], Program]]) -> Iterator[str]:
    """What those of the programs ended of that are not alive. Each is started again."""
    for place, program in enumerate(programs):
        if not program.is_alive:
            yield program.ended()
            programs[place] = starts[place]()
