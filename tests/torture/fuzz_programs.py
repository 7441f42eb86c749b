"""Every program over a log of its own that is full of rubbish: none may crash, stop, lose a good message or be led astray.

Each program runs twice: over good messages alone, and over the same ones with mutated messages in between, on every
topic it reads. What it wrote, and what it holds for true, must be the same. What cannot be read is on the dead letters once,
with its address.
"""

import multiprocessing
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import ReloaderSettings, TracesSettings
from replayground.consumers.events_to_clickhouse import TraceWriter
from replayground.consumers.reports.summary import count_rows
from replayground.consumers.weights_to_vllm import LatestTargets, Reporter, Targets, follow
from replayground.producers import scheduler, tasks
from replayground.producers.config import FeederSettings, SchedulerSettings
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Address, Event, EventRejected
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.topics import TOPIC_BY_NAME, TOPICS, topic_of
from replayground.streams.log.memory import MemoryLog
from replayground.trainer.base_model import make_model
from replayground.trainer.config import ModelSettings
from tests.consumers.synthetic_run import SyntheticRun, run_of
from tests.producers.field import published
from tests.producers.test_rollouts import SETTINGS, scripted
from tests.producers.test_rollouts import Field as RolloutsField
from tests.simulation.simulator import only_errors
from tests.torture.fuzz import harmless, names_another
from tests.torture.oracle import events_of
from tests.torture.progress import tell
from tests.trainer.episodes import stockroom
from tests.trainer.field import DEMONSTRATIONS, everything
from tests.trainer.field import Field as TrainerField

PATIENCE_SECONDS = 600.0
RUN = run_of(steps=2, demonstrations=4)


class SpoiltLog(MemoryLog):
    """Before every good message of a topic, mutated ones are appended, until there are as many as wanted."""

    def __init__(self, codec: Codec, run_id: str, mutated_per_topic: int, seed: int) -> None:
        super().__init__(codec)
        self.run_id = run_id
        self._wanted = mutated_per_topic
        self._chance = random.Random(seed)
        self._good: list[bytes] = []
        self.bad: dict[Address, bytes] = {}
        "what cannot be read, by the address where it stands"
        self.spoilt: Counter[str] = Counter()
        "mutated messages by topic"

    def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
        topic = topic_of(event).name
        self._good = [*self._good[-200:], self.codec.encode(event)]
        self._spoil(topic, min(self._wanted - self.spoilt[topic], 1 + self._wanted // 8))
        super().append(event, acknowledged)

    def spoil_the_rest(self, topics: Sequence[str]) -> None:
        """Appends what is still missing on these topics."""
        for topic in topics:
            self._spoil(topic, self._wanted - self.spoilt[topic])

    def _spoil(self, topic: str, count: int) -> None:
        for _ in range(count):
            value, is_readable = harmless(self.codec, topic, self.run_id, self._chance, self._good)
            address = self._store(topic, self._chance.randbytes(4), value)
            if not is_readable:
                self.bad[address] = value
            self.spoilt[topic] += 1


def new_log(run_id: str, mutated_per_topic: int, seed: int, blobs: Blobs | None = None) -> SpoiltLog:
    return SpoiltLog(Codec(MemoryRegistry(), blobs or Blobs("memory://")), run_id, mutated_per_topic, seed)


@contextmanager
def running(program: Callable[[threading.Event], None]) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """The program in a thread while the block runs. Yields a function that waits for a condition, or for its failure."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            program(stop)
        except BaseException as failure:
            failures.append(failure)

    def until(holds: Callable[[], bool]) -> None:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            if failures:
                raise failures[0]
            assert time.monotonic() < give_up, "it did not happen in time"
            time.sleep(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield until
    finally:
        stop.set()
        thread.join(PATIENCE_SECONDS)
    if failures:
        raise failures[0]


def _synthetic_log(mutated_per_topic: int, seed: int, topics: tuple[str, ...]) -> SpoiltLog:
    """A made-up run, of the topics that the program reads."""
    log = new_log(RUN.run_id, mutated_per_topic, seed)
    for event in SyntheticRun(RUN, evaluation_tasks=3).events():
        if topic_of(event).name in topics:
            log.append(event)
    log.spoil_the_rest(topics)
    return log


def _written_by(program: Callable[[SpoiltLog, ProgramMetrics, threading.Event], None], log: SpoiltLog) -> set[str]:
    """Ids of what a planner writes after it has read all there is."""
    before = _ids(log)
    program_metrics = ProgramMetrics()
    with running(lambda stop: program(log, program_metrics, stop)) as until:
        until(lambda: program_metrics.detail not in ("", "reads the log"))
    return _ids(log) - before


def _ids(log: SpoiltLog) -> set[str]:
    """Of the run alone: what the program writes is spoilt too, and some of that can be read as another run's."""
    topics = (topic.name for topic in TOPICS if topic.name != "snapshots")  # a state, not a decision
    return {event.meta.id for event in events_of(log, log.run_id, *topics)}


def fuzz_scheduler(mutated_per_topic: int, seed: int) -> int:
    def program(log: SpoiltLog, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
        scheduler.schedule(RUN, SchedulerSettings(), program_metrics, stop, log)

    return _same_decisions(program, scheduler.TOPICS_READ, mutated_per_topic, seed)


def fuzz_feeder(mutated_per_topic: int, seed: int) -> int:
    def program(log: SpoiltLog, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
        tasks.feed(RUN, FeederSettings(), program_metrics, stop, log)

    return _same_decisions(program, tasks.TOPICS_READ, mutated_per_topic, seed)


def _same_decisions(
    program: Callable[[SpoiltLog, ProgramMetrics, threading.Event], None],
    topics: tuple[str, ...],
    mutated_per_topic: int,
    seed: int,
) -> int:
    spoilt = _synthetic_log(mutated_per_topic, seed, topics)
    decided = _written_by(program, spoilt)
    expected = _written_by(program, _synthetic_log(0, seed, topics))
    assert decided == expected, f"{len(decided)} decisions where {len(expected)} follow from the good messages"
    return spoilt.spoilt.total()


def fuzz_reloader(mutated_per_topic: int, seed: int) -> int:
    topics = ("weights", "control", "serving")
    spoilt = _synthetic_log(mutated_per_topic, seed, topics)
    assert _targets(spoilt, topics) == _targets(_synthetic_log(0, seed, topics), topics)
    return spoilt.spoilt.total()


def _targets(log: SpoiltLog, topics: tuple[str, ...]) -> Targets:
    """What the reloader wants its servers to serve after it has read all there is."""
    mailbox, program_metrics, messages = LatestTargets(), ProgramMetrics(), sum(log.count(topics).values())
    reporter = Reporter(log, RUN, program_metrics)
    with running(lambda stop: follow(log, RUN, ReloaderSettings(), mailbox, [], reporter, stop)) as until:
        until(
            lambda: program_metrics.figures().get("events_read", 0.0) >= messages and mailbox.get().wanted() is not None
        )
    return mailbox.get()


def fuzz_rollouts(mutated_per_topic: int, seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        field = RolloutsField(Path(folder))
        field.log = log = new_log(field.run.run_id, mutated_per_topic, seed, field.blobs)
        log.append(published(0, field.blobs))
        requests = field.ask(40)
        log.spoil_the_rest(("rollouts", "weights"))
        field.start(scripted(), msgspec.structs.replace(SETTINGS, rejects_share_max=1.0))
        field.until(lambda: field.lag == 0, PATIENCE_SECONDS)
        field.finish()
        ended = {end.meta.trajectory_id for end in field.ends()}
        assert ended == {request.meta.trajectory_id for request in requests}
        _check_rejects(
            log, "rollouts", {address: value for address, value in _bad(log, "rollouts") if _is_own(log, value)}
        )
        return log.spoilt["rollouts"] + log.spoilt["weights"]


def fuzz_trainer(mutated_per_topic: int, seed: int) -> int:
    digests = []
    tokenizer = Tokenizer.from_buffer(make_model(ModelSettings(), stockroom(), seed=0)["tokenizer.json"])
    for mutated in (0, mutated_per_topic):
        with tempfile.TemporaryDirectory() as folder:
            log = new_log("run", mutated, seed, Blobs(f"file://{folder}/blobs"))
            field = TrainerField(Path(folder), log, demonstrations=DEMONSTRATIONS)
            everything(field, tokenizer)
            log.spoil_the_rest(("trajectories", "batches", "weights"))
            with field.training():
                field.until_version(4)
            digests.append(field.digests())
    assert digests[0] == digests[1]
    return log.spoilt.total()


def fuzz_traces(mutated_per_topic: int, seed: int) -> int:
    log = _synthetic_log(mutated_per_topic, seed, tuple(topic.name for topic in TOPICS))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"chdb://{folder}/store", "fuzz", threads=1)
        try:
            writer = TraceWriter(log, store, RUN, TracesSettings(), ProgramMetrics())
            with running(writer.write_until) as until:
                until(lambda: writer.await_caught_up(1.0))
            rows, messages = count_rows(store, log)
            assert rows == messages, f"{rows} rows of {messages} messages"
            good = {event.meta.id for event in SyntheticRun(RUN, evaluation_tasks=3).events()}
            found = {row[0] for row in store.ask("SELECT id FROM events WHERE type != 'undecodable'").rows}
            assert good <= found
        finally:
            store.close()
    _check_rejects(log, "traces", dict(_bad(log, "traces")))
    for stage in ("rollouts", "assemble", "score", "group", "cut"):
        # in the place of runs that are not there: all that a message can name, since the run of this log has ended too
        named = {address: value for address, value in _bad(log, stage) if log.codec.run_of(value) is not None}
        assert named
        _check_rejects(log, stage, named, sender="traces")
    return log.spoilt.total()


def _bad(log: SpoiltLog, stage: str) -> Iterator[tuple[Address, bytes]]:
    """What cannot be read on the topics that the stage answers for."""
    return ((address, value) for address, value in log.bad.items() if TOPIC_BY_NAME[address.topic].rejected_by == stage)


def _is_own(log: SpoiltLog, value: bytes) -> bool:
    return not names_another(log.codec, value, log.run_id)


def _check_rejects(log: SpoiltLog, stage: str, bad: dict[Address, bytes], sender: str | None = None) -> None:
    """Each of these is on the dead letters by the stage, once, with its bytes and address; nothing else is."""
    rejects = Counter(
        (event.origin, event.original)
        for event in events_of(log, log.run_id, "dead-letters")
        if isinstance(event, EventRejected) and event.stage == stage and event.meta.sender == (sender or stage)
    )
    assert rejects == Counter(bad.items()), f"{stage}: {rejects.total()} rejects of {len(bad)} bad messages"


PROGRAMS: dict[str, Callable[[int, int], int]] = {
    "feeder": fuzz_feeder,
    "scheduler": fuzz_scheduler,
    "rollouts": fuzz_rollouts,
    "trainer": fuzz_trainer,
    "reloader": fuzz_reloader,
    "traces": fuzz_traces,
}
"Program by name: runs it over so many mutated messages a topic with a seed, and returns how many there were in all."


ROUNDS = 10
"portions of the long form, with seeds of their own, since logs are in memory"


def fuzz_programs(rounds: int, mutated_per_topic: int) -> Counter[str]:
    """Mutated messages by program, over all its topics; on all cores. Raises AssertionError."""
    portions = [(name, seed) for name in PROGRAMS for seed in range(rounds)]
    mutated: Counter[str] = Counter()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), initializer=only_errors) as processes:
        futures = [(name, processes.submit(PROGRAMS[name], mutated_per_topic, seed)) for name, seed in portions]
        try:
            for name, future in futures:
                mutated[name] += future.result()
                tell(f"fuzz: {name}, {mutated[name]:,} messages so far")
        except BaseException:
            processes.shutdown(wait=False, cancel_futures=True)  # else the others would be waited for first
            raise
    return mutated
