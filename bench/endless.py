"""Runs without an end: what a restart costs after more and more ended trajectories of one run (P13).

One field for each size, each with a broker and one run (bench.practice). First each run is continued until it has its
number of ended trajectories. Then all fields stay up, and in every round the programs of each run are killed and
restarted one after another, each with work waiting: the first size and the last by turns, program by program, so that
both sides of a ratio see the same machine. Measured: seconds from the start (after imports) to the first event written,
processor seconds in that time, memory at that moment, and the size of the state. The streams also lose their state folder.

Every restart finds the same work, at every size, so that only the length of the run differs:

    drain: no open task ─► scheduler stops cleanly: a snapshot of the horizons alone
    portion: 256 tasks (what the feeder keeps in advance) are played, 4 batches ─► kill -9: the tail that a restart reads,
             4,600 events of the 5,000 between two snapshots
    restart: the feeder submits 256 tasks, the scheduler requests 192 of them, and so on

The states of feeder and scheduler are measured with these 256 tasks open, by a clean stop when they have nothing more to
do. In the portion all rollouts are of one version, since the cutter remembers groups by their version.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.practice import (
    LOOP,
    TASKS_IN_ADVANCE,
    Counter,
    OpenTasks,
    Player,
    Program,
    Server,
    Watch,
    first_weights,
    new_run,
    settings_of,
)
from bench.rounds import Figure, figure, worst
from replayground.consumers.config import ReloaderSettings
from replayground.consumers.weights_to_vllm import TargetReader
from replayground.deploy.local.stack import LogAddresses, local_log
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import SnapshotTaken, WeightsPublished
from replayground.schemas.registry import ConfluentRegistry
from replayground.schemas.run import Run
from replayground.streams.config import StreamsSettings
from replayground.streams.log.kafka import KafkaLog

_RUN_ID = "endless"
_WITHOUT_FEEDER = tuple(name for name in LOOP if name != "feeder")
_PLANNERS = ("feeder", "scheduler")
"programs that take a snapshot when they are stopped"


@dataclass(frozen=True)
class Restart:
    """One restart of one program."""

    seconds: float
    processor_seconds: float
    memory_bytes: int
    state_bytes: dict[str, int]


@dataclass
class Endless:
    """A run on a field of its own, and the programs that are running for it."""

    run: Run
    log: KafkaLog
    ended: Counter
    "trajectories that have ended"
    folder: Path
    server: Server
    newest: WeightsPublished
    open_tasks: OpenTasks
    idle_bytes: int = 0
    "of the scheduler's snapshot without open work"
    programs: dict[str, Program] = field(default_factory=dict)
    player: Player | None = None

    def grow(self, count: int) -> None:
        """Runs until `count` trajectories have ended in all, then until no work is left."""
        self._start(LOOP)
        for tenth in range(1, 11):
            self.ended.reach(count * tenth // 10, self._require_alive)
            print(f"{self.ended.count():,} of {count:,} ended trajectories", file=sys.stderr, flush=True)
        self._stop("feeder")
        self._rest()

    def play_portion(self) -> None:
        """Leaves a snapshot without open work behind, plays as many tasks as the feeder keeps in advance, and kills all."""
        self._start(_WITHOUT_FEEDER)
        self._rest()
        submitted = self.open_tasks.submitted
        self._start(("feeder",), version_played=self.newest.version)
        self.open_tasks.reach(submitted + TASKS_IN_ADVANCE, self._require_alive)
        # Before it reads of ended tasks: it would submit more.
        self._kill("feeder")
        self._start(_WITHOUT_FEEDER, version_played=self.newest.version)
        self.open_tasks.drain(self._require_alive)
        self.kill_all()

    def _rest(self) -> None:
        """Plays what is open to its end. The scheduler leaves a snapshot, the others are killed."""
        self.open_tasks.drain(self._require_alive)
        # The ends of the last batch reach the scheduler after the batch.
        self._settle("attempts")
        self._stop("scheduler")
        self.kill_all()
        self.idle_bytes = _snapshot_bytes(self.log, self.run, "scheduler")

    def restarts(self) -> Iterator[tuple[str, Restart]]:
        """Restarts each program in the order of the flow: what one writes is the work of the next.

        Between two of them this run is at rest, so that the restarts of another one can be measured."""
        yield "feeder", self._restart("feeder", "tasks")
        restart = self._restart("scheduler", "rollouts")
        self._play()
        self._settle("messages")
        self.kill_all()
        yield "scheduler", restart
        # The worst case: the state is read back from the changelog topics.
        shutil.rmtree(self.folder / "state")
        # A group keeps the partitions of a killed member until its session expires. That time is constant, so it is
        # waited out here; measured is what follows, which is the part that could grow.
        time.sleep(StreamsSettings().session_timeout_seconds)
        restart = self._restart("streams", "trajectories")
        # The cutter needs whole groups to write a batch.
        self._settle("groups")
        yield "streams", restart
        for name, writes in (("cut", "batches"), ("trainer", "steps")):
            restart = self._restart(name, writes)
            self._settle(writes)
            yield name, restart
        restart = self._restart("reloader", None)
        self.kill_all()
        # The real trainer has published a version in this round: the Player must continue from it.
        self.newest = _newest_weights(self.log, self.run)
        yield "reloader", restart

    def _restart(self, name: str, writes: str | None) -> Restart:
        program = self._prepare(name)
        program.await_ready()
        # The watch begins before the program: its first event must not be missed.
        self.server.asked.clear()
        watch = None if writes is None else Watch(self.log, self.run, writes)
        imports_seconds = program.processor_seconds()
        began = program.start()
        ended = self.server.first(program.require_alive) if watch is None else watch.first([program])
        processor_seconds = program.processor_seconds() - imports_seconds
        memory_bytes = program.memory_bytes()
        if name in _PLANNERS:
            # Until it has written all that the open tasks allow: from then on its state is the same in every round.
            assert writes is not None
            self._settle(writes)
            self._stop(name)
        return Restart(ended - began, processor_seconds, memory_bytes, self._state_bytes(name))

    def _settle(self, topic: str) -> None:
        Counter(self.log, topic).settle(self._require_alive)

    def _state_bytes(self, name: str) -> dict[str, int]:
        if name == "streams":
            # Segments only: Kafka allocates index files far larger than their contents.
            segments = self.folder.rglob("*changelog*/*.log")
            return {
                "table": _size_bytes(self.folder / "state"),
                "changelog": sum(path.stat().st_size for path in segments),
            }
        if name == "reloader":
            return {"targets": _targets_bytes(self.log, self.run)}
        idle = {"idle": self.idle_bytes} if name == "scheduler" else {}
        return idle | {"snapshot": _snapshot_bytes(self.log, self.run, name)}

    def _start(self, names: Iterable[str], version_played: int | None = None) -> None:
        started = [self._prepare(name) for name in names]
        # All are started before any is awaited: their imports run side by side.
        for program in started:
            program.await_ready()
        if self.player is None:
            self._play(version_played)
        for program in started:
            program.start()

    def _stop(self, name: str) -> None:
        self.programs.pop(name).stop()

    def _kill(self, name: str) -> None:
        self.programs.pop(name).kill()

    def _prepare(self, name: str) -> Program:
        self.programs[name] = Program.prepare(name, self.run, settings_of(name, self.folder, self.server.url))
        return self.programs[name]

    def _play(self, version_played: int | None = None) -> None:
        self.player = Player(self.run, self.log, self.newest, self.server.url, version_played)

    def kill_all(self) -> None:
        for program in self.programs.values():
            program.kill()
        self.programs = {}
        if self.player is not None:
            self.player.close()
            self.newest = self.player.newest
            self.player = None

    def _require_alive(self) -> None:
        for program in self.programs.values():
            program.require_alive()
        if self.player is not None:
            self.player.require_alive()


def measure(quick: bool) -> dict[str, Figure]:
    """Growth from the first size to the last, of the program where it is worst. 1 = none; the limit is 1.2."""
    if quick:
        return measure_sizes((500, 3_000), rounds=2)
    return measure_sizes((10_000, 100_000, 1_000_000), rounds=5)


def measure_sizes(sizes: Sequence[int], rounds: int) -> dict[str, Figure]:
    """Restarts at each size, in ascending order; the figures compare the last with the first."""
    with ExitStack() as stack:
        fields = [stack.enter_context(_endless()) for _ in sizes]
        for endless, size in zip(fields, sizes, strict=True):
            endless.grow(size)
        found = [_round(fields, number) for number in range(rounds)]
        reached = [endless.ended.count() for endless in fields]
    for name in found[0][0]:
        for count, restarts in zip(reached, zip(*found, strict=True), strict=True):
            _tell_medians(name, count, [by_program[name] for by_program in restarts])
    return _growths(found) | {"endless_trajectories": figure([reached[-1]])}


def _round(fields: Sequence[Endless], number: int) -> list[dict[str, Restart]]:
    """One restart of every program on every field."""
    for endless in fields:
        endless.play_portion()
    found: list[dict[str, Restart]] = [{} for _ in fields]
    sides = list(zip(found, (endless.restarts() for endless in fields), strict=True))
    # Every other round in reverse order: neither size may always be the one on a warm machine.
    if number % 2:
        sides.reverse()
    for restarts_of_one_program in zip(*(restarts for _, restarts in sides), strict=True):
        for (restarts, _), (name, restart) in zip(sides, restarts_of_one_program, strict=True):
            restarts[name] = restart
    for endless, restarts in zip(fields, found, strict=True):
        _tell(endless.ended.count(), restarts)
    return found


def _growths(rounds: Sequence[Sequence[dict[str, Restart]]]) -> dict[str, Figure]:
    first, last = [found[0] for found in rounds], [found[-1] for found in rounds]

    def growth(name: str, size: Callable[[Restart], float]) -> Figure:
        return figure(size(late[name]) / size(early[name]) for early, late in zip(first, last, strict=True))

    def state_growth(name: str, kind: str) -> Figure:
        return growth(name, lambda restart: restart.state_bytes[kind])

    growths = {
        "restart_growth": {name: growth(name, lambda restart: restart.seconds) for name in first[0]},
        "restart_processor_growth": {
            name: growth(name, lambda restart: restart.processor_seconds) for name in first[0]
        },
        "memory_growth": {name: growth(name, lambda restart: restart.memory_bytes) for name in first[0]},
        "state_growth": {
            f"{name}, {kind}": state_growth(name, kind)
            for name in first[0]
            for kind in first[0][name].state_bytes
            # A program without snapshots has no state that could grow.
            if all(early[name].state_bytes[kind] > 0 for early in first)
        },
    }
    for growth_name, found in growths.items():
        for name, ratio in found.items():
            print(f"{growth_name} of {name}: {ratio}", file=sys.stderr, flush=True)
    return {growth_name: worst(found.values()) for growth_name, found in growths.items()}


def _tell(count: int, restarts: dict[str, Restart]) -> None:
    print(f"after {count:,} ended trajectories", file=sys.stderr)
    for name, restart in restarts.items():
        state = ", ".join(f"{kind} {size_bytes:,} bytes" for kind, size_bytes in restart.state_bytes.items())
        seconds = f"{restart.seconds:7.2f} s {restart.processor_seconds:7.2f} processor s"
        print(f"  {name:10} {seconds} {restart.memory_bytes / 1e6:6.0f} MB  {state}", file=sys.stderr, flush=True)


def _tell_medians(name: str, count: int, restarts: Sequence[Restart]) -> None:
    """One line of the table in docs/fields_and_runs.md."""
    seconds = figure(restart.seconds for restart in restarts)
    processor = figure(restart.processor_seconds for restart in restarts)
    megabytes = figure(restart.memory_bytes / 1e6 for restart in restarts)
    state = {kind: figure(restart.state_bytes[kind] for restart in restarts) for kind in restarts[0].state_bytes}
    told = [f"{kind} {found}" for kind, found in state.items()]
    print(
        " | ".join([name, f"{count:,}", *map(str, (seconds, processor, megabytes)), *told]), file=sys.stderr, flush=True
    )


@contextmanager
def _endless() -> Iterator[Endless]:
    with (
        tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder,
        local_log(Path(folder), heap_mebibytes=512) as addresses,
    ):
        log = _open(addresses)
        server = Server()
        run = new_run(log, _RUN_ID, addresses)
        newest = first_weights(run, log, server.url)
        endless = Endless(run, log, Counter(log, "trajectories"), Path(folder), server, newest, OpenTasks(log, run))
        try:
            yield endless
        finally:
            endless.kill_all()
            endless.open_tasks.close()
            server.close()
            log.close()


def _open(addresses: LogAddresses) -> KafkaLog:
    codec = Codec(ConfluentRegistry(addresses.log.registry_url), Blobs(addresses.blobs_url))
    return KafkaLog(addresses.log, codec)


def _newest_weights(log: KafkaLog, run: Run) -> WeightsPublished:
    reader = log.reader(["weights"], start=run.start)
    newest: WeightsPublished | None = None
    while not reader.caught_up():
        for delivery in reader.poll(1000, 0.2):
            if isinstance(delivery.event, WeightsPublished):
                newest = delivery.event
    reader.close()
    assert newest is not None
    return newest


def _snapshot_bytes(log: KafkaLog, run: Run, program: str) -> int:
    """Size of the newest snapshot as it is on the log; 0 for a program that takes none."""
    size_bytes = 0
    for message in log.messages(["snapshots"], run.start):
        event = log.codec.decode(message.value, "snapshots") if message.value else None
        if isinstance(event, SnapshotTaken) and event.program == program:
            size_bytes = len(message.value or b"")
    return size_bytes


def _targets_bytes(log: KafkaLog, run: Run) -> int:
    """Size of the state that the reloader has, whenever it took its last snapshot."""
    following = TargetReader(log, run, ReloaderSettings().skipped_versions_max + 2)
    try:
        while not following.is_caught_up():
            following.read(0.2)
        return len(msgspec.msgpack.encode(following.targets))
    finally:
        following.close()


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
