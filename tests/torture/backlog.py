"""Programs that start far behind: how much memory they take while they catch up with a log of large events (P8).

python -m tests.torture.backlog streams|reader|traces <run as JSON> <folder>     one program, as a process of its own
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from replayground.consumers import events_to_clickhouse
from replayground.consumers.config import TracesSettings
from replayground.deploy.local.ports import choose_ports
from replayground.deploy.local.stack import local_log
from replayground.schemas.events import Event, TurnGenerated
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import JobSettings, Run
from replayground.schemas.topics import TOPICS
from replayground.streams import app
from replayground.streams.config import StreamsSettings
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log
from tests.flow.synthetic import groups
from tests.torture.stopping import await_that, memory_bytes_peak

MEBIBYTE = 1024 * 1024
TEXT_BYTES = 100_000
RUN_ID = "backlog"
GROUP_SIZE = 4
_PROJECT = Path(__file__).parent.parent.parent
_ALL = [topic.name for topic in TOPICS]


@dataclass(frozen=True)
class CaughtUp:
    """What came of one program."""

    events: int
    "that it had to read"
    seconds: float
    memory_bytes_peak: int
    memory_bytes_max: int
    "what its settings allow"

    @property
    def holds(self) -> bool:
        return self.memory_bytes_peak <= self.memory_bytes_max


def catch_up(folder: Path, group_count: int) -> dict[str, CaughtUp]:
    """Each program in turn, on a broker of its own that holds two large turns and four small messages a rollout."""
    caught_up: dict[str, CaughtUp] = {}
    with local_log(folder) as addresses:
        run = Run(
            run_id=RUN_ID,
            seed=0,
            job=JobSettings(),
            log=addresses.log,
            blobs_url=addresses.blobs_url,
        )
        log = open_log(run)
        try:
            for event in _backlog(group_count):
                log.append(event)
            log.flush()
            for program, (is_done, memory_bytes_max) in _PARTS.items():
                caught_up[program] = _caught_up(program, run, folder, log, is_done, memory_bytes_max)
        finally:
            log.close()
    return caught_up


def _backlog(group_count: int) -> Iterator[Event]:
    text = "many words " * (TEXT_BYTES // 11)
    for rollout in groups(group_count, GROUP_SIZE, run_id=RUN_ID):
        for event in rollout:
            yield msgspec.structs.replace(event, text=text) if isinstance(event, TurnGenerated) else event


def _caught_up(
    program: str, run: Run, folder: Path, log: Log, is_done: Callable[[Log], bool], memory_bytes_max: int
) -> CaughtUp:
    began = time.monotonic()
    with _started(program, run, folder) as process:
        await_that(lambda: is_done(log) or process.poll() is not None, f"{program} catches up")
        assert process.poll() is None, f"{program} has ended"
        seconds = time.monotonic() - began
        peak = memory_bytes_peak(process.pid)
    return CaughtUp(sum(log.count(_ALL).values()), seconds, peak, memory_bytes_max)


@contextmanager
def _started(program: str, run: Run, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    arguments = [program, msgspec.json.encode(run).decode(), str(folder)]
    process = subprocess.Popen([sys.executable, "-m", "tests.torture.backlog", *arguments], cwd=_PROJECT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _has_read(group: str) -> Callable[[Log], bool]:
    def is_done(log: Log) -> bool:
        lags = log.group_lags(group, _ALL).values()
        return all(group_lags.lag == 0 for group_lags in lags) and any(group_lags.committed for group_lags in lags)

    return is_done


def _has_streamed(log: Log) -> bool:
    lags = log.group_lags(f"streams-{RUN_ID}", ["messages", "trajectories", "rewards"])
    return all(group_lags.lag == 0 and group_lags.committed for group_lags in lags.values())


_PARTS: dict[str, tuple[Callable[[Log], bool], int]] = {
    # imports; fetched ahead, and a fetch of 256 KiB of each partition of two topics, compressed ten to a hundred times;
    # a poll as bytes and as events
    "reader": (_has_read(f"reader-{RUN_ID}"), 128 * MEBIBYTE + 2 * (32 + 100) * MEBIBYTE + 4 * 16 * MEBIBYTE),
    # imports; a fetch as the reader's; a thousand messages of each partition in a queue of a stream, with text in two topics;
    # facts that wait for the broker; two tables, each with a cache and two buffers of writes a partition
    "streams": (_has_streamed, (192 + 2 * 100 + 64 + 2 * 4 * (32 + 2 * 8)) * MEBIBYTE + 4096 * TEXT_BYTES),
    # ClickHouse with its merges of large rows, and what the reader takes; a batch as rows, as JSON lines and inside ClickHouse
    "traces": (_has_read("traces"), 1536 * MEBIBYTE + 2 * (32 + 100) * MEBIBYTE + 12 * 16 * MEBIBYTE),
}
"by program: when it has caught up, and how much memory it may take, with a wide margin"


def main(program: str, run: Run, folder: Path) -> None:
    stop, program_metrics = threading.Event(), ProgramMetrics()
    if program == "streams":
        app.run(run, StreamsSettings(state_folder=str(folder / "state")), program_metrics, stop)
    elif program == "traces":
        port = choose_ports({"traces": 0})["traces"]
        events_to_clickhouse.run(run, TracesSettings(dsn=f"chdb://{folder}/traces", port=port), program_metrics, stop)
    else:
        read(run)


def read(run: Run) -> None:
    """Reads as the planners do, and commits."""
    log = open_log(run)
    reader = log.reader(_ALL, group=f"reader-{run.run_id}")
    while True:
        if reader.poll(5000, 0.5):
            reader.commit()


if __name__ == "__main__":
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Run), Path(sys.argv[3]))
