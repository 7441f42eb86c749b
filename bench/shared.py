"""Runs that share a log do not slow each other (P14): a run beside a million events of other runs, and on an empty log.

Two brokers run side by side, warmed up by the same small run. One gets a million events of other runs, the other holds
only what its own rounds left. In each round a new run is played on both, in alternating order (bench.practice).
Measured: seconds from the start of its programs (after imports) to the first rollout request, and rollouts per second
until enough have ended.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.practice import LOOP, Counter, Player, Program, Server, Watch, first_weights, new_run, settings_of
from bench.rounds import Figure, figure
from replayground.deploy.local.stack import LogAddresses, local_log
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.registry import ConfluentRegistry
from replayground.schemas.topics import TOPICS
from replayground.streams.log.kafka import KafkaLog

_SEED_RUN = "other-0000"
"as long as the names in _fill: other runs are copies of this one with the name replaced byte by byte"


@dataclass
class Field:
    """A broker, its log and its folder."""

    addresses: LogAddresses
    log: KafkaLog
    folder: Path
    server: Server


@dataclass(frozen=True)
class Round:
    """One run on one field."""

    first_seconds: float
    rollouts_per_second: float


def measure(quick: bool) -> dict[str, Figure]:
    """Limits: start_to_first_rollout_ratio at most 1.2, throughput_ratio at least 0.95."""
    events, rollouts, rounds = (20_000, 1_000, 1) if quick else (1_000_000, 10_000, 5)
    with _field() as empty, _field() as shared:
        for field in (empty, shared):
            _practise(field, _SEED_RUN, 1_000)
        written = _fill(shared.log, events)
        print(f"{written:,} events of other runs", file=sys.stderr, flush=True)
        found = [_round(empty, shared, number, rollouts) for number in range(rounds)]
    return {
        "start_to_first_rollout_ratio": figure(there.first_seconds / alone.first_seconds for alone, there in found),
        "throughput_ratio": figure(there.rollouts_per_second / alone.rollouts_per_second for alone, there in found),
        "shared_events_of_other_runs": figure([written]),
    }


def _round(empty: Field, shared: Field, number: int, rollouts: int) -> tuple[Round, Round]:
    """One round on each field: (empty, shared)."""
    fields = [("empty", empty), ("shared", shared)]
    found: dict[str, Round] = {}
    # Every other round in reverse order: neither field may always be the one on a warm machine.
    for name, field in fields if number % 2 == 0 else reversed(fields):
        found[name] = _practise(field, f"round-{number}", rollouts)
        print(f"  {name} {found[name]}", file=sys.stderr, flush=True)
    return found["empty"], found["shared"]


def _practise(field: Field, run_id: str, rollouts: int) -> Round:
    run = new_run(field.log, run_id, field.addresses)
    newest = first_weights(run, field.log, field.server.url)
    folder = field.folder / run_id
    programs = [Program.prepare(name, run, settings_of(name, folder)) for name in LOOP]
    player: Player | None = None
    try:
        for program in programs:
            program.await_ready()
        # Before any program starts, so that no event is missed.
        watch, ended = Watch(field.log, run, "rollouts"), Counter(field.log, "trajectories")
        player = Player(run, field.log, newest, field.server.url)
        began = min(program.start() for program in programs)
        first = watch.first(programs)

        def require_alive() -> None:
            for program in programs:
                program.require_alive()
            assert player is not None
            player.require_alive()

        # From the first end on: the start has a figure of its own.
        warm = ended.reach(1, require_alive)
        return Round(first - began, rollouts / (ended.reach(rollouts, require_alive) - warm))
    finally:
        for program in programs:
            program.kill()
        if player is not None:
            player.close()


def _fill(log: KafkaLog, count: int) -> int:
    """Appends copies of all events on the log under other run ids until there are `count` events. Returns how many."""
    messages = [message for message in log.messages([topic.name for topic in TOPICS]) if message.value is not None]
    written, copy = len(messages), 0
    while written < count:
        copy += 1
        # Same length, so that the Avro length prefixes stay right: bytes are replaced without decoding anything.
        name = f"other-{copy:04}".encode()
        for message in messages:
            assert message.value is not None
            key = None if message.key is None else message.key.replace(_SEED_RUN.encode(), name)
            log.append_bytes(message.address.topic, key, message.value.replace(_SEED_RUN.encode(), name))
        written += len(messages)
    log.flush(600.0)
    return written


@contextmanager
def _field() -> Iterator[Field]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replayground-bench-")))
        addresses = stack.enter_context(local_log(folder, heap_mebibytes=512))
        codec = Codec(ConfluentRegistry(addresses.log.registry_url), Blobs(addresses.blobs_url))
        log = KafkaLog(addresses.log, codec)
        stack.callback(log.close)
        server = Server()
        stack.callback(server.close)
        yield Field(addresses, log, folder, server)
