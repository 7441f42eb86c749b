"""A producer whose broker is stopped: it takes what its queue holds, then it waits; nothing is lost, doubled or out of order.

python -m tests.torture.broker_away <run as JSON> <events>     the producer, as a process of its own
"""

import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import psutil

from replayground.schemas.events import Address
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log
from tests.flow.synthetic import observations
from tests.torture.oracle import events_of
from tests.torture.stopping import memory_bytes_peak, stopped

EVENT_BYTES = 100_000
RUN_ID = "producer"
_PROJECT = Path(__file__).parent.parent.parent
_TELL_SECONDS = 0.1
_LOOKS_WHEN_FULL = 20


@dataclass(frozen=True)
class Produced:
    """What came of it."""

    wanted: int
    waiting_max: int
    "events that the producer held, at most, while the broker was stopped"
    memory_bytes_peak: int
    found: int
    "events on the log"
    once_and_in_order: bool

    @property
    def holds(self) -> bool:
        return self.once_and_in_order and self.found == self.wanted and self.waiting_max < self.wanted


def produce_without_broker(run: Run, broker_pid: int, events: int) -> Produced:
    """Stops the broker under a producer until it holds no more, lets it go on, and counts what is on the log."""
    run = msgspec.structs.replace(run, run_id=RUN_ID)
    command = [sys.executable, "-m", "tests.torture.broker_away", msgspec.json.encode(run).decode(), str(events)]
    process = subprocess.Popen(
        command, cwd=_PROJECT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin:
        assert process.stdout.readline() == "ready\n"
        with stopped([psutil.Process(broker_pid)]):
            process.stdin.write("go\n")
            waiting_max = _waiting_when_full(process.stdout)
            memory = memory_bytes_peak(process.pid)
        process.stdout.read()
        assert process.wait() == 0
    log = open_log(run)
    try:
        found, in_order = _found(log)
    finally:
        log.close()
    return Produced(events, waiting_max, memory, found, in_order)


def _waiting_when_full(told: IO[str]) -> int:
    """Reads how many events wait until that has not changed for a good while."""
    waiting = looks = 0
    while looks < _LOOKS_WHEN_FULL:
        before, waiting = waiting, int(told.readline())
        looks = looks + 1 if waiting and waiting == before else 0
    return waiting


def _found(log: Log) -> tuple[int, bool]:
    """How many events are on the log, and whether each key has each of its numbers once and in order."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for event in events_of(log, RUN_ID, "messages"):
        numbers[event.meta.trajectory_id or ""].append(event.meta.seq or 0)
    in_order = all(found == list(range(len(found))) for found in numbers.values())
    return sum(map(len, numbers.values())), in_order


def main(run: Run, events: int) -> None:
    """Writes when told to, and tells all the time how many events wait for the broker."""
    log = open_log(run)
    log.codec.register_all()
    log.group_lags("nobody", ["messages"])  # connected
    print("ready", flush=True)
    sys.stdin.readline()
    appended = acknowledged = 0
    done = threading.Event()

    def note(address: Address) -> None:
        nonlocal acknowledged
        acknowledged += 1

    def tell() -> None:
        while not done.wait(_TELL_SECONDS):
            print(appended - acknowledged, flush=True)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        for event in observations(events, EVENT_BYTES, run.run_id):
            log.append(event, note)
            appended += 1
        log.flush(120.0)
    finally:
        done.set()
        teller.join()
        log.close()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Run), int(sys.argv[2]))
