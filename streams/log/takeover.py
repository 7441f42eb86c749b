"""Why a program was fenced: by another instance of the same start of its run, or by a newer start of the run.

In the first case a supervisor may start the program again. In the second it must not: the two starts would take the
transactional id from each other endlessly.
"""

from schemas.errors import Fenced, LogUnavailable, TakenOver
from schemas.events import RunResumed
from schemas.run import Run
from streams.log.protocol import Log

_EVENTS_MAX = 1000


def fencing_error(log: Log, run: Run, fenced: Fenced) -> Fenced:
    """What to raise instead of `fenced`: TakenOver when topic runs tells of a newer start than this program's."""
    try:
        newest = newest_start(log, run)
    except LogUnavailable:
        return fenced  # the reason is unknown while the log is unavailable; a restarted program is fenced again or finds out then
    if newest <= run.start_number:
        return fenced
    return TakenOver(f"start {run.start_number} of run {run.run_id} was taken over by start {newest}")


def newest_start(log: Log, run: Run) -> int:
    """The highest number of a RunResumed of this run; 0 when it was never resumed. Raises LogUnavailable."""
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
