"""What the agent itself said and called. Pure.

A transcript also has what tools and other people said; an agent may make a tool return any text, such as the right
answer. Built-in scorers therefore read a transcript only through this file.
"""

from dataclasses import dataclass
from typing import get_args

import msgspec

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.formats import FormatName, ToolCall, format_named

_AGENT = "assistant"
_TOOL = "tool"


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One tool call of the agent."""

    tool: str
    readings: tuple[str, ...]
    """its arguments, as JSON without spaces between its parts; several when the turn holds a call of this tool in several
    formats, of which the transcript does not say which one was made; the whole turn when no call can be parsed"""
    has_succeeded: bool
    "False when the tool returned an error, or nothing"

    @property
    def arguments(self) -> str:
        return self.readings[0]


@dataclass(slots=True)
class _Waiting:
    """A call that was written, and may not have been made."""

    agent: str | None
    place: int
    "among the calls"
    readings: dict[str, tuple[str, ...]]
    "by tool"


def turns_of(trajectory: TrajectoryAssembled) -> list[str]:
    """What the agent said, turn by turn."""
    return [said.content for said in trajectory.transcript if said.role == _AGENT]


def calls_of(trajectory: TrajectoryAssembled) -> list[AgentCall]:
    """The agent's calls in order. Of what came back, only counts whether it was an error."""
    calls: list[AgentCall] = []
    # Those whose results have not come yet: agents that work in parallel wait at the same time.
    waiting: list[_Waiting] = []
    turn = ""
    for said in trajectory.transcript:
        if said.role == _AGENT:
            turn = said.content
            # An agent speaks again when it has its result: a call without one was not made, and no later result is its.
            waiting = [call for call in waiting if call.agent != said.name]
            if readings := _readings(turn):
                tool = next(iter(readings))
                waiting.append(_Waiting(said.name, len(calls), readings))
                calls.append(AgentCall(tool, readings[tool], has_succeeded=False))
        # Without a name it is the answer to a turn that could not be read, in which nothing was called.
        elif said.role == _TOOL and said.name:
            made = next((call for call in waiting if said.name in call.readings), None)
            if made is None:
                calls.append(AgentCall(said.name, (turn,), has_succeeded=not said.is_error))
            else:
                waiting.remove(made)
                calls[made.place] = AgentCall(said.name, made.readings[said.name], has_succeeded=not said.is_error)
    return calls


def _readings(turn: str) -> dict[str, tuple[str, ...]]:
    """The arguments of the calls in a turn, by tool. The transcript does not say which format the agent uses, so each is
    tried: a turn may have a call in more than one."""
    found: dict[str, dict[str, None]] = {}
    for name in get_args(FormatName):
        parsed = format_named(name).parse(turn, {})
        if isinstance(parsed, ToolCall):
            found.setdefault(parsed.tool, {})[_written(parsed)] = None
    return {tool: tuple(arguments) for tool, arguments in found.items()}


def _written(call: ToolCall) -> str:
    """The arguments that the tool got: of a key that is there twice the last, and no letter hidden by an escape."""
    try:
        return msgspec.json.encode(call.arguments).decode()
    except (msgspec.EncodeError, RecursionError, UnicodeError):
        return call.text
