"""Plots for docs/bench.md, as standalone SVG files."""

from html import escape
from pathlib import Path

from replayground.consumers.reports.svg import Line, line_chart

FOLDER = Path(__file__).parent.parent / "docs" / "plots"
_WIDTH, _HEIGHT, _HEAD = 640, 310, 50
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#556}.rule{stroke:#99a;stroke-width:.5;opacity:.5}.head{fill:#223;font-weight:600}"
    f'</style><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
)


def write_plot(name: str, title: str, lines: list[Line], x_label: str) -> None:
    """Writes docs/plots/<name>.svg."""
    # The report's chart is HTML: its legend is a <div>, which an SVG file cannot hold. _legend draws it again.
    chart = line_chart(title, lines, x_label=x_label).partition('<div class="legend">')[0]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}">{_STYLE}'
        f'<text x="14" y="20" class="head">{escape(title)}</text>{_legend(lines)}'
        f'<g transform="translate(0 {_HEAD})">{chart.replace("<svg ", f'<svg width="{_WIDTH}" height="{_HEIGHT - _HEAD}" ', 1)}'
        "</g></svg>"
    )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(svg + "\n")


def _legend(lines: list[Line]) -> str:
    return "".join(
        f'<rect x="{46 + 110 * place}" y="33" width="18" height="4" fill="{line.colour}"/>'
        f'<text x="{70 + 110 * place}" y="40">{escape(line.name)}</text>'
        for place, line in enumerate(lines)
    )
