"""What happens when a step is refused: an alarm on the log, which pauses the run, and a wait until somebody resumes it.

The batch stays where it is: its offset is not committed, and no version is published. A restart meanwhile takes the step
again, and refuses it again.
"""

from collections.abc import Callable

from replayground.schemas.events import ControlIssued, Meta
from replayground.schemas.ids import new_id
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log

_TOPIC = "control"
_EVENTS_MAX = 1000
_POLL_SECONDS = 0.2


def pause_until_resumed(
    log: Log, run: Run, version: int, reason: str, now: int, check_stop: Callable[[], None]
) -> None:
    """Pauses the run with this reason; returns when it was resumed. Raises LogUnavailable, and what check_stop raises."""
    # Before the alarm: a resume that answers it comes after these positions.
    reader = log.reader([_TOPIC], start=log.end_positions([_TOPIC]), run_id=run.run_id)
    try:
        log.append(_alarm(run, version, reason, now))
        log.flush()
        while True:
            check_stop()
            for delivery in reader.poll(_EVENTS_MAX, _POLL_SECONDS):
                event = delivery.event
                if isinstance(event, ControlIssued) and event.meta.run_id == run.run_id and event.command == "resume":
                    return
    finally:
        reader.close()


def _alarm(run: Run, version: int, reason: str, now: int) -> ControlIssued:
    """The scheduler asks for no more rollouts from then on."""
    meta = Meta(
        id=new_id(),
        run_id=run.run_id,
        category="control",
        topic=_TOPIC,
        sender=run.worker,
        receiver="all",
        timestamp=now,
    )
    return ControlIssued(meta=meta, command="pause", version=version, requested_by="trainer", reason=reason)
