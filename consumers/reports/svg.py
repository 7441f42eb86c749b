"""Line charts and bars as SVG text, without scripts, fonts or other files. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 14, 42

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve. `marks` shows its points; `faint` is for noisy data behind its mean and leaves it out of the
    legend."""

    name: str
    points: Sequence[Point]
    colour: str
    marks: bool = False
    faint: bool = False


def line_chart(title: str, lines: Sequence[Line], *, x_label: str, y_max: float | None = None) -> str:
    """Curves over a common x; y starts at 0."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return _empty(title)
    x_low = min(x for line in drawn for x, _ in line.points)
    x_high = max(x for line in drawn for x, _ in line.points)
    y_high = y_max if y_max is not None else _nice(max(y for line in drawn for _, y in line.points))
    # At least 1 wide and high: a single point, or only zeros, would divide by zero.
    frame = _Frame(x_low, max(x_high, x_low + 1), y_high or 1.0)
    body = frame.grid(x_label) + "".join(_curve(line, frame) for line in drawn)
    return _svg(title, body) + _legend(drawn)


def mean_of_neighbours(points: Sequence[Point], width: int) -> list[Point]:
    """The running mean over `width` points before and after each point."""
    means: list[Point] = []
    for place, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, place - width) : place + width + 1]]
        means.append((x, sum(near) / len(near)))
    return means


def bars(title: str, amounts: Sequence[tuple[str, float]], unit: str, colour: str) -> str:
    """Horizontal bars, the eight largest, in descending order."""
    shown = sorted(amounts, key=lambda pair: -pair[1])[:8]
    greatest = max((amount for _, amount in shown), default=0.0) or 1.0
    rows = []
    for place, (name, amount) in enumerate(shown):
        top, width = 12 + place * 28, (amount / greatest) * (_WIDTH - 260)
        rows.append(
            f'<text x="120" y="{top + 14}" text-anchor="end" class="tick">{escape(name)}</text>'
            f'<rect x="130" y="{top}" width="{max(width, 1):.1f}" height="19" rx="3" fill="{colour}"/>'
            f'<text x="{138 + width:.1f}" y="{top + 14}" class="tick">{_number(amount)} {escape(unit)}</text>'
        )
    height = 20 + 28 * max(1, len(shown))
    return _svg(title, "".join(rows), height) if shown else _empty(title)


class _Frame:
    """Maps points of the data to coordinates of the picture."""

    def __init__(self, x_low: float, x_high: float, y_high: float) -> None:
        self._x_low, self._x_high, self._y_high = x_low, x_high, y_high

    def place(self, point: Point) -> tuple[float, float]:
        x = _LEFT + (point[0] - self._x_low) / (self._x_high - self._x_low) * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - min(point[1] / self._y_high, 1.0) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    def grid(self, x_label: str) -> str:
        parts = []
        for quarter in range(5):
            value = self._y_high * quarter / 4
            _, y = self.place((self._x_low, value))
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="rule"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end" class="tick">{_number(value)}</text>')
        for x_value in self._x_ticks():
            x, _ = self.place((x_value, 0))
            parts.append(
                f'<text x="{x}" y="{_HEIGHT - 24}" text-anchor="middle" class="tick">{_number(x_value)}</text>'
            )
        label = f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end" class="tick">{escape(x_label)}</text>'
        return "".join(parts) + label

    def _x_ticks(self) -> list[float]:
        """Round numbers, eight at most."""
        span = self._x_high - self._x_low
        step = next(digit * 10**power for power in range(18) for digit in (1, 2, 5) if span <= 7 * digit * 10**power)
        first = math.ceil(self._x_low / step) * step
        return [first + step * number for number in range(int((self._x_high - first) // step) + 1)]


def _curve(line: Line, frame: _Frame) -> str:
    places = [frame.place(point) for point in line.points]
    path = " ".join(f"{x},{y}" for x, y in places)
    opacity, width = ("0.35", "1") if line.faint else ("1", "2.4")
    stroke = f'stroke="{line.colour}" stroke-width="{width}" opacity="{opacity}"'
    curve = f'<polyline points="{path}" fill="none" {stroke} stroke-linejoin="round"/>'
    # A polyline of one point is invisible.
    if line.marks or len(places) == 1:
        curve += "".join(f'<circle cx="{x}" cy="{y}" r="4" fill="{line.colour}"/>' for x, y in places)
    return curve


def _svg(title: str, body: str, height: int = _HEIGHT) -> str:
    name = escape(title)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{name}"><title>{name}</title>{body}</svg>'


def _legend(lines: Sequence[Line]) -> str:
    named = [line for line in lines if not line.faint]
    items = "".join(f'<span><i style="background:{line.colour}"></i>{escape(line.name)}</span>' for line in named)
    return f'<div class="legend">{items}</div>'


def _empty(title: str) -> str:
    return f'<p class="empty">{escape(title)}: nothing to show yet</p>'


def _nice(value: float) -> float:
    """The next round number up to 100; above that the value itself."""
    for step in (1.0, 2.0, 4.0, 8.0, 10.0, 20.0, 40.0, 80.0, 100.0):
        if value <= step:
            return step
    return value


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"
