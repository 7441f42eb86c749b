"""Tool-call formats: how models of different families write a call, and how their turns are parsed.

hermes     <tool_call>{"name": "python", "arguments": {"code": "1+1"}}</tool_call>           (also Qwen 2.5 and 3)
llama      <|python_tag|>{"name": "python", "parameters": {"code": "1+1"}}                   (Llama 3; tag optional)
xml        <tool name="python"><arg name="code">1+1</arg></tool>
qwen_xml   <tool_call><function=python><parameter=code>1+1</parameter></function></tool_call>  (Qwen 3 Coder)

In every format `<answer>…</answer>` is the final answer. A turn holds one call at most: of several calls none is made,
and the agent reads an error, because the later calls were written without the result of the first. A parser never
raises, whatever the text. The reasons in Malformed are read by the agent.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from xml.sax.saxutils import unescape

import msgspec

type Parameters = Mapping[str, Mapping[str, Any]]
"JSON schemas of the arguments, by name of the tool."
FormatName = Literal["hermes", "llama", "xml", "qwen_xml"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The agent calls a tool. `text` is the JSON of the arguments: in JSON formats exactly as the agent wrote it."""

    tool: str
    arguments: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The agent answered, which ends its part. Whitespace around the answer is stripped."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """The agent tried to call a tool or to answer, and made a mistake in the form."""

    reason: str


@dataclass(frozen=True, slots=True)
class Idle:
    """The agent neither called a tool nor answered."""


type ParsedTurn = ToolCall | FinalAnswer | Malformed | Idle


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One tool-call format."""

    name: FormatName
    right_form: str
    "a complete call with placeholders, for prompts and error messages"
    _read: Callable[[str, Parameters], ParsedTurn]

    def parse(self, text: str, parameters: Parameters) -> ParsedTurn:
        """What a turn does. Never raises. XML carries text only, so the schemas in `parameters` say which arguments are
        numbers, lists and so on."""
        return self._read(text, parameters)

    def describe(self, specifications: list[dict[str, Any]]) -> str:
        """The part of the system prompt that lists the tools, for models whose chat template does not."""
        lines = [msgspec.json.encode(specification["function"]).decode() for specification in specifications]
        tools = "\n".join(lines)
        return f"Tools, one a line:\n{tools}\nTo call one, write {self.right_form}, one call a turn."


def parse(text: str) -> ParsedTurn:
    """What a turn in the hermes format does."""
    return _read_hermes(text, {})


def format_named(name: FormatName) -> ToolFormat:
    return _FORMATS[name]


class _HermesCall(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw


class _LlamaCall(msgspec.Struct, frozen=True):
    name: str
    parameters: msgspec.Raw


_SEVERAL = "one call a turn"
_BOTH = "a turn is a call or an answer, not both"
_PYTHON_TAG = "<|python_tag|>"
# Llama writes several calls one after another, with or without a semicolon between them.
_NEXT_LLAMA_CALL = re.compile(r'\}\s*;?\s*\{\s*"name"')
_HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_HERMES_END = re.compile("</tool_call>")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANSWER_END = re.compile("</answer>")


def _split_after_last(end: re.Pattern[str], text: str) -> tuple[str, str]:
    """The text up to the last end tag, and the rest.

    Only the first part is searched for pairs of tags. Behind the last end tag a pattern would look for one from every
    start tag to the end of the text: 32,000 of them, which is one token each, kept a worker busy for a minute."""
    last = 0
    for found in end.finditer(text):
        last = found.end()
    return text[:last], text[last:]


def _read_hermes(text: str, parameters: Parameters) -> ParsedTurn:
    calls = _HERMES_CALL.findall(_split_after_last(_HERMES_END, text)[0])
    if len(calls) > 1:
        return Malformed(_SEVERAL)
    # Anywhere in the turn, so also an <answer> inside the arguments is refused.
    if calls:
        return Malformed(_BOTH) if "<answer>" in text else _hermes_call(calls[0])
    return Malformed("<tool_call> without </tool_call>") if "<tool_call>" in text else _answer(text)


def _hermes_call(body: str) -> ParsedTurn:
    try:
        call = msgspec.json.decode(body, type=_HermesCall)
        return _json_call(call.name, call.arguments, "arguments")
    except _NOT_JSON as error:
        return Malformed(f'the call is not {{"name": …, "arguments": {{…}}}}: {error}')


def _read_llama(text: str, parameters: Parameters) -> ParsedTurn:
    # Text before the tag is reasoning. Without the tag the whole turn must be the call.
    before, tag, after = text.partition(_PYTHON_TAG)
    body = (after if tag else before).strip()
    if not tag and not body.startswith("{"):
        return _answer(text)
    if tag and "<answer>" in before:
        return Malformed(_BOTH)
    try:
        call = msgspec.json.decode(body, type=_LlamaCall)
        return _json_call(call.name, call.parameters, "parameters")
    except _NOT_JSON as error:
        # Two calls are not valid JSON together: name the actual mistake instead of a JSON error.
        if _NEXT_LLAMA_CALL.search(body):
            return Malformed(_SEVERAL)
        return Malformed(f'the call is not {{"name": …, "parameters": {{…}}}}: {error}')


# UnicodeError: half a surrogate pair. RecursionError: brackets nested too deep.
_NOT_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)


def _json_call(name: str, written: msgspec.Raw, key: str) -> ParsedTurn:
    # Decoded in a second step: `written` keeps the bytes of the arguments as the agent wrote them.
    arguments = msgspec.json.decode(written)
    if not isinstance(arguments, dict):
        return Malformed(f"{key} must be a JSON object")
    return ToolCall(name, arguments, bytes(written).decode())


@dataclass(frozen=True, slots=True)
class _Tags:
    """The syntax of an XML format."""

    opens: str
    closes: str
    call: re.Pattern[str]
    call_end: re.Pattern[str]
    argument: re.Pattern[str]
    argument_end: re.Pattern[str]
    unescaped: bool
    "whether entities such as &lt; in arguments are decoded"


_XML = _Tags(
    opens="<tool ",
    closes="</tool>",
    call=re.compile(r'<tool\s+name="([^"<>]*)"\s*>(.*?)</tool>', re.DOTALL),
    call_end=re.compile("</tool>"),
    argument=re.compile(r'<arg\s+name="([^"<>]*)"\s*>(.*?)</arg>', re.DOTALL),
    argument_end=re.compile("</arg>"),
    unescaped=True,
)
_QWEN_XML = _Tags(
    opens="<tool_call>",
    closes="</tool_call>",
    call=re.compile(r"<tool_call>\s*<function=([^<>]*)>(.*?)</function>\s*</tool_call>", re.DOTALL),
    call_end=re.compile(r"</function>\s*</tool_call>"),
    argument=re.compile(r"<parameter=([^<>]*)>(.*?)</parameter>", re.DOTALL),
    argument_end=re.compile("</parameter>"),
    unescaped=False,
)


def _read_tagged(text: str, parameters: Parameters, tags: _Tags) -> ParsedTurn:
    closed, rest = _split_after_last(tags.call_end, text)
    calls = tags.call.findall(closed)
    if len(calls) > 1:
        return Malformed(_SEVERAL)
    # Unlike hermes: code in an XML argument may contain "<answer>", so only text outside of the call counts.
    if calls:
        (name, body), outside = calls[0], tags.call.sub("", closed) + rest
        return Malformed(_BOTH) if "<answer>" in outside else _tagged_call(name, body, parameters, tags)
    # No whole call, but the beginning of one: an error, or a cut-off call would pass as an idle turn.
    if tags.opens in text:
        missing = tags.closes not in text
        return Malformed(f"{tags.opens.strip()} without {tags.closes}" if missing else "the call has no name")
    return _answer(text)


def _tagged_call(name: str, body: str, parameters: Parameters, tags: _Tags) -> ParsedTurn:
    # Leftover text is mostly an argument with a broken tag. Calling without it would hide the mistake.
    closed, behind = _split_after_last(tags.argument_end, body)
    rest = (tags.argument.sub("", closed) + behind).strip()
    if rest:
        return Malformed(f"beside its arguments the call holds {rest[:80]!r}")
    properties = parameters.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for key, value in tags.argument.findall(closed):
        if key in arguments:
            return Malformed(f"argument {key!r} is given twice")
        arguments[key] = _value(unescape(value) if tags.unescaped else value, properties.get(key, {}))
    try:
        return ToolCall(name.strip(), arguments, msgspec.json.encode(arguments).decode())
    # ToolCalled.arguments is JSON: what cannot be written as JSON cannot be recorded or sent to the sandbox.
    except (UnicodeError, RecursionError, OverflowError, msgspec.EncodeError) as error:
        return Malformed(f"the arguments cannot be written as JSON: {error}")


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """The argument with the type of its schema; as text if the schema says string or nothing, or it is not JSON."""
    # Qwen puts the value on a line of its own: one newline on each side belongs to the format, more to the value.
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type", "string")
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return msgspec.json.decode(text.strip())
    except _NOT_JSON:
        return text


def _answer(text: str) -> ParsedTurn:
    answered = _ANSWER.search(_split_after_last(_ANSWER_END, text)[0])
    if answered:
        return FinalAnswer(answered.group(1).strip())
    return Malformed("<answer> without </answer>") if "<answer>" in text else Idle()


_FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat(
        "hermes", '<tool_call>{"name": "TOOL", "arguments": {"ARGUMENT": VALUE}}</tool_call>', _read_hermes
    ),
    "llama": ToolFormat("llama", '{"name": "TOOL", "parameters": {"ARGUMENT": VALUE}}', _read_llama),
    "xml": ToolFormat(
        "xml",
        '<tool name="TOOL"><arg name="ARGUMENT">VALUE</arg></tool>',
        lambda text, parameters: _read_tagged(text, parameters, _XML),
    ),
    "qwen_xml": ToolFormat(
        "qwen_xml",
        "<tool_call><function=TOOL><parameter=ARGUMENT>VALUE</parameter></function></tool_call>",
        lambda text, parameters: _read_tagged(text, parameters, _QWEN_XML),
    ),
}
