"""Holds: weight versions that must stay available. A fold over the ControlIssued events of one run. Pure."""

from msgspec import Struct

from replayground.schemas.events import ControlIssued, Event


class Hold(Struct, frozen=True):
    """A session's claim that a version stays served."""

    version: int
    session_id: str | None


def held_after(holds: tuple[Hold, ...], event: Event) -> tuple[Hold, ...]:
    """The holds after an event, oldest first. Events other than hold and release change nothing."""
    match event:
        case ControlIssued(command="hold", version=int(version)):
            hold = Hold(version, event.meta.session_id)
            # A repeat must not count twice: one release ends it.
            return holds if hold in holds else (*holds, hold)
        case ControlIssued(command="release", version=int(version)):
            return _released(holds, Hold(version, event.meta.session_id))
    return holds


def _released(holds: tuple[Hold, ...], released: Hold) -> tuple[Hold, ...]:
    """Removes the hold of the same session. A release by anybody else, such as an operator, removes all holds of the
    version."""
    if released in holds:
        return tuple(hold for hold in holds if hold != released)
    return tuple(hold for hold in holds if hold.version != released.version)
