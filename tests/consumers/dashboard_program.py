"""The parts of the traces program over a log in memory with two runs and a replay on it, until standard input is closed.

A process of its own, as in life, so that the page is measured without the tests beside it.
    python -m tests.consumers.dashboard_program <folder> <port> [alerts]

With `alerts` two are set, as the pictures of the documentation show.
"""

import sys
import threading

from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import TracesSettings
from replayground.consumers.dashboard.web import LogSource, WebServer
from replayground.consumers.events_to_clickhouse import TraceWriter
from replayground.consumers.lag_watch import LagWatch
from replayground.consumers.operations_log import OperationsWriter
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Event, Meta, Position, QuerySaved
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import FIELD
from replayground.schemas.topics import TOPICS
from replayground.streams.log.memory import MemoryLog
from tests.consumers.believable import believable
from tests.consumers.long_attempt import long_attempt
from tests.consumers.operations import operations, replay_started, replayed
from tests.consumers.synthetic_run import FIELD_RUN, SyntheticRun, run_of

OLDER = run_of(steps=5, demonstrations=4, run_id="run-0")
RUN = run_of(steps=12, demonstrations=10)


def played(run: SyntheticRun, log: MemoryLog) -> list[Event]:
    """Puts the run on the log; returns its events."""
    events = [believable(event) for event in run.events(log.end_positions([topic.name for topic in TOPICS]))]
    for event in events:
        log.append(event)
    return events


def alerts() -> list[QuerySaved]:
    """One that is raised, and one whose question gives no number."""
    questions = {
        "rejects": "SELECT count() FROM rejects",
        "no-verdicts-today": "SELECT min(score) FROM verdicts WHERE time > now() - INTERVAL 1 DAY HAVING count() > 0",
    }
    return [
        QuerySaved(
            meta=Meta(
                id=new_id(),
                run_id=FIELD,
                category="query",
                topic="operations",
                sender="ann",
                timestamp=now_microseconds(),
            ),
            name=name,
            use="alert",
            sql=sql,
            saved_by="ann",
            every_seconds=10.0,
        )
        for name, sql in questions.items()
    ]


def main() -> None:
    folder, port = sys.argv[1], int(sys.argv[2])
    blobs = Blobs(f"file://{folder}/blobs")
    log = MemoryLog(Codec(MemoryRegistry(), blobs))
    # The replay first: the newest run is the one that is shown when none is named.
    log.append(
        replay_started(RUN.run_id, [Position(topic="trajectories", partition=p, offset=10**6) for p in range(4)])
    )
    played(SyntheticRun(OLDER, evaluation_tasks=4, ended="stopped"), log)
    for event in replayed(played(SyntheticRun(RUN, evaluation_tasks=20, asks_people=True), log)):
        log.append(event)
    for event in [*operations(), *(alerts() if "alerts" in sys.argv[3:] else ())]:
        log.append(event)
    for event in long_attempt(RUN.run_id, blobs):
        log.append(event)
    settings = TracesSettings(dsn=f"chdb://{folder}/store", port=port, flush_seconds=0.1)
    store = Store(settings.dsn, settings.database, threads=1)
    writer, lag, stop = (
        TraceWriter(log, store, FIELD_RUN, settings, ProgramMetrics()),
        LagWatch(log, ProgramMetrics()),
        threading.Event(),
    )
    web = WebServer(store, settings, LogSource(log, lag, writer, OperationsWriter(log)))
    writing = threading.Thread(target=writer.write_until, args=(stop,))
    writing.start()
    web.start()
    sys.stdin.read()
    web.stop()
    stop.set()
    writing.join()
    store.close()


if __name__ == "__main__":
    main()
