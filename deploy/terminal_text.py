"""Text that others wrote, as a terminal may show it: agents, jobs and messages choose names, answers and errors.

Control characters (C0, DEL, C1) can move the cursor, set the title or type into the shell; bidi and other invisible
characters make a line read as something else. They are shown as escapes. Every command prints through `TerminalConsole`
or these functions.
"""

import json
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_TAB = "    "


def printable(text: str, kept: str = "") -> str:
    """The text with every character that is not printable shown as an escape, except those in `kept`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in kept else _escape(char) for char in text)


def plain(text: str) -> str:
    """The same for a text of several lines; a tab is four spaces."""
    return printable(text.replace("\t", _TAB), kept="\n")


def one_line(text: str, characters_max: int) -> str:
    """The text on one line: what does not print is a space, and what is too long is cut."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= characters_max else shown[: characters_max - 1] + "…"


def printable_json(text: str) -> str:
    """JSON text in one line that means the same: what is not printable becomes an escape of JSON."""
    if text.isprintable():
        return text
    # Outside of strings JSON has printable characters and white space alone.
    return "".join(char if char.isprintable() or char in "\n\t" else json.dumps(char)[1:-1] for char in text)


def cells(values: Iterable[str]) -> list[Text]:
    """Cells or headings of a table. As Text: square brackets would be read as markup."""
    return [Text(printable(value)) for value in values]


class TerminalConsole(Console):
    """A console that never passes on a control character of a text, whatever is printed on it. Its own are kept apart."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # A segment with `control` is an instruction of Rich itself: cursor movements of a live display.
            yield segment if segment.control else Segment(printable(segment.text, kept="\n\t"), segment.style)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()
