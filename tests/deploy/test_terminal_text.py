"""Text that others wrote never steers a terminal, whatever command prints it."""

import ast
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from replayground.deploy.terminal_text import plain, printable, printable_json

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# Prints about this machine alone, before or without what others wrote.
EXEMPT = ("install.py", "local/guard.py", "documentation")
HOSTILE = (
    "\x1b[2J\x1b[1;1Hgone",
    "\x1b]0;title\x07",
    "\x1b]52;c;cm0gLXJmIH4=\x07",
    "\x1bP+q544e\x1b\\",
    "\x1b[5n\x1b[c",
    "\x9b31mred",
    "\x9d0;title\x9c",
    "back\x08\x08\x08\x7f",
    "over\rwritten",
    "bell\x07\x00\x0b\x0c",
    "abc\u202edcba",
    "\u2066hidden\u2069",
    "\u200f\u061c\u200e",
    "zero\u200bwidth\u2060\ufeff",
    "line\u2028para\u2029",
    "tag\U000e0041\U000e007f",
    "lone\ud83d",
    "private\ue000",
    "[/x]",
    "[red]red[/red]",
    "[link=http://evil.example]here[/link]",
    "\\[bold]",
    "tab\there",
    "soft\u00adhyphen",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_left_prints(text: str) -> None:
    assert printable(text).isprintable()
    assert all(line.isprintable() for line in plain(f"{text}\n{text}").split("\n"))
    # Nothing disappears: two different texts stay different.
    assert len(printable(text)) >= len(text)


def test_json_means_the_same() -> None:
    for text in HOSTILE:
        written = json.dumps({"said": text}, ensure_ascii=False)
        assert printable_json(written).isprintable()
        assert json.loads(printable_json(written)) == {"said": text}


def test_what_prints_is_not_changed() -> None:
    for text in ("plain", "Grüße, 你好 🙂", "a [b] c", "\\x1b"):
        assert printable(text) == plain(text) == printable_json(text) == text


PRINTS = """
import sys
from rich.table import Table
from replayground.deploy.operate.inspection import _print_answer, _show_answer
from replayground.deploy.operate.tail import line, as_json
from replayground.deploy.options import console, echo, echo_error
from replayground.deploy import cli
from tests.deploy.test_terminal_text import HOSTILE
_print_answer({"columns": list(HOSTILE), "rows": [list(HOSTILE), list(HOSTILE)]})
said = [text.encode("utf-8", "replace").decode() for text in HOSTILE]
for form in ("csv", "json") if sys.stdout.isatty() else ():
    _show_answer({"columns": [str(n) for n in range(len(said))], "rows": [said]}, form, None)
for text in HOSTILE:
    text = text.encode("utf-8", "replace").decode()
    _print_answer({"columns": [text], "rows": [[text]]})
    echo(text)
    echo_error(text)
    console.print(text, markup=False)
    table = Table(title=text.replace("[", "("))
    table.add_column("a")
    table.add_row(text.replace("[", "("))
    console.print(table)
sys.stdout.flush()
cli._fail("".join(HOSTILE), 2)
"""
# Colours, weights and line drawing of tables are Rich's own: select graphic rendition, and nothing else.
STYLE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_control_character_reaches_a_terminal_or_a_pipe(is_terminal: bool) -> None:
    reading, writing = pty.openpty() if is_terminal else os.pipe()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "200", "PYTHONIOENCODING": "utf-8:replace"}
    process = subprocess.Popen([sys.executable, "-c", PRINTS], stdout=writing, stderr=writing, env=environment)
    os.close(writing)
    shown = bytearray()
    while True:
        try:
            part = os.read(reading, 65536)
        # What a pseudo-terminal says when the last process has closed its end.
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(reading)
    assert process.wait() == 2
    text = shown.decode()
    assert "Traceback" not in text
    assert "gone" in text
    # A terminal turns each end of line into two characters; tabs are between the columns of a pipe.
    left = STYLE.sub("", text.replace("\r\n", "\n")) if is_terminal else text
    assert {char for char in left if not char.isprintable()} <= ({"\n"} if is_terminal else {"\n", "\t"})


def test_every_command_prints_through_these_functions() -> None:
    wrong = []
    for path in sorted(DEPLOY.rglob("*.py")):
        name = str(path.relative_to(DEPLOY))
        if name.startswith(EXEMPT):
            continue
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            text = ast.get_source_segment(source, node) or ""
            if node.func.id == "print" and not re.search(r"printable|plain\(", text):
                wrong.append(f"{name}:{node.lineno} prints text as it is")
            if node.func.id == "Console":
                wrong.append(f"{name}:{node.lineno} makes a console of its own: options.console is for all commands")
    assert wrong == []
