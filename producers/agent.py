"""What an agent reads and says: prompt assembly, the chat format as token ids, and the parsing of its turns.

One token per role header: `<|system|>…<|end|><|user|>…<|end|><|assistant|>`, then sampled ids up to and with `<|end|>`, then
`<|tool|><tool_response>…</tool_response><|end|><|assistant|>`. Only ids are ever joined: sampled text is never tokenised
again. Text from outside (tasks, tools) is encoded with role tokens as plain text, so that nothing a tool returns can speak
in another role. Not covered: `</tool_response>` and its like are ordinary text and can be imitated by a tool.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer

from schemas.errors import BadInput

END = "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", END)
_TEMPLATE = "roles-1"
"Name of this format; goes into template_hash, so change it when the layout changes."

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """The agent asked for a tool. `text` is the JSON of the arguments as the agent wrote it."""

    tool: str
    arguments: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The agent answered, which ends the rollout. White space around the answer is stripped."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """The agent tried to call a tool or to answer, and this is what was wrong with it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Idle:
    """The agent neither called a tool nor answered."""


type Said = Call | Answer | Malformed | Idle


class _HermesCall(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw


class ChatFormat:
    """Text to ids and back, for one tokenizer."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises BadInput when the bytes are no tokenizer or it lacks a role token."""
        self._tokenizer = _tokenizer_of(tokenizer_json)
        self.system, self.user, self.assistant, self.tool, self.end = (self._role(name) for name in _ROLES)
        self._system_tokens: dict[str, list[int]] = {}
        self.template_hash = hashlib.sha256(_TEMPLATE.encode() + tokenizer_json).hexdigest()

    def prompt(self, system_prompt: str, task_prompt: str) -> list[int]:
        """All that the agent reads before its first turn."""
        if system_prompt not in self._system_tokens:  # the same for all tasks of a toolset
            self._system_tokens[system_prompt] = [self.system, *self.encode(system_prompt), self.end]
        return [*self._system_tokens[system_prompt], self.user, *self.encode(task_prompt), self.end, self.assistant]

    def observation(self, content: str, turn_was_closed: bool) -> list[int]:
        """What is appended after a turn: the observation and the header of the next turn. A turn that was cut off
        before its `<|end|>` is closed here, unsampled."""
        closing = [] if turn_was_closed else [self.end]
        body = self.encode(f"<tool_response>{content}</tool_response>")
        return [*closing, self.tool, *body, self.end, self.assistant]

    def turn(self, text: str) -> list[int]:
        """Ids of a turn that a teacher wrote."""
        return [*self.encode(text), self.end]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; role tokens in it stay text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        """Text of a sampled turn, for people and parsers, without the `<|end|>` that closed it."""
        closed = bool(tokens) and tokens[-1] == self.end
        return self._tokenizer.decode(tokens[:-1] if closed else tokens, skip_special_tokens=False)

    def _role(self, name: str) -> int:
        token = self._tokenizer.token_to_id(name)
        if token is None:
            raise BadInput(
                f"the tokenizer has no token {name}: this model does not speak the chat format of producers/agent.py"
            )
        return int(token)


def parse(text: str) -> Said:
    """What a turn does. One call a turn; an answer is a turn of its own."""
    calls = _CALL.findall(text)
    if len(calls) > 1:
        return Malformed("one call a turn")
    if calls:
        return Malformed("a turn is a call or an answer, not both") if "<answer>" in text else _call(calls[0])
    if "<tool_call>" in text:
        return Malformed("<tool_call> without </tool_call>")
    answered = _ANSWER.search(text)
    if answered:
        return Answer(answered.group(1).strip())
    return Malformed("<answer> without </answer>") if "<answer>" in text else Idle()


def _call(body: str) -> Said:
    try:
        call = msgspec.json.decode(body, type=_HermesCall)
        arguments = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return Malformed(f'the call is not {{"name": …, "arguments": {{…}}}}: {error}')
    if not isinstance(arguments, dict):
        return Malformed("arguments must be a JSON object")
    return Call(call.name, arguments, bytes(call.arguments).decode())


def _tokenizer_of(tokenizer_json: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"tokenizer.json cannot be read: {error}") from error
    tokenizer.encode_special_tokens = True  # "<|tool|>" in a tool's output is eight characters, not a role
    return tokenizer
