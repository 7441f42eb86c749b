"""One agent at work in a rollout: what it has read and said, its turns, and its calls of tools.

An agent's context only ever grows by ids: sampled ones, then those of what it reads next. Where its chat format cannot
extend it exactly, a new context begins, and the event that begins it says why.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from producers.agent import Agent
from producers.attempt import AttemptWriter
from producers.chat import Chat, Extension, Message, Tools
from producers.formats import FinalAnswer, Idle, Malformed, ParsedTurn, ToolCall, ToolFormat, format_named
from producers.policy import Policy, Turn, TurnRequest
from sandboxes.tools.schema import complaint
from sandboxes.tools.tool import Tool
from sandboxes.workbench import Observation, Workbench
from schemas.events import AgentMessaged, EndedBy, Sampling, Task, ToolCalled, ToolObserved, TurnGenerated
from schemas.packed import pack_logprobs, pack_tokens

type KeepBlob = Callable[[bytes], Awaitable[str]]
"Stores bytes that a tool produced, off the event loop, and returns their uri."


class AgentStopped(Exception):
    """An agent cannot continue. If it is the agent that holds the task, the rollout ends."""

    def __init__(self, ended_by: EndedBy, reason: str) -> None:
        super().__init__(reason)
        self.ended_by = ended_by
        self.reason = reason


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """A message from one agent to another."""

    kind: str
    sender: str
    caller: str
    "on whose behalf the sender speaks"
    content: str


@dataclass(slots=True)
class Rollout:
    """What all agents of one rollout share, and what they have come to together."""

    attempt: AttemptWriter
    chat: Chat
    bench: Workbench
    keep_blob: KeepBlob
    bench_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    "agents of a parallel step think at once, and use the one sandbox in turn"
    contexts: int = 0
    tokens_sampled: int = 0
    tokens_read: int = 0
    turns_sampled: int = 0


@dataclass(slots=True)
class Participant:
    """One agent in one rollout."""

    rollout: Rollout
    agent: Agent
    policy: Policy
    system_prompt: str
    tools: dict[str, Tool]
    "all it may call, its peer tools among them"
    peer_tools: dict[str, Tool]
    "calls that are not for the sandbox: to ask or to hand off to others"
    context: int = -1
    tokens: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    turns_sampled: int = 0
    call_id: str = ""
    is_busy: bool = False
    "it has asked another agent and waits for the answer"
    sampling: Sampling = field(init=False)
    _was_closed: bool = True
    _format: ToolFormat = field(init=False)
    _parameters: dict[str, dict[str, Any]] = field(init=False)
    _listed_tools: Tools = field(init=False)
    "tools for the chat template to list; none when a part of the prompt lists them already"

    def __post_init__(self) -> None:
        self.sampling = self.agent.sampling(self.rollout.attempt.request.sampling)
        self._format = format_named(self.agent.format)
        self._parameters = {name: tool.parameters for name, tool in self.tools.items()}
        self._listed_tools = () if self.agent.lists_tools else [tool.specification() for tool in self.tools.values()]

    @property
    def is_open(self) -> bool:
        return self.context >= 0

    def open(self, prompt: str) -> list[int]:
        """Begins its first context with this; returns the ids. Raises BadInput when the chat format cannot say it."""
        self.messages = [Message("system", self.system_prompt), Message("user", prompt)]
        self._begin_context(self.rollout.chat.open_context(self.messages, self._listed_tools))
        return self.tokens

    def receive(self, agent_message: AgentMessage, text: str, role: Literal["user", "tool"] = "user") -> None:
        """Reads what another agent tells it, as `text`. Raises AgentStopped when it has no room for that."""
        is_first = not self.is_open
        if is_first:
            extension = Extension(self.open(text), "an agent was spoken to for the first time")
            fits = len(self.tokens) < self.sampling.tokens_max
        else:
            extension, fits = self._read(Message(role, text))
        if role == "tool" and fits:
            self._remember(text)
        is_read = fits or is_first  # a first context is begun whether or not there is room for a turn
        meta = self.rollout.attempt.meta("message", agent_message.sender, self.agent.name, caller=agent_message.caller)
        self.rollout.attempt.emit(
            AgentMessaged(
                meta=meta,
                kind=agent_message.kind,
                content=agent_message.content,
                tokens=pack_tokens(extension.tokens) if is_read else b"",
                context=self.context,
                context_because=extension.restarts_because if is_read else None,
            )
        )
        if not fits:
            raise AgentStopped(
                "token_limit", f"a message to {self.agent.name} does not fit into {self.sampling.tokens_max} tokens"
            )

    async def run_until_reply(self) -> FinalAnswer | ToolCall:
        """Samples turns and calls tools until the agent answers or calls another agent.

        Raises AgentStopped, PolicyFailed, SandboxFailed."""
        while True:
            text, said = await self._turn()
            match said:
                case FinalAnswer():
                    return said
                case Idle() if self.agent.plain_answers:
                    return FinalAnswer(text.strip())
                case Idle():
                    raise AgentStopped("agent_error", "neither a call nor an answer")
                case Malformed(reason):
                    await self._observe("", _agent_error(f"error: {reason}{self._right_form()}"))
                case ToolCall() if said.tool in self.peer_tools:
                    wrong = complaint(said.tool, self.peer_tools[said.tool].parameters, said.arguments)
                    if wrong is None:
                        return said
                    await self._observe("", _agent_error(f"error: {wrong}"))
                case ToolCall():
                    await self._use_tool(said)

    async def _turn(self) -> tuple[str, ParsedTurn]:
        sampling, required = self.sampling, self.rollout.attempt.request.required_version
        room = sampling.tokens_max - len(self.tokens)
        if self.turns_sampled >= sampling.turns_max:
            raise AgentStopped("turn_limit", f"no answer in {sampling.turns_max} turns")
        if room <= 0:
            raise AgentStopped("token_limit", f"no answer in {sampling.tokens_max} tokens")
        text, turn = await self._sample_turn(min(room, sampling.max_tokens_per_turn))
        wrong = [span.version for span in turn.versions if span.version != required]
        if required is not None and wrong:
            raise AgentStopped("infra_error", f"sampled by version {wrong[0]} where {required} was asked for")
        return text, self._format.parse(text, self._parameters)

    async def _sample_turn(self, tokens_max: int) -> tuple[str, Turn]:
        rollout, sampling = self.rollout, self.sampling
        request = rollout.attempt.request
        began = time.monotonic()
        turn = await self.policy.next_turn(
            TurnRequest(
                task=self._own_task(request.task),
                seed=request.seed,
                tokens=self.tokens,
                turns=self.turns,
                sampling=sampling,
                tokens_max=tokens_max,
                required_version=request.required_version,
                messages=self.messages,
            )
        )
        text = rollout.chat.decode(turn.tokens)
        self.tokens = self.tokens + turn.tokens  # a new list: whoever was handed the old one may keep it
        self.messages = [*self.messages, Message("assistant", text)]
        self._was_closed = bool(turn.tokens) and turn.tokens[-1] == rollout.chat.end
        self.turns_sampled += 1
        rollout.turns_sampled += 1
        rollout.tokens_sampled += len(turn.tokens)
        self.call_id = f"call-{rollout.turns_sampled}"  # one call a turn, so the turn names it
        version = turn.versions[-1].version if turn.versions else None
        rollout.attempt.emit(
            TurnGenerated(
                meta=rollout.attempt.meta("turn", self.agent.name, "environment", version),
                agent=self.agent.name,
                text=text,
                tokens=pack_tokens(turn.tokens),
                logprobs=pack_logprobs(turn.logprobs),
                versions=turn.versions,
                sampling=sampling,
                finish_reason=turn.finish_reason,
                milliseconds=(time.monotonic() - began) * 1000,
                context=self.context,
            )
        )
        return text, turn

    async def _use_tool(self, call: ToolCall) -> None:
        attempt, name = self.rollout.attempt, self.agent.name
        attempt.emit(
            ToolCalled(
                meta=attempt.meta("tool_call", name, call.tool),
                call_id=self.call_id,
                agent=name,
                tool=call.tool,
                arguments=call.text,
            )
        )
        if call.tool in self.rollout.bench.tools and call.tool not in self.tools:
            refusal = f"error: there is no tool {call.tool!r}; the tools are {', '.join(self.tools)}"
            await self._observe(call.tool, _agent_error(refusal))
            return
        async with self.rollout.bench_lock:
            observation = await self.rollout.bench.call(call.tool, call.arguments)
        await self._observe(call.tool, observation)

    async def _observe(self, tool: str, observation: Observation) -> None:
        """Shows the agent what came back. What would not fit into its tokens is recorded, and not read."""
        rollout = self.rollout
        blobs = [await rollout.keep_blob(blob.data) for blob in observation.blobs]
        extension, fits = self._read(Message("tool", observation.content))
        rollout.attempt.emit(
            ToolObserved(
                meta=rollout.attempt.meta("observation", tool or "environment", self.agent.name),
                call_id=self.call_id,
                tool=tool,
                content=observation.content,
                is_error=observation.is_error,
                error_kind=observation.error_kind,
                milliseconds=observation.milliseconds,
                blobs=blobs,
                perturbation=msgspec.json.encode(observation.perturbation).decode()
                if observation.perturbation
                else None,
                tokens=pack_tokens(extension.tokens) if fits else b"",
                context=self.context,
                context_because=extension.restarts_because if fits else None,
            )
        )
        if not fits:
            raise AgentStopped("token_limit", f"the observation does not fit into {self.sampling.tokens_max} tokens")
        self._remember(observation.content)

    def _read(self, message: Message) -> tuple[Extension, bool]:
        """Extends the context by a message, or begins a new one. What does not fit changes nothing."""
        messages = [*self.messages, message]
        extension = self.rollout.chat.extend_context(messages, self._was_closed, self._listed_tools)
        kept = 0 if extension.restarts_because else len(self.tokens)
        if kept + len(extension.tokens) >= self.sampling.tokens_max:
            return extension, False
        self.messages = messages
        if extension.restarts_because:
            self._begin_context(extension.tokens)
        else:
            self.tokens = self.tokens + extension.tokens
            self.rollout.tokens_read += len(extension.tokens)
        return extension, True

    def _begin_context(self, tokens: list[int]) -> None:
        self.context, self.rollout.contexts = self.rollout.contexts, self.rollout.contexts + 1
        self.tokens = tokens
        self.rollout.tokens_read += len(tokens)

    def _remember(self, observed: str) -> None:
        self.turns.append((self.messages[-2].content, observed))

    def _own_task(self, task: Task) -> Task:
        """The task as this agent knows it: a scripted teacher sees who speaks, and what he was told."""
        asked = self.messages[1].content
        if task.agent == self.agent.name and task.prompt == asked:
            return task
        return msgspec.structs.replace(task, agent=self.agent.name, prompt=asked)

    def _right_form(self) -> str:
        return f"; a call is written {self._format.right_form}" if self.agent.shows_right_form else ""


def _agent_error(content: str) -> Observation:
    """An error of the agent that reached no tool."""
    return Observation(content, True, "agent", None, 0.0)
