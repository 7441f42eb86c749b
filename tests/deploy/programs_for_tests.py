"""Programs of the shape that deploy.serve runs, small enough to be watched. Which one is chosen by the worker's name."""

import threading
from typing import Any

from replayground.schemas.errors import BadInput, TakenOver
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run


def run(run: Run, settings: Any, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    if run.worker == "crashes":
        raise ValueError("something unexpected")
    if run.worker == "leaves-a-thread":
        threading.Thread(target=threading.Event().wait, name="of a library").start()
        raise ValueError("something unexpected")
    if run.worker == "refuses":
        raise BadInput("tasks.jsonl line 3 is no task: give it a prompt")
    if run.worker == "gives-way":
        raise TakenOver("start 0 of run serve was taken over by start 1")
    if run.worker == "finishes":
        program_metrics.count("events_read", 3)
        return
    program_metrics.count("events_read", 7)
    program_metrics.gauge("lag", 5 if run.worker in ("stalls", "hangs") else 0)
    program_metrics.detail = "waiting to be stopped"
    stop.wait()
    program_metrics.count("events_written", 1)
