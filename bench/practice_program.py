"""One program of a run as a process: it imports everything first and starts when it reads a line.

SIGTERM stops it cleanly. This module imports as little as possible itself, so that the memory of the process is that of
the program.

python -m bench.practice_program PROGRAM RUN SETTINGS     RUN and SETTINGS are JSON
"""

import os
import signal
import sys
import threading
from typing import get_type_hints

import msgspec

from replayground.deploy.programs import PROGRAM_BY_NAME
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run


def main(name: str, run: str, settings: str) -> None:
    function = PROGRAM_BY_NAME[name].load()
    settings_class = get_type_hints(function)["settings"]
    # Imports are done. Their time is not measured: it does not grow with the run.
    print("ready", flush=True)
    sys.stdin.readline()
    # Nobody reads stdout after "ready": with a full pipe the program would block on its log lines.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    told = msgspec.json.decode(run, type=Run), msgspec.json.decode(settings, type=settings_class)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    function(*told, ProgramMetrics(), stop)


def _end_with_parent() -> None:
    # stdin is a pipe from the benchmark: it ends when that dies, however it dies.
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
