"""Programs of ours as processes that a test may stop, kill and start beside each other."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from replayground.deploy.serve import end_process
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.config import CutSettings, StreamsSettings
from tests.simulation.simulator import only_errors

SESSION_SECONDS = 6.0
_PROCESSES = multiprocessing.get_context("spawn")
_PATIENCE_SECONDS = 180.0


class Program:
    """One process. It hears SIGTERM as the harness does, and tells what it died of."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._told, tells = _PROCESSES.Pipe(duplex=False)
        self._process = _PROCESSES.Process(target=_entered, args=(tells, function, arguments), daemon=True)
        self._process.start()
        tells.close()
        self._has_entered = False

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self.is_alive:
            os.kill(self._process.pid, number)

    def leave(self) -> None:
        """SIGTERM, when it can hear it: one that is still being loaded would die of it."""
        self._await_entry()
        self.send(signal.SIGTERM)

    def _await_entry(self) -> None:
        if not self._has_entered:
            self._told.recv()
            self._has_entered = True

    def ended(self) -> str:
        """Waits for its end. Says of what: an error with its name, or "exit code N"."""
        self._process.join(_PATIENCE_SECONDS)
        if self.is_alive:
            # Else the interpreter would wait for it at its own end, and the whole suite would never end.
            self.kill()
            raise AssertionError("the program does not end")
        try:
            self._await_entry()
            return str(self._told.recv())
        except EOFError:
            return f"exit code {self._process.exitcode}"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop_past_session(self) -> None:
        """SIGSTOP until the broker has given its partitions away, then SIGCONT."""
        self.send(signal.SIGSTOP)
        time.sleep(SESSION_SECONDS + 2.0)  # the time is what is tested: how long a broker waits for a silent member
        self.send(signal.SIGCONT)


def streams_program(run: Run, state_folder: Path, seek_seconds: float = 0.0, rejects_share_max: float = 0.5) -> Program:
    return Program(_streams, run, str(state_folder), seek_seconds, rejects_share_max)


def cut_program(run: Run, rejects_share_max: float = 0.5) -> Program:
    return Program(_cut, run, rejects_share_max)


def trainer_program(run: Run) -> Program:
    return Program(_trainer, run)


def _streams(run: Run, state_folder: str, seek_seconds: float, rejects_share_max: float, stop: threading.Event) -> None:
    """Seeks take so much longer than they would: what must not happen meanwhile has time to."""
    from replayground.streams import app, faust_fixes

    seek = faust_fixes.StatefulConsumer.perform_seek

    async def seek_slowly(consumer: faust_fixes.StatefulConsumer) -> None:
        await seek(consumer)
        await asyncio.sleep(seek_seconds)

    faust_fixes.StatefulConsumer.perform_seek = seek_slowly
    settings = StreamsSettings(
        state_folder=state_folder,
        session_timeout_seconds=SESSION_SECONDS,
        commit_seconds=0.5,
        rejects_share_max=rejects_share_max,
    )
    app.run(run, settings, ProgramMetrics(), stop)


def _cut(run: Run, rejects_share_max: float, stop: threading.Event) -> None:
    from replayground.streams import cut

    cut.run(run, CutSettings(rejects_share_max=rejects_share_max), ProgramMetrics(), stop)


def _trainer(run: Run, stop: threading.Event) -> None:
    from replayground.trainer import loop
    from replayground.trainer.config import GrpoSettings, ModelSettings, TrainerSettings

    settings = TrainerSettings(
        model=ModelSettings(hidden=32, layers=2, heads=2, ffn=48),
        grpo=GrpoSettings(micro_batch_tokens_max=256),
        threads=1,
    )
    loop.run(run, settings, ProgramMetrics(), stop)


def _entered(tells: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    tells.send("entered")
    only_errors()
    try:
        function(*arguments, stop)
    # Whatever ended it: a crash that is not ours (Faust's, aiokafka's) may have left a thread as well.
    except Exception as error:
        tells.send(f"{type(error).__name__}: {error}")
        end_process(1)
    end_process(0)
