"""One rollout worker in a process of its own, to be killed: python -m tests.producers.worker_program RUN_JSON SETTINGS_JSON"""

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


def main(run: Run, settings: RolloutsSettings) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    log = open_log(run)
    try:
        rollouts.work(run, settings, ProgramMetrics(), stop, log, Blobs(run.blobs_url), ScriptedBackend({}))
    finally:
        log.close()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Run), msgspec.json.decode(sys.argv[2], type=RolloutsSettings))
