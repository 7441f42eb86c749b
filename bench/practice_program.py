"""One program of a run as a process: imports first, and starts when it reads a line. Imports nothing else, so that its memory
is the program's.

python -m bench.practice_program PROGRAM RUN SETTINGS     RUN and SETTINGS are JSON
"""

import os
import sys
import threading
from typing import get_type_hints

import msgspec

from deploy.programs import PROGRAM_BY_NAME
from schemas.metrics import ProgramMetrics
from schemas.run import Run


def main(name: str, run: str, settings: str) -> None:
    function = PROGRAM_BY_NAME[name].load()
    settings_class = get_type_hints(function)["settings"]
    print("ready", flush=True)
    sys.stdin.readline()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads the log lines of its work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    told = msgspec.json.decode(run, type=Run), msgspec.json.decode(settings, type=settings_class)
    function(*told, ProgramMetrics(), threading.Event())


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
