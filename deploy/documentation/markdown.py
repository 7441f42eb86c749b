"""Tables of the generated pages, as Markdown."""

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(columns), "|" + "---|" * len(columns), *(_row([_cell(text) for text in row]) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Text for a cell: one line, with the bar and the HTML bracket escaped."""
    # A bar would begin the next cell, and <NAME> would vanish as an unknown HTML tag.
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
