"""The process map: every program, in the order of the flow, and the function that runs it. What each reads and writes on the
log is declared in schemas.programs under the same names.

    run(run: Run, settings: <its section of the config>, program_metrics: ProgramMetrics, stop: threading.Event) -> None

Modules are imported when a program is served, not before: `replayground --help` needs no torch.
"""

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schemas.metrics import ProgramMetrics
from schemas.run import Run

RunFunction = Callable[[Run, Any, ProgramMetrics, threading.Event], None]


@dataclass(frozen=True)
class Program:
    """One program; its name is also its section of the config."""

    name: str
    module: str
    does: str
    stop_wave: int
    "who asks for work stops in wave 1, who does it in wave 2: nothing fails for want of a server that went first"
    stop_seconds_max: int = 30
    "time to drain before it is killed"
    ends_when_stalled: bool = False
    "whether work that waits and is not taken means that it hangs: then it is ended, and the supervisor starts it again"
    of_field: bool = False
    "one for the field and all of its runs, instead of one for each run"

    def load(self) -> RunFunction:
        """Imports the program, with all it needs."""
        function: RunFunction = importlib.import_module(self.module).run
        return function


PROGRAMS: tuple[Program, ...] = (
    Program(
        "traces",
        "consumers.events_to_clickhouse",
        "keeps the trace store, serves SQL and the web page",
        stop_wave=1,
        ends_when_stalled=True,
        of_field=True,
    ),
    Program("trainer", "trainer.loop", "makes weights from batches", 2, 60),
    Program("streams", "streams.app", "assembles, scores and groups trajectories", 2, 30, True),
    Program("cut", "streams.cut", "cuts groups into batches, exactly once", 2),
    Program("vllm", "consumers.vllm_server", "serves the policy", 2, 40),
    Program("reloader", "consumers.weights_to_vllm", "brings new weights to the servers", 2),
    Program("rollouts", "producers.rollouts", "plays rollouts with tools in sandboxes", 1, 40),
    Program("scheduler", "producers.scheduler", "asks for rollouts, paced by staleness", 1, 30, True),
    Program("feeder", "producers.tasks", "puts tasks to the field", 1, 30, True),
)

PROGRAM_BY_NAME = {program.name: program for program in PROGRAMS}
PROGRAMS_OF_FIELD = tuple(program for program in PROGRAMS if program.of_field)
PROGRAMS_OF_RUN = tuple(program for program in PROGRAMS if not program.of_field)
