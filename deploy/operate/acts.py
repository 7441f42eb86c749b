"""What people do by command that no other event tells: written down as OperatorActed."""

from replayground.deploy.runs import user_name
from replayground.schemas.events import Meta, OperatorActed
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.run import FIELD
from replayground.streams.log.protocol import Log


def note(log: Log, action: str, detail: str) -> None:
    """Writes down who did what, and waits until it is on the log. Raises LogUnavailable."""
    person = user_name()
    meta = Meta(
        id=new_id(), run_id=FIELD, category="act", topic="operations", sender=person, timestamp=now_microseconds()
    )
    log.append(OperatorActed(meta=meta, action=action, detail=detail, person=person))
    log.flush()
