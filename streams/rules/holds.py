"""Which weight versions somebody needs to stay: a fold over ControlIssued hold and release of one run. Pure."""

from msgspec import Struct

from schemas.events import ControlIssued, Event


class Hold(Struct, frozen=True):
    """Somebody needs this version to stay."""

    version: int
    session_id: str | None


def held_after(holds: tuple[Hold, ...], event: Event) -> tuple[Hold, ...]:
    """The holds after an event, in the order in which they were asked for; other events change nothing."""
    match event:
        case ControlIssued(command="hold", version=int(version)):
            hold = Hold(version, event.meta.session_id)
            return holds if hold in holds else (*holds, hold)
        case ControlIssued(command="release", version=int(version)):
            return _released(holds, Hold(version, event.meta.session_id))
    return holds


def _released(holds: tuple[Hold, ...], released: Hold) -> tuple[Hold, ...]:
    """Takes away the hold of the same session; a release by somebody else frees the version for all."""
    if released in holds:
        return tuple(hold for hold in holds if hold != released)
    return tuple(hold for hold in holds if hold.version != released.version)
