"""Why a program was fenced: by another instance of the same start of its run, or by a newer start of the run.

In the first case a supervisor may restart the program. In the second it must not: the two starts would fence each other
without end.
"""

from replayground.schemas.errors import Fenced, LogUnavailable, TakenOver
from replayground.schemas.events import RunResumed
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log

_EVENTS_MAX = 1000


def fencing_error(log: Log, run: Run, fenced: Fenced) -> Fenced:
    """The error to raise instead of `fenced`: TakenOver when topic runs has a newer start than this program's."""
    try:
        newest = newest_start(log, run)
    except LogUnavailable:
        # Unknown for now. Fenced leads to a restart, and the restarted program finds out if it is fenced again.
        return fenced
    if newest <= run.start_number:
        return fenced
    return TakenOver(f"start {run.start_number} of run {run.run_id} was taken over by start {newest}")


def newest_start(log: Log, run: Run) -> int:
    """The highest number of a RunResumed of this run; 0 when it was never resumed. Raises LogUnavailable."""
    # From where the run started: nothing before belongs to it.
    reader = log.reader(["runs"], start=run.start, run_id=run.run_id)
    newest = 0
    try:
        while not reader.caught_up():
            for delivery in reader.poll(_EVENTS_MAX, 0.2):
                event = delivery.event
                if isinstance(event, RunResumed) and event.meta.run_id == run.run_id:
                    newest = max(newest, event.start)
    finally:
        reader.close()
    return newest
