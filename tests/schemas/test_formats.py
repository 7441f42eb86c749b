"""Tool-call formats: what agents really write, what is wrong with it, and that no text breaks a parser."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayground.schemas.formats import FinalAnswer, FormatName, Idle, Malformed, ToolCall, format_named, parse

FORMATS: tuple[FormatName, ...] = ("hermes", "llama", "xml", "qwen_xml")
PARAMETERS = {
    "add": {"properties": {"a": {"type": "integer"}, "why": {"type": ["string", "null"]}, "c": {"type": "array"}}}
}


def test_calls_keep_the_arguments_as_they_were_written() -> None:
    said = parse('I look. <tool_call>{"name": "kv", "arguments": {"key":  "panel.stock"}}</tool_call>')
    assert said == ToolCall("kv", {"key": "panel.stock"}, '{"key":  "panel.stock"}')


def test_answers_are_stripped() -> None:
    assert parse("<answer> 685\n</answer>") == FinalAnswer("685")
    assert parse("<answer></answer>") == FinalAnswer("")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>{}</tool_call>", "name"),
        ("<tool_call>kv panel.stock</tool_call>", "malformed"),
        ('<tool_call>{"name": "kv"}</tool_call>', "arguments"),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', "Expected `str`"),
        ('<tool_call>{"name": "kv", "arguments": "panel"}</tool_call>', "JSON object"),
        ('<tool_call>{"name": "kv", "arguments": {"key": "panel.stock"}', "without </tool_call>"),
        ('<tool_call>{"name": "kv", "arguments": {}}</tool_call>' * 2, "one call a turn"),
        ('<tool_call>{"name": "kv", "arguments": {}}</tool_call><answer>1</answer>', "not both"),
        ("<answer>685", "without </answer>"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is not"),
        ('<tool_call>{"name": "kv", "arguments": {"key": "\ud800"}}</tool_call>', "the call is not"),
        (r'<tool_call>{"name": "kv", "arguments": {"key": "\ud800"}}</tool_call>', "the call is not"),
    ],
)
def test_what_is_wrong_with_a_turn_is_said(text: str, says: str) -> None:
    said = parse(text)
    assert isinstance(said, Malformed)
    assert says in said.reason


@pytest.mark.parametrize("text", ["", "I do not know.", "</answer>", "</tool_call>"])
def test_saying_nothing_useful_is_idle(text: str) -> None:
    assert parse(text) == Idle()


ONE = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 1, "why": "2", "c": [3]}}</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1, "why": "2", "c": [3]}}',
    "xml": '<tool name="add"><arg name="a">1</arg>\n<arg name="why">2</arg><arg name="c"> [3] </arg></tool>',
    "qwen_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=why>\n2\n</parameter>"
    "<parameter=c>[3]</parameter></function>\n</tool_call>",
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_the_same_call(name: FormatName) -> None:
    said = format_named(name).parse("I add. " * (name != "llama") + ONE[name], PARAMETERS)
    assert isinstance(said, ToolCall)
    assert (said.tool, said.arguments) == ("add", {"a": 1, "why": "2", "c": [3]})
    assert json.loads(said.text) == said.arguments


@pytest.mark.parametrize("name", FORMATS)
def test_answers_and_idling_are_the_same_in_every_format(name: FormatName) -> None:
    assert format_named(name).parse("<answer> 685\n</answer>", PARAMETERS) == FinalAnswer("685")
    assert format_named(name).parse("I wonder.", PARAMETERS) == Idle()
    assert format_named(name).parse("<answer>685", PARAMETERS) == Malformed("<answer> without </answer>")


@pytest.mark.parametrize("name", FORMATS)
def test_of_several_calls_none_is_made(name: FormatName) -> None:
    separator = ";" if name == "llama" else ""
    assert format_named(name).parse(ONE[name] + separator + ONE[name], PARAMETERS) == Malformed("one call a turn")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("llama", '{"name": "add"}', "parameters"),
        ("llama", '<|python_tag|>{"name": "add", "parameters": [1]}', "JSON object"),
        ("llama", "<|python_tag|>add(1)", "the call is not"),
        ("llama", '<answer>1</answer><|python_tag|>{"name": "add", "parameters": {}}', "not both"),
        ("llama", "{" * 100_000, "the call is not"),
        ("xml", '<tool name="add"><arg name="a">1</arg>', "without </tool>"),
        ("xml", "<tool add></tool>", "has no name"),
        ("xml", '<tool name="add">1, 2</tool>', "beside its arguments"),
        ("xml", '<tool name="add"><arg name="a">1</arg><arg name="a">2</arg></tool>', "twice"),
        ("xml", '<tool name="add"></tool><answer>1</answer>', "not both"),
        ("xml", '<tool name="add"><arg name="why">\ud800</arg></tool>', "JSON"),
        ("qwen_xml", "<tool_call><function=add>", "without </tool_call>"),
        ("qwen_xml", "<tool_call>add</tool_call>", "has no name"),
    ],
)
def test_what_is_wrong_is_said_in_every_format(name: FormatName, text: str, says: str) -> None:
    said = format_named(name).parse(text, PARAMETERS)
    assert isinstance(said, Malformed)
    assert says in said.reason


def test_the_tag_of_llama_may_be_there_or_not() -> None:
    llama = format_named("llama")
    assert llama.parse("<|python_tag|>" + ONE["llama"], {}) == llama.parse(f" {ONE['llama']}\n", {})
    assert isinstance(llama.parse("I look it up. <|python_tag|>" + ONE["llama"], {}), ToolCall)


def test_xml_is_unescaped_and_what_does_not_fit_stays_text() -> None:
    said = format_named("xml").parse('<tool name="add"><arg name="a">x &lt; 1</arg></tool>', PARAMETERS)
    assert said == ToolCall("add", {"a": "x < 1"}, '{"a":"x < 1"}')
    raw = format_named("qwen_xml").parse(
        "<tool_call><function=new><parameter=code>if a < 1:\n    b = '&lt;'</parameter></function></tool_call>", {}
    )
    assert isinstance(raw, ToolCall)
    assert raw.arguments == {"code": "if a < 1:\n    b = '&lt;'"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_right_form_is_one_that_its_own_parser_takes(name: FormatName) -> None:
    """What an agent is shown after an error must be right, once the words in capitals are filled in."""
    shown = format_named(name).right_form.replace("VALUE", '"1"')
    said = format_named(name).parse(shown, {})
    assert isinstance(said, ToolCall)
    assert (said.tool, set(said.arguments)) == ("TOOL", {"ARGUMENT"})


def test_a_description_names_every_tool_and_the_form() -> None:
    specification = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
    text = format_named("xml").describe([specification])
    assert '"name":"add"' in text
    assert format_named("xml").right_form in text


PIECES = st.sampled_from(
    (
        *("<tool_call>", "</tool_call>", "<answer>", "</answer>", "<|python_tag|>", '<tool name="add">', "</tool>"),
        *('<arg name="a">', "</arg>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", '"name"'),
        *('{"name": "add", "arguments": {}}', '{"name": "add", "parameters": {"a": 1e999}}', "{", "}", "[", ":", ","),
        *("\ud800", "\x00", "1", ";"),
    )
)
TEXTS = st.lists(PIECES | st.text(st.characters(), max_size=6), max_size=14).map("".join) | st.text(st.characters())


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_no_text_breaks_a_parser(text: str) -> None:
    for name in FORMATS:
        said = format_named(name).parse(text, PARAMETERS)
        assert isinstance(said, ToolCall | FinalAnswer | Malformed | Idle)
        if isinstance(said, ToolCall):
            assert json.loads(said.text) == said.arguments


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text("abcde_", min_size=1, max_size=5),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        max_size=4,
    )
)
def test_whatever_an_argument_holds_reaches_the_tool(arguments: dict[str, str]) -> None:
    """JSON carries any text; XML of Qwen any text that does not look like its own tags."""
    written = json.dumps(arguments)
    hermes = parse(f'<tool_call>{{"name": "t", "arguments": {written}}}</tool_call>')
    if "</tool_call>" not in written and "<answer>" not in written:
        assert isinstance(hermes, ToolCall)
        assert hermes.arguments == arguments
    llama = format_named("llama").parse(f'{{"name": "t", "parameters": {written}}}', {})
    assert isinstance(llama, ToolCall)
    assert llama.arguments == arguments


# What comes first, what comes 64,000 times, and what comes last.
ENDLESS = {
    "hermes": [("", "<tool_call>", ""), ("", "<answer>", ""), ("<tool_call></tool_call>", "<tool_call>", "")],
    "llama": [("", "<answer>", ""), ("{", "} ; {", "")],
    "xml": [("", '<tool name="x">', ""), ("", "<answer>", ""), ('<tool name="x">', '<arg name="a">', "</tool>")],
    "qwen_xml": [
        ("", "<tool_call><function=x>", ""),
        ("", "<answer>", "</tool_call>"),
        ("<tool_call><function=x>", "<parameter=a>", "</function></tool_call>"),
    ],
}


@pytest.mark.parametrize("name", ENDLESS)
def test_tags_without_an_end_keep_no_worker_busy(name: str) -> None:
    """A tag is a single token of some models. In quadratic time these took minutes on the event loop; the kernel ends this
    reader after 30 s of CPU time."""
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
from replayground.schemas.formats import format_named
for first, again, last in {ENDLESS[name]!r}:
    format_named({name!r}).parse(first + again * 64_000 + last, {{}})
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_stands_behind_the_last_tag_counts() -> None:
    """Only the part before the last end tag is searched for pairs; the rest must not be forgotten."""
    xml = format_named("xml")
    call = '<tool name="sql"><arg name="query">select 1</arg></tool>'
    assert isinstance(xml.parse(call + " so", {}), ToolCall)
    assert isinstance(xml.parse(call + "<answer>1</answer>", {}), Malformed)
    beside = xml.parse('<tool name="sql"><arg name="query">1</arg><arg name="b">2</tool>', {})
    assert beside == Malformed("""beside its arguments the call holds '<arg name="b">2'""")
