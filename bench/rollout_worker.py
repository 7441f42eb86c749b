"""A rollout worker as a process, for bench/rollouts.py: python -m bench.rollout_worker RUN SETTINGS BACKEND"""

import signal
import sys
import threading

import msgspec

from replayground.producers import rollouts
from replayground.producers.config import RolloutsSettings
from replayground.sandboxes.backends.scripted import ScriptedBackend
from replayground.schemas.blobs import Blobs
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log

_ANSWERS = {"sql": "7", "kv": "7", "python": "45", "set_up_world": ""}
"what the tools of Stockroom return in a scripted sandbox"


def main(run: Run, settings: RolloutsSettings, backend: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    # answer=answer binds the value of this iteration; a plain closure would give every tool the last one.
    scripts = {tool: (lambda arguments, answer=answer: answer) for tool, answer in _ANSWERS.items()}
    scripted = ScriptedBackend(scripts) if backend == "scripted" else None
    log = open_log(run)
    try:
        rollouts.work(run, settings, ProgramMetrics(), stop, log, Blobs(run.blobs_url), scripted)
    finally:
        log.close()


if __name__ == "__main__":
    main(
        msgspec.json.decode(sys.argv[1], type=Run), msgspec.json.decode(sys.argv[2], type=RolloutsSettings), sys.argv[3]
    )
