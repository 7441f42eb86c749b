"""What the programs of a replay do while the log is unavailable: they wait, and begin again from what is on the log."""

import threading
from collections.abc import Callable

import structlog

from replayground.schemas.errors import LogUnavailable

logger = structlog.get_logger()

_RETRY_SECONDS = 1.0


def while_log_is_away[Result](
    work: Callable[[], Result | None], stop: threading.Event, **told: object
) -> Result | None:
    """Does the work until it ends without LogUnavailable; None when `stop` was set. `told` is part of the warning."""
    while not stop.is_set():
        try:
            return work()
        # The outcome of a transaction may be unknown: the newest snapshot on the log says how far it came.
        except LogUnavailable as error:
            logger.warning("log_unavailable", reason=str(error), **told)
            stop.wait(_RETRY_SECONDS)
    return None
