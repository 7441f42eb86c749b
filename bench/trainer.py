"""One GRPO step of ours beside those of TRL and ms-swift: the same model, the same fresh batch, the same loss.

Each trainer is a process of its own with one thread, and works while the others wait. In every round all take a step on a
batch that none has seen, in changing order. The losses and the norms of the gradients of the first step must agree.
Peers get the micro-batches that suit them best. Memory is the peak of the whole process, libraries included, and of
that what was added after the model was loaded. Ratios are of tokens per second, by the clock and by processor time.
Part smollm2 is the same with SmolLM2-135M.
"""

import dataclasses
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from bench.rounds import Figure, figure
from bench.smollm2 import smollm2
from bench.trainer_batches import SENTENCES, STOCKROOM, BatchShape, drawn_batch
from bench.trainer_steps import SETTINGS, Taken, model_files, write_batch
from replayground.schemas.job import load_job
from replayground.schemas.packed import pack_logprobs, unpack_tokens
from replayground.trainer.base_model import make_model, read_model
from replayground.trainer.config import ModelSettings, TrainerSettings
from replayground.trainer.engines.apart import _environment
from replayground.trainer.engines.protocol import GrpoBatch
from replayground.trainer.engines.swift_support import swift_libraries
from replayground.trainer.engines.torch_engine import TorchEngine

_STALENESS = 0.1
"standard deviation of the log-ratio between the weights that sampled and those that are trained"
_LOSS_GAP_MAX = 1e-6
_ROWS = {"trl": 64, "swift": 64}
"trajectories of a micro-batch: of 16, 32, 64 and 128 the fastest for each"


@dataclass
class _Trainer:
    """A trainer's process and what it did."""

    name: str
    log: Path
    "what its libraries print"
    process: subprocess.Popen[bytes]
    connection: Connection
    ready: Taken = field(default_factory=lambda: Taken(0))
    taken: list[Taken] = field(default_factory=list)
    warm_up: int = 2
    "steps that are not measured: allocators and caches fill"

    def await_ready(self) -> None:
        self.ready = self._answer()

    def step(self, number: int) -> None:
        self.connection.send_bytes(str(number).encode())
        self.taken.append(self._answer())

    @property
    def measured(self) -> Sequence[Taken]:
        return self.taken[self.warm_up :]

    @property
    def peak_bytes(self) -> int:
        return self.taken[-1].peak_bytes

    def _answer(self) -> Taken:
        try:
            return msgspec.msgpack.decode(self.connection.recv_bytes(), type=Taken)
        except EOFError as error:
            last = self.log.read_text()[-2000:]
            raise RuntimeError(f"the trainer {self.name} ended with code {self.process.wait()}: {last}") from error


def measure(quick: bool) -> dict[str, Figure]:
    """Limits: grpo_step_to_trl and grpo_step_to_swift at least 2.5, memory at most 0.8."""
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        for file, data in make_model(ModelSettings(), load_job("replayground.producers.stockroom"), seed=0).items():
            (folder / "model" / file).write_bytes(data)
        return _compare(folder, STOCKROOM, 3 if quick else 15, 2, _ROWS)


def measure_smollm2(quick: bool) -> dict[str, Figure]:
    """Limits as above. Takes minutes a round, so it is measured only when it is asked for. One trainer after the other:
    all at once need more than 10 GB."""
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        read_model(smollm2(), folder / "model")
        found = _compare_apart(folder, SENTENCES, 1 if quick else 3, 1, dict.fromkeys(_ROWS, 4))
        return {f"smollm2_{name}": value for name, value in found.items()}


PARTS = {"stockroom": measure, "smollm2": measure_smollm2}


def _compare(folder: Path, shape: BatchShape, rounds: int, warm_up: int, rows: dict[str, int]) -> dict[str, Figure]:
    tokens = _prepare(folder, shape, warm_up + rounds)
    with _trainers(folder, {"ours": 0, **rows}) as trainers:
        for number in range(len(tokens)):
            # Every round in another order: nobody may always be the one after a heavy neighbour.
            for place in range(len(trainers)):
                trainers[(number + place) % len(trainers)].step(number)
        for trainer in trainers:
            trainer.warm_up = warm_up
            _print(trainer, tokens[warm_up:])
        return _figures(trainers, tokens[warm_up:])


def _compare_apart(
    folder: Path, shape: BatchShape, rounds: int, warm_up: int, rows: dict[str, int]
) -> dict[str, Figure]:
    """As _compare, one trainer after the other."""
    tokens = _prepare(folder, shape, warm_up + rounds)
    ended: list[_Trainer] = []
    for name, count in {"ours": 0, **rows}.items():
        with _trainers(folder, {name: count}) as (trainer,):
            trainer.warm_up = warm_up
            for number in range(len(tokens)):
                trainer.step(number)
            _print(trainer, tokens[warm_up:])
            ended.append(trainer)
    return _figures(ended, tokens[warm_up:])


def _figures(trainers: Sequence[_Trainer], tokens: Sequence[int]) -> dict[str, Figure]:
    our, *peers = trainers
    _require_equal(trainers)
    figures: dict[str, Figure] = {}
    for peer in peers:
        pairs = list(zip(our.measured, peer.measured, strict=True))
        added = [trainer.peak_bytes - trainer.ready.resident_bytes for trainer in (our, peer)]
        figures |= {
            f"grpo_step_to_{peer.name}": figure(theirs.seconds / own.seconds for own, theirs in pairs),
            f"grpo_step_to_{peer.name}_processor": figure(
                theirs.processor_seconds / own.processor_seconds for own, theirs in pairs
            ),
            f"grpo_memory_to_{peer.name}": figure([our.peak_bytes / peer.peak_bytes]),
            f"grpo_memory_of_steps_to_{peer.name}": figure([added[0] / added[1]]),
        }
    rates = [count / taken.seconds for count, taken in zip(tokens, our.measured, strict=True)]
    gaps = [abs(peer.taken[0].loss - our.taken[0].loss) for peer in peers]
    return figures | {"grpo_tokens_per_second": figure(rates), "grpo_loss_gap": figure([max(gaps)])}


def _require_equal(trainers: Sequence[_Trainer]) -> None:
    """Raises AssertionError unless all computed the same in the first step, from the same weights."""
    our, *peers = (trainer.taken[0] for trainer in trainers)
    for peer, trainer in zip(peers, trainers[1:], strict=True):
        assert abs(peer.loss - our.loss) <= _LOSS_GAP_MAX, f"{trainer.name} has loss {peer.loss}, ours is {our.loss}"
        gap = abs(peer.gradient_norm - our.gradient_norm) / our.gradient_norm
        assert gap < 1e-3, f"{trainer.name} has a gradient of norm {peer.gradient_norm}, ours {our.gradient_norm}"


def _prepare(folder: Path, shape: BatchShape, count: int) -> list[int]:
    """Writes batches with log-probabilities near those of the model; returns the tokens of each."""
    torch.set_num_threads(1)
    engine = TorchEngine(SETTINGS, 0)
    engine.load(model_files(folder), {})
    return [
        _prepare_one(folder, drawn_batch(shape, engine._ready()[0].vocabulary_size, n), engine) for n in range(count)
    ]


def _prepare_one(folder: Path, batch: GrpoBatch, engine: TorchEngine) -> int:
    draw = random.Random(batch.index)
    events = [
        msgspec.structs.replace(
            event, logprobs=pack_logprobs(_stale(engine.probe(unpack_tokens(event.tokens)), event.loss_mask, draw))
        )
        for event in batch.trajectories
    ]
    write_batch(folder, batch.index, dataclasses.replace(batch, trajectories=events))
    return sum(len(event.loss_mask) for event in events)


def _stale(logprobs: Sequence[float], mask: bytes, draw: random.Random) -> list[float]:
    # The first token has none: nothing stands before it.
    return [(value + draw.gauss(0.0, _STALENESS)) * m for value, m in zip([0.0, *logprobs], mask, strict=True)]


@contextmanager
def _trainers(folder: Path, rows: dict[str, int]) -> Iterator[list[_Trainer]]:
    """Those named, with the trajectories of a micro-batch. Peers are started with the libraries of the engine swift, which
    TRL is one of."""
    libraries = swift_libraries(TrainerSettings())
    assert libraries is not None, "ms-swift is not installed: run `make setup`"
    started: list[_Trainer] = []
    try:
        for name, count in rows.items():
            started.append(_start(name, folder, count, None if name == "ours" else libraries))
            # One after another: they would slow each other, and what is measured begins later.
            started[-1].await_ready()
        yield started
    finally:
        for trainer in started:
            trainer.connection.close()
            trainer.process.kill()
            trainer.process.wait()


def _start(name: str, folder: Path, rows: int, libraries: Path | None) -> _Trainer:
    own, theirs = socket.socketpair()
    arguments = ["-m", "bench.trainer_steps", name, str(theirs.fileno()), str(folder), str(rows)]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=_environment(libraries, 1),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    theirs.close()
    return _Trainer(name, log, process, Connection(own.detach()))


def _print(trainer: _Trainer, tokens: Sequence[int]) -> None:
    seconds = figure(taken.seconds for taken in trainer.measured)
    peak, loaded = trainer.peak_bytes / 2**20, trainer.ready.resident_bytes / 2**20
    print(
        f"  {trainer.name}: {seconds} s for {sum(tokens) / len(tokens):.0f} tokens, peak {peak:.0f} MiB, "
        f"{loaded:.0f} when loaded, first loss {trainer.taken[0].loss:.9f}, norm {trainer.taken[0].gradient_norm:.6f}",
        file=sys.stderr,
        flush=True,
    )
