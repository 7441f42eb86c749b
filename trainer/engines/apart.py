"""An engine in a process of its own, with libraries of its own: the parent's side is the Engine that the loop knows.

    ApartEngine ── calls, MessagePack over a socket ──► python -m replayground.trainer.engines.apart ──► SwiftEngine
                ◄─ progress, then a result or a refusal ─┘

ms-swift changes transformers when it is imported, and needs an older huggingface_hub than the rest of the project: its
libraries come first in the path of the child alone. Models pass as files. If the child dies, the engine must be loaded
again, as after any error.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import msgspec
import structlog
from msgspec import Struct

from replayground.schemas.errors import BadInput, BlobDamaged, ReplaygroundError
from replayground.schemas.events import TrajectoryAssembled, WeightsKind
from replayground.trainer.config import TrainerSettings
from replayground.trainer.engines.protocol import Engine, GrpoBatch, Progress, StepRefused, StepReport
from replayground.trainer.sft import LossNotFinite

_PR_SET_PDEATHSIG = 1
_END_SECONDS = 10.0
_LINES_KEPT = 20

_logger = structlog.get_logger(__name__)


class EngineDied(ReplaygroundError):
    """The process of an engine ended in the middle of a call. Its last lines stand in the message."""


class LoadCall(Struct, frozen=True, tag=True):
    files: dict[str, str]
    checkpoint: dict[str, str]


class ReferenceCall(Struct, frozen=True, tag=True):
    files: dict[str, str]


class LearnCall(Struct, frozen=True, tag=True):
    demonstrations: list[TrajectoryAssembled]


class PractiseCall(Struct, frozen=True, tag=True):
    batch: GrpoBatch


class SaveCall(Struct, frozen=True, tag=True):
    folder: str
    is_checkpoint: bool


class ProbeCall(Struct, frozen=True, tag=True):
    tokens: list[int]


Call = LoadCall | ReferenceCall | LearnCall | PractiseCall | SaveCall | ProbeCall


class EngineAnswer(Struct, frozen=True, tag=True, omit_defaults=True):
    """The result of a call; what it does not give is left out."""

    report: StepReport | None = None
    files: dict[str, str] = {}
    logprobs: list[float] = []


class EngineProgress(Struct, frozen=True, tag=True):
    share: float
    loss: float


class EngineRefusal(Struct, frozen=True, tag=True):
    kind: str
    "class of the error"
    message: str


_ERRORS: dict[str, type[ReplaygroundError]] = {
    error.__name__: error for error in (BadInput, BlobDamaged, LossNotFinite, StepRefused)
}
_ANSWERS = msgspec.msgpack.Decoder(EngineAnswer | EngineProgress | EngineRefusal)
_CALLS = msgspec.msgpack.Decoder(Call)


class ApartEngine:
    """See trainer.engines.protocol.Engine. `close` ends the process; so does the end of this one."""

    def __init__(self, settings: TrainerSettings, seed: int, libraries: Path | None = None) -> None:
        """`libraries` come first in the child's path. Nothing is started before `load`."""
        self._settings, self._seed, self._libraries = settings, seed, libraries
        self._child: _Child | None = None

    @property
    def kind(self) -> WeightsKind:
        return "lora" if self._settings.lora.rank else "full"

    def load(self, files: Mapping[str, Path], checkpoint: Mapping[str, Path]) -> None:
        if self._child is None:
            self._child = _Child(self._settings, self._seed, self._libraries)
        self._ask(LoadCall(_texts(files), _texts(checkpoint)))

    def set_reference(self, files: Mapping[str, Path]) -> None:
        self._ask(ReferenceCall(_texts(files)))

    def sft(self, demonstrations: Sequence[TrajectoryAssembled], progress: Progress) -> StepReport:
        return _report(self._ask(LearnCall(list(demonstrations)), progress))

    def grpo(self, batch: GrpoBatch) -> StepReport:
        return _report(self._ask(PractiseCall(batch)))

    def save(self, folder: Path) -> dict[str, Path]:
        return _paths(self._ask(SaveCall(str(folder), False)).files)

    def checkpoint(self, folder: Path) -> dict[str, Path]:
        return _paths(self._ask(SaveCall(str(folder), True)).files)

    def probe(self, tokens: Sequence[int]) -> list[float]:
        return self._ask(ProbeCall(list(tokens))).logprobs

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _ask(self, call: Call, progress: Progress | None = None) -> EngineAnswer:
        assert self._child is not None, "load comes first"
        try:
            return self._child.ask(call, progress)
        except ReplaygroundError as error:
            if isinstance(error, EngineDied):
                self.close()
            raise
        except BaseException:
            # The caller does not wait for the answer any more, and the next one would be taken for it.
            self.close()
            raise


class _Child:
    """The process, and the socket to it."""

    def __init__(self, settings: TrainerSettings, seed: int, libraries: Path | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="replayground-swift-")
        ours, theirs = socket.socketpair()
        arguments = ["-m", "replayground.trainer.engines.apart", str(theirs.fileno()), str(seed), self._folder.name]
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env=_environment(libraries, settings.threads),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._lines: list[str] = []
        assert self._process.stdout is not None
        # Read all the time: a full pipe would block the child.
        self._forwarder = threading.Thread(target=self._forward, args=(self._process.stdout,), daemon=True)
        self._forwarder.start()
        self._connection.send_bytes(msgspec.msgpack.encode(settings))

    def ask(self, call: Call, progress: Progress | None) -> EngineAnswer:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(call))
            while True:
                match _ANSWERS.decode(self._connection.recv_bytes()):
                    case EngineProgress(share=share, loss=loss):
                        if progress is not None:
                            progress(share, loss)
                    case EngineRefusal(kind=kind, message=message):
                        raise _ERRORS[kind](message)
                    case EngineAnswer() as answer:
                        return answer
        except (EOFError, OSError) as error:
            self._process.wait(_END_SECONDS)
            self._forwarder.join(_END_SECONDS)
            last = " | ".join(self._lines)
            raise EngineDied(f"the engine's process ended with code {self._process.returncode}: {last}") from error

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._forwarder.join(_END_SECONDS)
        self._folder.cleanup()

    def _forward(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                if text := line.decode("utf-8", "replace").rstrip():
                    self._lines = [*self._lines, text][-_LINES_KEPT:]
                    _logger.info("engine_output", line=text)


def _environment(libraries: Path | None, threads: int) -> dict[str, str]:
    project = str(Path(__file__).resolve().parents[2])
    # ms-swift's libraries before site-packages: both have a huggingface_hub.
    path = [str(libraries) if libraries else "", os.environ.get("PYTHONPATH", ""), project]
    return {
        **os.environ,
        "REPLAYGROUND_PARENT": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": str(threads),
        # Everything is on this disk: a look at a hub would only wait for it.
        **dict.fromkeys(("USE_HF", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
        "LOG_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _texts(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: str(path) for name, path in files.items()}


def _paths(files: Mapping[str, str]) -> dict[str, Path]:
    return {name: Path(path) for name, path in files.items()}


def _report(answer: EngineAnswer) -> StepReport:
    assert answer.report is not None
    return answer.report


def answer_to(engine: Engine, call: Any, progress: Progress) -> EngineAnswer:
    """Does what a call asks for."""
    match call:
        case LoadCall(files=files, checkpoint=checkpoint):
            engine.load(_paths(files), _paths(checkpoint))
        case ReferenceCall(files=files):
            engine.set_reference(_paths(files))
        case LearnCall(demonstrations=demonstrations):
            return EngineAnswer(report=engine.sft(demonstrations, progress))
        case PractiseCall(batch=batch):
            return EngineAnswer(report=engine.grpo(batch))
        case SaveCall(folder=folder, is_checkpoint=is_checkpoint):
            save = engine.checkpoint if is_checkpoint else engine.save
            return EngineAnswer(files=_texts(save(Path(folder))))
        case ProbeCall(tokens=tokens):
            return EngineAnswer(logprobs=engine.probe(tokens))
    return EngineAnswer()


def main(descriptor: int, seed: int, folder: Path) -> None:
    """The child: answers calls until the parent closes the socket."""
    # In this order: if the parent died before prctl, no signal comes, and only its pid shows it.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["REPLAYGROUND_PARENT"]):
        return
    connection = Connection(descriptor)
    settings = msgspec.msgpack.decode(connection.recv_bytes(), type=TrainerSettings)
    import torch

    torch.set_num_threads(settings.threads)
    engine: Engine | None = None
    while True:
        try:
            call = _CALLS.decode(connection.recv_bytes())
        except EOFError:
            return
        try:
            if engine is None:
                engine = _swift_engine(settings, seed, folder)
            answer: Struct = answer_to(engine, call, lambda share, loss: _send(connection, EngineProgress(share, loss)))
        except tuple(_ERRORS.values()) as error:
            kind = next(kind for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
            answer = EngineRefusal(kind.__name__, str(error))
        _send(connection, answer)


def _swift_engine(settings: TrainerSettings, seed: int, folder: Path) -> Engine:
    try:
        from replayground.trainer.engines.swift_engine import SwiftEngine
    except ImportError as error:
        raise BadInput(
            f'[trainer] engine = "swift" needs ms-swift 4.6 ({error}): run `make setup`, or name the folder that it is in '
            "by [trainer.swift] libraries"
        ) from error
    return SwiftEngine(settings, seed, folder)


def _send(connection: Connection, answer: Struct) -> None:
    connection.send_bytes(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
