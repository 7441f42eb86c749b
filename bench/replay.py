"""Judging old trajectories again, training on them again and tracing them, each beside what it is measured against.

rescore_to_bare         one process that reads, judges, groups and writes exactly once, to one that only reads the same topic
                        with plain confluent-kafka and decodes it with plain fastavro
rescore_two_processes   one process to two, from their start to their end; only of use when nothing else runs
memory_growth           peak memory of a process that judges a million trajectories, to one that judges ten thousand
lineage_seconds         the slowest lineage of many versions of a run with a million trajectories (bench.replay_lineage)
retrain_to_online       steps a minute of a retraining, to those of the run that practised (bench.replay_online)

Parts: bare, processes, memory, lineage, online. `python -m bench replay:memory` measures one of them.
"""

import io
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fastavro
import msgspec
from confluent_kafka import Consumer, TopicPartition

from bench.log import _CONSUMER
from bench.rounds import Figure, figure
from replayground.deploy.experience.workers import Work, rescore
from replayground.deploy.local.stack import LogAddresses, local_log
from replayground.deploy.runs import end_positions
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Event, Position, TrajectoryAssembled
from replayground.schemas.generate import schema_of
from replayground.schemas.registry import ConfluentRegistry, MemoryRegistry
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Log
from replayground.streams.replay.request import RescoreRequest
from replayground.streams.replay.rescoring import Judges, PartitionRange, Rescoring, rescore_partitions
from replayground.streams.replay.selection import TOPIC
from replayground.streams.rules.scoring import scorers_by_name
from tests.flow.synthetic import groups

_SOURCE = "bench"
_MODULE = "replayground.producers.stockroom"
_TEMPLATES = 250
"groups that all others are copies of"
_NAME = "G{:07}".format
"a group; all names are as long, so that Avro's length prefixes stay right when one takes the place of another"


def measure(quick: bool) -> dict[str, Figure]:
    """Limits: rescore_to_bare at least 0.5, rescore_two_processes at least 1.7, memory_growth at most 1.1, lineage_seconds
    at most 2, retrain_to_online at least 3."""
    figures: dict[str, Figure] = {}
    for part in PARTS.values():
        figures |= part(quick)
    return figures


def bare(quick: bool) -> dict[str, Figure]:
    trajectories, rounds = (8_000, 1) if quick else (100_000, 5)
    with _broker() as (addresses, log):
        fill(log, trajectories)
        return _against_bare(addresses, log, rounds)


def processes(quick: bool) -> dict[str, Figure]:
    # Many: starting the processes takes a second, whatever they judge.
    trajectories, rounds = (20_000, 1) if quick else (300_000, 3)
    with _broker() as (addresses, log):
        fill(log, trajectories)
        return _by_processes(addresses, log, rounds)


def memory(quick: bool) -> dict[str, Figure]:
    """Peak memory of a process of its own that judges a whole log, for a large one and a small one."""
    peaks = [_peak_mebibytes(count) for count in (10_000, 40_000 if quick else 1_000_000)]
    print(f"  {peaks[0]:.0f} and {peaks[1]:.0f} MiB", file=sys.stderr, flush=True)
    return {"memory_growth": figure([peaks[1] / peaks[0]]), "rescore_mebibytes": figure([peaks[1]])}


# Imported where they are used: the process whose memory is measured needs none of it, and is this module, too.


def lineage(quick: bool) -> dict[str, Figure]:
    from bench.replay_lineage import lineage as measured

    return measured(quick)


def online(quick: bool) -> dict[str, Figure]:
    from bench.replay_online import online as measured

    return measured(quick)


PARTS: dict[str, Callable[[bool], dict[str, Figure]]] = {
    "bare": bare,
    "processes": processes,
    "memory": memory,
    "lineage": lineage,
    "online": online,
}
"what can be measured alone"


@contextmanager
def _broker() -> Iterator[tuple[LogAddresses, KafkaLog]]:
    folder = tempfile.TemporaryDirectory(prefix="replayground-bench-")
    with folder as name, local_log(Path(name), heap_mebibytes=512) as addresses:
        codec = Codec(ConfluentRegistry(addresses.log.registry_url), Blobs(addresses.blobs_url))
        with closing(KafkaLog(addresses.log, codec)) as log:
            yield addresses, log


def fill(log: KafkaLog, trajectories: int) -> None:
    """Appends trajectories of one run in groups of four: copies of a few hundred, each with a name of its own."""
    templates = _templates(log.codec)
    for number in range(trajectories // 4):
        old, new = _NAME(number % _TEMPLATES).encode(), _NAME(number).encode()
        for key, value in templates[number % _TEMPLATES]:
            log.append_bytes(TOPIC, key.replace(old, new), value.replace(old, new))
    log.flush(600.0)


def _templates(codec: Codec) -> list[list[tuple[bytes, bytes]]]:
    """Keys and values of the trajectories of each template group, as the stage `assemble` makes them."""
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for rollout in groups(_TEMPLATES, run_id=_SOURCE):
        for event in rollout:
            log.append(_renamed(event))
    Driver(log, hops((), "centred"), _SOURCE).run_until_caught_up()
    found: list[list[tuple[bytes, bytes]]] = [[] for _ in range(_TEMPLATES)]
    for delivery in log.reader([TOPIC]).poll(10**6, 0.0):
        assert isinstance(delivery.event, TrajectoryAssembled)
        name = delivery.event.meta.group_id or ""
        found[int(name[1:])].append((name.encode(), codec.encode(delivery.event)))
    return found


def _renamed(event: Event) -> Event:
    """With the name of its group at full length, in its trajectory and attempt too."""
    meta = event.meta
    assert meta.group_id is not None
    name = _NAME(int(meta.group_id[1:]))

    def longer(text: str | None) -> str:
        return name + (text or "").removeprefix(str(meta.group_id))

    return msgspec.structs.replace(
        event,
        meta=msgspec.structs.replace(
            meta,
            id=longer(meta.id),
            group_id=name,
            trajectory_id=longer(meta.trajectory_id),
            attempt_id=longer(meta.attempt_id),
        ),
    )


# one process, beside a bare consumer


def _against_bare(addresses: LogAddresses, log: KafkaLog, rounds: int) -> dict[str, Figure]:
    """Seconds by the clock, and of the processor, threads of the client included. Both in every round."""
    ends = log.end_positions([TOPIC])
    trajectories = sum(end.offset for end in ends)
    found: list[tuple[Timed, Timed]] = []
    for number in range(rounds):
        sides = {
            "bare": partial(_bare, addresses, ends),
            "judged": partial(_judge, addresses, _begun(addresses, log, f"round-{number}"), ends),
        }
        # Every other round in reverse order: neither may always find the broker's files in memory first.
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        timed = {name: _timed(sides[name]) for name in names}
        print(f"  {timed}", file=sys.stderr, flush=True)
        found.append((timed["bare"], timed["judged"]))
    return {
        "rescore_to_bare": figure(bare.seconds / judged.seconds for bare, judged in found),
        "rescore_to_bare_processor": figure(bare.processor / judged.processor for bare, judged in found),
        "rescore_per_second": figure(trajectories / judged.seconds for _, judged in found),
    }


@dataclass(frozen=True)
class Timed:
    """What a piece of work took."""

    seconds: float
    processor: float


def _timed(work: partial[None]) -> Timed:
    began, processor = time.perf_counter(), time.process_time()
    work()
    return Timed(time.perf_counter() - began, time.process_time() - processor)


def _bare(addresses: LogAddresses, ends: Sequence[Position]) -> None:
    """Reads and decodes every trajectory."""
    schema = fastavro.parse_schema(schema_of(TrajectoryAssembled))
    consumer = Consumer({"bootstrap.servers": addresses.log.bootstrap_servers, **_CONSUMER})
    consumer.assign([TopicPartition(end.topic, end.partition, 0) for end in ends])
    left = sum(end.offset for end in ends)
    while left:
        for message in consumer.consume(1000, 0.1):
            stream = io.BytesIO(message.value() or b"")
            stream.seek(5)
            fastavro.schemaless_reader(stream, schema, None)
            left -= 1
    consumer.close()


def _judge(addresses: LogAddresses, run: Run, ends: Sequence[Position]) -> None:
    """Judges every trajectory: rewards and groups are written exactly once."""
    judges = Judges(run.run_id, frozenset((_SOURCE,)), scorers_by_name(()))
    parts = [
        (
            Rescoring(judges),
            PartitionRange(judges.sources, msgspec.structs.replace(end, offset=0), partial(int, end.offset)),
        )
        for end in ends
    ]
    with closing(open_log(run)) as log:
        states = rescore_partitions(run, log, parts, lambda *_: None, threading.Event())
        for end, state in zip(ends, states, strict=True):
            assert state.counts.trajectories == end.offset, state.counts
            assert state.counts.groups == end.offset // 4, state.counts


def _begun(addresses: LogAddresses, log: Log, run_id: str) -> Run:
    """A run that begins where the log ends now, as every run does: its programs read nothing before."""
    return msgspec.structs.replace(run_on(addresses, run_id), start=tuple(end_positions(log)))


def run_on(addresses: LogAddresses, run_id: str) -> Run:
    return Run(
        run_id=run_id,
        seed=0,
        job=JobSettings(module=_MODULE),
        log=addresses.log,
        blobs_url=addresses.blobs_url,
        program="replay",
    )


# processes


def _by_processes(addresses: LogAddresses, log: KafkaLog, rounds: int) -> dict[str, Figure]:
    """Seconds of one process to those of two, from the start of the processes to their end."""
    ends = tuple(log.end_positions([TOPIC]))
    starts = tuple(msgspec.structs.replace(end, offset=0) for end in ends)
    request = RescoreRequest(sources=(_SOURCE,), start=starts, end=ends)
    found: list[float] = []
    for number in range(rounds):
        seconds: dict[int, float] = {}
        # Every other round in reverse order: neither may always be the one on a warm machine.
        for processes in (1, 2) if number % 2 == 0 else (2, 1):
            run = _begun(addresses, log, f"processes-{number}-{processes}")
            began = time.perf_counter()
            rescore(Work(run, request, _MODULE, None), processes, lambda standing: None)
            seconds[processes] = time.perf_counter() - began
        print(f"  {seconds}", file=sys.stderr, flush=True)
        found.append(seconds[1] / seconds[2])
    return {"rescore_two_processes": figure(found)}


# memory


def _peak_mebibytes(trajectories: int) -> float:
    with _broker() as (addresses, log):
        fill(log, trajectories)
        told = json.dumps([addresses.log.bootstrap_servers, addresses.log.registry_url, addresses.blobs_url])
        command = [sys.executable, "-m", "bench.replay", told]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return float(done.stdout)


def _judge_all(bootstrap_servers: str, registry_url: str, blobs_url: str) -> float:
    """In a process of its own: peak memory in MiB after judging all."""
    log_settings = LogSettings(bootstrap_servers=bootstrap_servers, registry_url=registry_url)
    addresses = LogAddresses(log_settings, blobs_url)
    with closing(open_log(run_on(addresses, "memory"))) as log:
        ends, run = log.end_positions([TOPIC]), _begun(addresses, log, "memory")
    _judge(addresses, run, ends)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    print(_judge_all(*json.loads(sys.argv[1])))
