"""Plots for docs/bench.md, as SVG files that stand alone."""

from pathlib import Path

from consumers.reports.svg import Line, line_chart

FOLDER = Path(__file__).parent.parent / "docs" / "plots"
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#667}.rule{stroke:#99a;stroke-width:.5;opacity:.5}</style>"
    '<rect width="640" height="260" fill="#fff"/>'
)


def write_plot(name: str, title: str, lines: list[Line], x_label: str) -> None:
    """Writes docs/plots/<name>.svg."""
    svg = line_chart(title, lines, x_label=x_label).partition('<div class="legend">')[0]
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="260" ', 1)
    svg = svg.replace("</title>", f"</title>{_STYLE}", 1)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(svg + "\n")
