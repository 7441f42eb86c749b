"""The process map: every program and the module whose function `run` runs it. What each program reads and writes on the
log is declared in schemas.programs under the same names.

    run(run: Run, settings: <its section of the config>, program_metrics: ProgramMetrics, stop: threading.Event) -> None

A module is imported only when its program is served, so `replayground --help` does not load torch.
"""

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run

RunFunction = Callable[[Run, Any, ProgramMetrics, threading.Event], None]


@dataclass(frozen=True)
class Program:
    """One program; its name is also its section of the config."""

    name: str
    module: str
    does: str
    stop_wave: int
    "programs that request work stop in wave 1, those that do it in wave 2: no request fails for lack of a server"
    stop_seconds_max: int = 30
    "time to drain before it is killed"
    ends_when_stalled: bool = False
    "True: waiting work that is not taken means a hang, so the harness ends the process and the supervisor restarts it"
    of_field: bool = False
    "True: one instance for the field and all its runs, instead of one per run"

    def load(self) -> RunFunction:
        """Imports the module of the program and everything it needs; this may take seconds."""
        function: RunFunction = importlib.import_module(self.module).run
        return function


# In the order in which a stack starts them; all of a stack start at once, and each waits for what it needs.
PROGRAMS: tuple[Program, ...] = (
    Program(
        "traces",
        "replayground.consumers.events_to_clickhouse",
        "keeps the trace store, serves SQL and the web page",
        stop_wave=1,
        ends_when_stalled=True,
        of_field=True,
    ),
    Program("trainer", "replayground.trainer.loop", "makes weights from batches", 2, 60),
    Program("streams", "replayground.streams.app", "assembles, scores and groups trajectories", 2, 30, True),
    # Not ends_when_stalled: what it waits for is an endpoint that is down, and a restart would not bring it back.
    Program(
        "judge", "replayground.streams.judges.program", "asks judges and counts verdicts, for a job with judges", 2
    ),
    Program("cut", "replayground.streams.cut", "cuts groups into batches, exactly once", 2),
    Program("vllm", "replayground.consumers.vllm_server", "serves the policy", 2, 40),
    Program("reloader", "replayground.consumers.weights_to_vllm", "brings new weights to the servers", 2),
    Program("rollouts", "replayground.producers.rollouts", "plays rollouts with tools in sandboxes", 1, 40),
    Program("scheduler", "replayground.producers.scheduler", "asks for rollouts, paced by staleness", 1, 30, True),
    Program("feeder", "replayground.producers.tasks", "puts tasks to the field", 1, 30, True),
)

PROGRAM_BY_NAME = {program.name: program for program in PROGRAMS}
PROGRAMS_OF_FIELD = tuple(program for program in PROGRAMS if program.of_field)
PROGRAMS_OF_RUN = tuple(program for program in PROGRAMS if not program.of_field)
