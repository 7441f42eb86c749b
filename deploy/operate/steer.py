"""`replayground steer`: pause, resume, drain or cancel as a ControlIssued event for the programs of a run."""

from typing import Literal, get_args

from replayground.deploy.runs import user_name
from replayground.schemas.errors import BadInput
from replayground.schemas.events import ControlIssued, Meta
from replayground.schemas.ids import new_id

type Steering = Literal["pause", "resume", "drain", "cancel"]
STEERINGS: tuple[str, ...] = get_args(Steering.__value__)


def control_event(
    run_id: str, command: str, task: str | None, session: str | None, every: bool, reason: str, now: int
) -> ControlIssued:
    """The event of a command. Raises BadInput for an unknown command or options that do not fit it."""
    if command not in STEERINGS:
        raise BadInput(f"there is no command {command!r}: use one of {', '.join(STEERINGS)}")
    # Exactly one, so that a mistyped option cannot cancel more than was meant.
    named = [name for name in (task, session, every or None) if name is not None]
    if command == "cancel" and len(named) != 1:
        raise BadInput("name what to cancel: --task ID, --session NAME, or --all for everything requested so far")
    if command != "cancel" and named:
        raise BadInput(f"{command} applies to the whole run: leave out --task, --session and --all")
    return ControlIssued(
        meta=Meta(
            id=new_id(),
            run_id=run_id,
            session_id=session,
            task_id=task,
            category="control",
            topic="control",
            sender="operator",
            timestamp=now,
        ),
        command=command,  # type: ignore[arg-type]  # one of STEERINGS
        version=None,
        requested_by=user_name(),
        reason=reason,
    )
