"""What the agent itself said and called. Pure.

A transcript also has what tools and other people said; an agent may make a tool return any text, such as the right
answer. Built-in scorers therefore read a transcript only through this file.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import get_args

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.formats import FormatName, ToolCall, format_named

_AGENT = "assistant"
_TOOL = "tool"


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One tool call of the agent."""

    tool: str
    arguments: str
    "JSON; the whole turn when the call in it cannot be parsed"
    has_succeeded: bool
    "False when the tool returned an error, or nothing"


def turns_of(trajectory: TrajectoryAssembled) -> list[str]:
    """What the agent said, turn by turn."""
    return [said.content for said in trajectory.transcript if said.role == _AGENT]


def calls_of(trajectory: TrajectoryAssembled) -> list[AgentCall]:
    """The agent's calls in order. Of what came back, only counts whether it was an error."""
    calls: list[AgentCall] = []
    # Places in `calls` whose results have not come yet, by tool: agents that work in parallel wait at the same time.
    waiting: defaultdict[str, deque[int]] = defaultdict(deque)
    turn = ""
    for said in trajectory.transcript:
        if said.role == _AGENT:
            turn = said.content
            parsed = _parsed(turn)
            if parsed is not None:
                waiting[parsed.tool].append(len(calls))
                calls.append(AgentCall(parsed.tool, parsed.text, has_succeeded=False))
        # Without a name it is the answer to a turn that could not be read, in which nothing was called.
        elif said.role == _TOOL and said.name:
            call = AgentCall(said.name, turn, has_succeeded=not said.is_error)
            if waiting[said.name]:
                place = waiting[said.name].popleft()
                calls[place] = AgentCall(said.name, calls[place].arguments, call.has_succeeded)
            else:
                calls.append(call)
    return calls


def _parsed(turn: str) -> ToolCall | None:
    """The call in a turn. The transcript does not say which format the agent uses, so each is tried."""
    for name in get_args(FormatName):
        parsed = format_named(name).parse(turn, {})
        if isinstance(parsed, ToolCall):
            return parsed
    return None
