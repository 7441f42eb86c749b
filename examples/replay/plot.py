"""The table and the plot of the showcase."""

from dataclasses import dataclass
from pathlib import Path

WIDTH, LEFT, LINE = 640, 210, 46
COLOURS = {"pass@1": "#1769aa", "flawed reward": "#c0392b"}


@dataclass(frozen=True)
class Row:
    """One version of the weights on the held-out tasks, with margins of 95 %."""

    name: str
    passed: float
    passed_margin: float
    paid: float
    paid_margin: float
    attempts: int


def table(rows: list[Row]) -> str:
    lines = [
        f"| {row.name} | {row.paid:.3f} ± {row.paid_margin:.3f} | {row.passed:.3f} ± {row.passed_margin:.3f} | {row.attempts} |"
        for row in rows
    ]
    return "\n".join(["| weights | flawed reward | true pass@1 | attempts |", "|---|---|---|---|", *lines]) + "\n"


def write_plot(rows: list[Row], file: Path) -> None:
    height = LINE * len(rows) + 70
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>')
    for place, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<circle cx="{LEFT + 130 * place}" cy="20" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 10 + 130 * place}" y="24" font-size="12">{name}</text>')
    for tenth in range(0, 11, 2):
        parts.append(f'<path d="M{x(tenth / 10)} 36V{height - 30}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tenth / 10) - 8}" y="{height - 12}" font-size="11">{tenth / 10}</text>')
    for number, row in enumerate(rows):
        y = 56 + LINE * number
        parts.append(f'<text x="10" y="{y + 8}" font-size="13">{row.name}</text>')
        parts += mark(row.passed, row.passed_margin, y, COLOURS["pass@1"])
        parts += mark(row.paid, row.paid_margin, y + 12, COLOURS["flawed reward"])
    file.write_text("\n".join([*parts, "</svg>"]) + "\n")


def mark(value: float, margin: float, y: int, colour: str) -> list[str]:
    """A point with its interval."""
    low, high = x(max(0.0, value - margin)), x(min(1.0, value + margin))
    return [
        f'<path d="M{low} {y}H{high}" stroke="{colour}" stroke-width="3" opacity=".5"/>',
        f'<circle cx="{x(value)}" cy="{y}" r="5" fill="{colour}"/>',
    ]


def x(value: float) -> float:
    return round(LEFT + (WIDTH - LEFT - 30) * value, 1)
