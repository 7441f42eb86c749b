"""One agent in a rollout: its context, its turns and its tool calls.

A context grows by token ids only: those sampled, then those of the next message. Where the chat format cannot extend it
exactly, a new context begins, and the event that begins it says why (decision 0010).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import structlog

from replayground.producers.agent import Agent
from replayground.producers.attempt import AttemptWriter
from replayground.producers.chat import Chat, Extension, Message, Tools
from replayground.producers.policy import Policy, Turn, TurnRequest
from replayground.sandboxes.protocol import SandboxFailed
from replayground.sandboxes.tools.schema import complaint
from replayground.sandboxes.tools.tool import Tool
from replayground.sandboxes.workbench import Observation, Workbench
from replayground.schemas.errors import LogUnavailable
from replayground.schemas.events import AgentMessaged, EndedBy, Sampling, Task, ToolCalled, ToolObserved, TurnGenerated
from replayground.schemas.formats import FinalAnswer, Idle, Malformed, ParsedTurn, ToolCall, ToolFormat, format_named
from replayground.schemas.packed import pack_logprobs, pack_tokens
from replayground.schemas.redaction import redacted

logger = structlog.get_logger()

type KeepBlob = Callable[[bytes], Awaitable[str]]
"Stores bytes that a tool produced and returns their uri. Must not block the event loop."


class AgentStopped(Exception):
    """An agent cannot continue. Ends the rollout, unless a leader asked the agent (producers/ensemble.py)."""

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
    "on whose behalf the sender writes"
    content: str


@dataclass(slots=True)
class Rollout:
    """What all agents of one rollout share, and the totals over all of them."""

    attempt: AttemptWriter
    chat: Chat
    bench: Workbench
    keep_blob: KeepBlob
    bench_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    "agents of a parallel step sample at the same time, but use the shared sandbox one after another"
    contexts: int = 0
    "number of contexts so far, of all agents; the next one gets this number"
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
    "all tools it may call, peer tools included"
    peer_tools: dict[str, Tool]
    "those of its tools that go to another agent instead of the sandbox"
    session: str = ""
    "of the sandbox: its own where several agents share one, so that none forges what another reads"
    context: int = -1
    "number of its current context in the rollout; -1 = not open yet"
    tokens: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    "(turn, observation) so far as text, for scripted teachers"
    turns_sampled: int = 0
    call_id: str = ""
    is_busy: bool = False
    "it asked another agent and waits for the reply"
    sampling: Sampling = field(init=False)
    _was_closed: bool = True
    "whether its last turn ended with the end token"
    _format: ToolFormat = field(init=False)
    _parameters: dict[str, dict[str, Any]] = field(init=False)
    _listed_tools: Tools = field(init=False)
    "tools for the chat template to list; empty when a part of the system prompt lists them"

    def __post_init__(self) -> None:
        self.sampling = self.agent.sampling(self.rollout.attempt.request.sampling)
        self._format = format_named(self.agent.format)
        self._parameters = {name: tool.parameters for name, tool in self.tools.items()}
        self._listed_tools = () if self.agent.lists_tools else [tool.specification() for tool in self.tools.values()]

    @property
    def is_open(self) -> bool:
        return self.context >= 0

    def open(self, prompt: str) -> list[int]:
        """Begins its first context with the system prompt and this; returns the ids. Raises BadInput when the chat
        format cannot render it."""
        self.messages = self._first_messages(prompt)
        self._begin_context(self.rollout.chat.open_context(self.messages, self._listed_tools))
        return self.tokens

    def _first_messages(self, prompt: str) -> list[Message]:
        return [Message("system", self.system_prompt), Message("user", prompt)]

    def receive(self, agent_message: AgentMessage, text: str, role: Literal["user", "tool"] = "user") -> None:
        """Appends a message of another agent, rendered as `text`, to its context and emits AgentMessaged. Raises
        AgentStopped when it does not fit, BadInput when no message could be read."""
        is_first = not self.is_open
        if is_first:
            # The agent's own prompt, with a message that nobody chose: if that cannot be rendered, no agent is to blame.
            self.rollout.chat.open_context(self._first_messages("work"), self._listed_tools)
        with _caused_by_agent("what another agent wrote to it cannot be read"):
            if is_first:
                extension = Extension(self.open(text), "an agent was spoken to for the first time")
                fits = len(self.tokens) < self.sampling.tokens_max
            else:
                extension, fits = self._read(Message(role, text))
        if role == "tool" and fits:
            self._remember(text)
        # A first context has begun even if no turn fits after it: its number is used up, so the event must carry it.
        is_read = fits or is_first
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
        # After the event, so that the log shows the message that did not fit.
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
                # The agent reads its mistake and may try again, within its limit of turns.
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
        # An evaluation judges one version: a turn by other weights must not count for it (decision 0007).
        wrong = [span.version for span in turn.versions if span.version != required]
        if required is not None and wrong:
            raise AgentStopped("infra_error", f"sampled by version {wrong[0]} where {required} was asked for")
        with _caused_by_agent("its turn cannot be read"):
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
        # New lists: the TurnRequest holds the old ones, and a policy may keep it.
        self.tokens = self.tokens + turn.tokens
        self.messages = [*self.messages, Message("assistant", text)]
        self._was_closed = bool(turn.tokens) and turn.tokens[-1] == rollout.chat.end
        self.turns_sampled += 1
        rollout.turns_sampled += 1
        rollout.tokens_sampled += len(turn.tokens)
        # A turn has one call at most, so the number of the turn identifies the call.
        self.call_id = f"call-{rollout.turns_sampled}"
        # A turn may span a reload. The envelope names the newest weights; `versions` has all of them.
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
        # Before the call, so that a call that hangs until the deadline is on the log too.
        attempt.emit(
            ToolCalled(
                meta=attempt.meta("tool_call", name, call.tool),
                call_id=self.call_id,
                agent=name,
                tool=call.tool,
                arguments=call.text,
            )
        )
        # The bench has the tools of all agents of the rollout: this agent may not use those of the others.
        if call.tool in self.rollout.bench.tools and call.tool not in self.tools:
            refusal = f"error: there is no tool {call.tool!r}; the tools are {', '.join(self.tools)}"
            await self._observe(call.tool, _agent_error(refusal))
            return
        async with self.rollout.bench_lock:
            with _caused_by_agent("its call cannot be made"):
                observation = await self.rollout.bench.call(call.tool, call.arguments, self.session)
        await self._observe(call.tool, observation)

    async def _observe(self, tool: str, observation: Observation) -> None:
        """Appends the observation to the context and emits ToolObserved. Raises AgentStopped when it does not fit: then
        the event has its content, but no tokens."""
        rollout = self.rollout
        # Before it is read into the context: tokens and text of an event must be of one text.
        content = redacted(observation.content)
        # Blobs first: the event must not name one that is not stored. From _read to emit there must be no await, or an
        # agent of a parallel step could emit a context with a higher number before this one.
        blobs = [await rollout.keep_blob(blob.data) for blob in observation.blobs]
        with _caused_by_agent("what it observes cannot be read"):
            extension, fits = self._read(Message("tool", content))
        rollout.attempt.emit(
            ToolObserved(
                meta=rollout.attempt.meta("observation", tool or "environment", self.agent.name),
                call_id=self.call_id,
                tool=tool,
                content=content,
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
        self._remember(content)

    def _read(self, message: Message) -> tuple[Extension, bool]:
        """Extends the context by a message, or begins a new one. False if it does not fit: then nothing is changed."""
        messages = [*self.messages, message]
        extension = self.rollout.chat.extend_context(messages, self._was_closed, self._listed_tools)
        kept = 0 if extension.restarts_because else len(self.tokens)
        # >=: a context that is full to the last token has no room for a turn.
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
        # Numbered in the order of the events: `assemble` takes the next unused number for a new context.
        self.context, self.rollout.contexts = self.rollout.contexts, self.rollout.contexts + 1
        self.tokens = tokens
        self.rollout.tokens_read += len(tokens)

    def _remember(self, observed: str) -> None:
        # messages[-1] is the observation, which was just read; the turn is the one before it.
        self.turns.append((self.messages[-2].content, observed))

    def _own_task(self, task: Task) -> Task:
        """The task as this agent knows it: a scripted teacher sees which agent it plays and what that was asked."""
        asked = self.messages[1].content
        if task.agent == self.agent.name and task.prompt == asked:
            return task
        return msgspec.structs.replace(task, agent=self.agent.name, prompt=asked)

    def _right_form(self) -> str:
        return f"; a call is written {self._format.right_form}" if self.agent.shows_right_form else ""


@contextmanager
def _caused_by_agent(what: str) -> Iterator[None]:
    """An unexpected error while what the agent wrote is handled is a bug here that the agent found. It ends the rollout
    as the agent's error: an infra error would not be scored, and an agent would learn to find it again."""
    try:
        yield
    except (AgentStopped, SandboxFailed, LogUnavailable):
        raise
    except Exception as error:
        logger.exception("agent_found_a_bug", what=what)
        raise AgentStopped("agent_error", f"{what}: {type(error).__name__}: {str(error)[:200]}") from error


def _agent_error(content: str) -> Observation:
    """An observation for a mistake of the agent that reached no tool."""
    return Observation(content, True, "agent", None, 0.0)
