"""Chat formats: messages to token ids. What follows a turn is appended to the ids that were sampled.

ChatFormat is our own, one token per role header: `<|system|>…<|end|><|user|>…<|end|><|assistant|>`, then sampled ids up
to and including `<|end|>`, then `<|tool|><tool_response>…</tool_response><|end|><|assistant|>`. TemplateFormat uses the
Jinja template that came with a model. Sampled text is not tokenised again, because that may give other ids than those
sampled. The exception is a template that rewrites earlier messages: then a new context begins, and the event says why.

Text from outside (tasks, tools, other agents) is encoded with role tokens as plain text, so a tool result cannot start
a message of another role. Not covered: tags such as `</tool_response>` are ordinary text, and a tool can imitate them.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from replayground.schemas.errors import BadInput

END = "<|end|>"
CHAT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"Files of a weight version that define its chat format; only the first is required."

_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", END)
_TEMPLATE = "roles-1"
"Name of our own format. It is hashed into template_hash: change it when the layout changes."
# A bound, because a part with source world can make the system prompt differ from task to task.
_SYSTEM_PROMPTS_KEPT = 64
_SHIELD = "\ue000"
"Put inside a role token that is only text, until the text is encoded. A private-use character, not found in real text."

type Tools = Sequence[Mapping[str, Any]]
"Tool specifications in the form that chat templates expect."


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a context, as text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True)
class Extension:
    """What an agent reads next: ids to append to its context, or, with a reason, all ids of a new context."""

    tokens: list[int]
    restarts_because: str | None = None


class Chat(Protocol):
    """Text to ids and back, for one model."""

    @property
    def end(self) -> int:
        """The token that closes a turn."""

    @property
    def template_hash(self) -> str: ...

    def open_context(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a prompt, up to the header of the first turn. Raises BadInput when the template cannot render it."""

    def extend_context(self, messages: Sequence[Message], turn_was_closed: bool, tools: Tools = ()) -> Extension:
        """The ids after a turn. The last message is new, the one before it is the turn. A turn that was cut off before
        its end token gets one here, which counts as read and not as sampled. Raises BadInput like open_context."""

    def turn(self, text: str) -> list[int]:
        """Ids of a turn that a teacher wrote as text, with the end token."""

    def decode(self, tokens: list[int]) -> str:
        """Text of a sampled turn, for people and parsers, without the end token."""


def chat_of(files: Mapping[str, bytes]) -> Chat:
    """Our own format if the tokenizer has its role tokens, else the model's template. Raises BadInput for neither."""
    tokenizer_json = files["tokenizer.json"]
    tokenizer = tokenizer_of(tokenizer_json)
    missing = [role for role in _ROLES if tokenizer.token_to_id(role) is None]
    if not missing:
        return ChatFormat(tokenizer_json)
    try:
        config = msgspec.json.decode(files.get("tokenizer_config.json", b"{}"), type=_TokenizerConfig)
    except msgspec.DecodeError as error:
        raise BadInput(f"tokenizer_config.json cannot be read: {error}") from error
    # As in transformers: the separate file wins over the field of tokenizer_config.json.
    template = files.get("chat_template.jinja", b"").decode() or config.template
    if not template:
        raise BadInput(f"the tokenizer has no token {missing[0]} and the model came without a chat template")
    return TemplateFormat(tokenizer_json, template, end=config.text("eos"), begin=config.text("bos"))


class ChatFormat:
    """Our own format. Every message can be appended exactly, so a context is never restarted."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises BadInput when the bytes are not a tokenizer, or when it lacks a role token."""
        self._tokenizer = tokenizer_of(tokenizer_json)
        self.system, self.user, self.assistant, self.tool, self.end = (self._role(name) for name in _ROLES)
        self._system_tokens: dict[str, list[int]] = {}
        self.template_hash = hashlib.sha256(_TEMPLATE.encode() + tokenizer_json).hexdigest()

    def open_context(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        tokens = [token for message in messages for token in self._encode_message(message)]
        return [*tokens, self.assistant]

    def extend_context(self, messages: Sequence[Message], turn_was_closed: bool, tools: Tools = ()) -> Extension:
        # The turn itself is not encoded: its sampled ids are in the context already.
        closing = [] if turn_was_closed else [self.end]
        return Extension([*closing, *self._encode_message(messages[-1]), self.assistant])

    def turn(self, text: str) -> list[int]:
        return [*self.encode(text), self.end]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Role tokens in it are encoded as text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        closed = bool(tokens) and tokens[-1] == self.end
        return self._tokenizer.decode(tokens[:-1] if closed else tokens, skip_special_tokens=False)

    def _encode_message(self, message: Message) -> list[int]:
        match message.role:
            case "system":
                return self._system(message.content)
            case "user":
                return [self.user, *self.encode(message.content), self.end]
            case "assistant":
                return [self.assistant, *self.encode(message.content), self.end]
            case "tool":
                return [self.tool, *self.encode(f"<tool_response>{message.content}</tool_response>"), self.end]

    def _system(self, content: str) -> list[int]:
        """Cached: the same for all tasks of a toolset, and often the longest part of a prompt."""
        if content not in self._system_tokens:
            if len(self._system_tokens) >= _SYSTEM_PROMPTS_KEPT:
                self._system_tokens.clear()
            self._system_tokens[content] = [self.system, *self.encode(content), self.end]
        return self._system_tokens[content]

    def _role(self, name: str) -> int:
        token = self._tokenizer.token_to_id(name)
        if token is None:
            raise BadInput(
                f"the tokenizer has no token {name}: this model does not use the chat format of producers/chat.py"
            )
        return int(token)


class TemplateFormat:
    """A model's own Jinja template. To extend a context, the whole conversation is rendered with the new message. If
    the result begins with the context so far, the rest is encoded and appended. If not (the template drops earlier
    reasoning, trims or rewrites), the whole is encoded as a new context.

    Templates get no clock: one that asks for today's date uses the date it has built in."""

    def __init__(self, tokenizer_json: bytes, template: str, *, end: str, begin: str = "") -> None:
        """`end` is the token that closes a turn, `begin` the template's bos_token. Raises BadInput when the template or
        the tokenizer cannot be used."""
        self._tokenizer = tokenizer_of(tokenizer_json)
        self._special = _special_tokens(tokenizer_json)
        if end not in self._special:
            raise BadInput(f"the token {end!r} that closes a turn is not a special token of the tokenizer")
        # Longest first: of two tokens with a common beginning, the alternation must match the longer one.
        names = sorted(self._special, key=len, reverse=True)
        self._special_split = re.compile("(" + "|".join(re.escape(name) for name in names) + ")")
        self._end_text, self._begin_text = end, begin
        self.end = self._special[end]
        self._template = _compile(template)
        self.template_hash = hashlib.sha256(template.encode() + tokenizer_json).hexdigest()
        # Fails now and not in the middle of a rollout: this also renders the template once.
        self._require_seams(tokenizer_json)

    def open_context(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        return self._encode_rendered(self._render(messages, tools))

    def extend_context(self, messages: Sequence[Message], turn_was_closed: bool, tools: Tools = ()) -> Extension:
        whole = self._render(messages, tools)
        # The context so far as text: the prompt with the header of the turn, the turn, and its end.
        so_far = self._render(messages[:-2], tools) + self._shield(messages[-2].content) + self._end_text
        if not whole.startswith(so_far):
            return Extension(self._encode_rendered(whole), "the chat template rewrites what was read and said before")
        # Only what the template adds after the turn is encoded; the sampled ids stay as they are.
        closing = [] if turn_was_closed else [self.end]
        return Extension([*closing, *self._encode_rendered(whole[len(so_far) :])])

    def turn(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self.end]

    def decode(self, tokens: list[int]) -> str:
        closed = bool(tokens) and tokens[-1] == self.end
        return self._tokenizer.decode(tokens[:-1] if closed else tokens, skip_special_tokens=False)

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        """The messages and the header of the next turn, as text. Raises BadInput."""
        try:
            return self._template.render(
                messages=[{"role": said.role, "content": self._shield(said.content)} for said in messages],
                tools=list(tools) or None,
                add_generation_prompt=True,
                bos_token=self._begin_text,
                eos_token=self._end_text,
            )
        # A template is a program from outside: any error of an expression in it is one of the template.
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise BadInput(f"the chat template cannot render this conversation: {error}") from error

    def _shield(self, content: str) -> str:
        """The content with every role token broken up, so that _encode_rendered does not take it for one."""
        # A shield that is part of the text would be dropped on encoding: U+FFFD shows that something was there.
        content = content.replace(_SHIELD, "\ufffd")
        return self._special_split.sub(lambda found: found[0][0] + _SHIELD + found[0][1:], content)

    def _encode_rendered(self, rendered: str) -> list[int]:
        """Ids of rendered text: role tokens of the template by name, everything between them as plain text."""
        tokens: list[int] = []
        for piece in self._special_split.split(rendered):
            if piece in self._special:
                tokens.append(self._special[piece])
            elif piece:
                tokens += self._tokenizer.encode(piece.replace(_SHIELD, ""), add_special_tokens=False).ids
        return tokens

    def _require_seams(self, tokenizer_json: bytes) -> None:
        """Raises BadInput when the ids around a role token depend on the text on its other side."""
        # Contexts are encoded piece by piece. A tokenizer that strips white space around its role tokens (lstrip,
        # rstrip) gives other ids for the whole than for the pieces.
        rendered = self._render([Message("user", " a b\n"), Message("assistant", "c "), Message("user", "d")], ())
        whole: list[int] = Tokenizer.from_buffer(tokenizer_json).encode(rendered, add_special_tokens=False).ids
        if whole != self._encode_rendered(rendered):
            raise BadInput("this tokenizer joins text across its role tokens: a context cannot be extended exactly")


class _TokenizerConfig(msgspec.Struct):
    """The fields used of tokenizer_config.json. A token is its text, or a record with the field `content`."""

    chat_template: str | list[dict[str, str]] | None = None
    eos_token: str | dict[str, Any] | None = None
    bos_token: str | dict[str, Any] | None = None

    @property
    def template(self) -> str:
        """Of several templates the one for tools, else the default one."""
        if not isinstance(self.chat_template, list):
            return self.chat_template or ""
        named = {entry.get("name", ""): entry.get("template", "") for entry in self.chat_template}
        return named.get("tool_use") or named.get("default", "")

    def text(self, which: Literal["eos", "bos"]) -> str:
        token = self.eos_token if which == "eos" else self.bos_token
        return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def tokenizer_of(tokenizer_json: bytes) -> Tokenizer:
    """A tokenizer that encodes role tokens as plain text. Raises BadInput."""
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    # The tokenizers library raises bare Exception.
    except Exception as error:
        raise BadInput(f"tokenizer.json cannot be read: {error}") from error
    # "<|tool|>" in a tool's output is eight characters, not a role.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _special_tokens(tokenizer_json: bytes) -> dict[str, int]:
    added = json.loads(tokenizer_json).get("added_tokens") or []
    return {entry["content"]: int(entry["id"]) for entry in added if entry.get("special")}


def _compile(template: str) -> jinja2.Template:
    """Compiles a chat template as transformers does, in Jinja's sandbox. Raises BadInput."""
    # A template comes with the model, from outside: the sandbox keeps it from Python's internals.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise BadInput(f"the chat template is not valid Jinja: {error}") from error


def _as_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own tojson escapes <, >, & and ' for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
