"""An operator's word to all programs of a run: pause, resume, drain, or cancel."""

from typing import Literal, get_args

from schemas.errors import BadInput
from schemas.events import ControlIssued, Meta
from schemas.ids import new_id

type Steering = Literal["pause", "resume", "drain", "cancel"]
STEERINGS: tuple[str, ...] = get_args(Steering.__value__)


def control_event(
    run_id: str, command: str, task: str | None, session: str | None, every: bool, reason: str, now: int
) -> ControlIssued:
    """The command as a fact. Raises BadInput for a command that does not exist or a cancellation of nothing."""
    if command not in STEERINGS:
        raise BadInput(f"there is no command {command!r}: say one of {', '.join(STEERINGS)}")
    named = [name for name in (task, session, every or None) if name is not None]
    if command == "cancel" and len(named) != 1:
        raise BadInput(
            "say what is to be cancelled: --task ID, --session NAME, or --all for everything asked for so far"
        )
    if command != "cancel" and named:
        raise BadInput(f"{command} is about the whole run: leave out --task, --session and --all")
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
        requested_by="operator",
        reason=reason,
    )
