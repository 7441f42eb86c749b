"""Curves, stacked areas and bars as SVG elements. Colours are classes (s0 … s7), so that they follow light and dark. Pure.

Every x has an invisible strip over the whole height: it carries the figures as its title, which assets/page.js also
shows above the plot, and a link where there is more to see.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from replayground.consumers.dashboard.markup import Element, el

_WIDTH, _HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 10, 34
_LETTER = 7.5
"width of a letter of a tick"
_SLOTS = 8
"colours of series; with more series they repeat"

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One series over x."""

    name: str
    points: Sequence[Point]
    slot: int = 0
    marks: bool = False
    "whether its points are shown as dots"
    interval: Sequence[tuple[float, float, float]] = ()
    "x, low and high of a band around it"


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram."""

    name: str
    amount: float
    href: str | None = None
    is_chosen: bool = False
    slot: int = 0


def line_plot(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str = "weight version",
    y_low: float | None = None,
    y_high: float | None = None,
    link: Callable[[float], str] | None = None,
) -> Element:
    """Curves over a common x. `link` gives the address behind an x."""
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return _empty(title)
    highs = [y for curve in drawn for _, y in curve.points] + [band[2] for curve in drawn for band in curve.interval]
    lows = [y for curve in drawn for _, y in curve.points] + [band[1] for curve in drawn for band in curve.interval]
    frame = _frame([x for curve in drawn for x, _ in curve.points], lows, highs, y_low, y_high)
    body = [frame.grid(x_label), *(_drawn(curve, frame) for curve in drawn), _strips(drawn, frame, x_label, link)]
    return _figure(title, body, [(curve.name, curve.slot) for curve in drawn])


def stacked_plot(
    title: str, curves: Sequence[Curve], *, x_label: str = "weight version", link: Callable[[float], str] | None = None
) -> Element:
    """Areas on top of each other; all curves have the same xs."""
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return _empty(title)
    xs = [x for x, _ in drawn[0].points]
    floor = [0.0] * len(xs)
    layers: list[tuple[Curve, list[float], list[float]]] = []
    for curve in drawn:
        top = [low + y for low, (_, y) in zip(floor, curve.points, strict=True)]
        layers.append((curve, floor, top))
        floor = top
    frame = _frame(xs, [0.0], floor, 0.0, None)
    areas = [_area(xs, low, high, frame, curve.slot, "area") for curve, low, high in layers]
    body = [frame.grid(x_label), *areas, _strips(drawn, frame, x_label, link)]
    return _figure(title, body, [(curve.name, curve.slot) for curve in drawn])


def bar_plot(title: str, bars: Sequence[Bar]) -> Element:
    """Vertical bars with their names below; bars with an address are links."""
    if not bars:
        return _empty(title)
    high = _round_up(max(bar.amount for bar in bars)) or 1.0
    frame = _Frame(0.0, float(len(bars)), 0.0, high)
    every = -(-len(bars) // 10)
    letters = int((_WIDTH - _LEFT - _RIGHT) * every / len(bars) / _LETTER)
    shown = [_bar(bar, number, frame, letters if number % every == 0 else 0) for number, bar in enumerate(bars)]
    return _figure(title, [frame.levels(), *shown], [])


def _bar(bar: Bar, number: int, frame: "_Frame", letters: int) -> Element:
    left, top = frame.place((number + 0.08, bar.amount))
    right, bottom = frame.place((number + 0.92, 0.0))
    width = round(right - left, 1)
    told = f"{bar.name}: {bar.amount:,.0f}"
    # The strip is as high as the plot: a bar of one among thousands could not be hit.
    strip = {"class": "strip", "x": left, "y": _TOP, "width": width, "height": _HEIGHT - _TOP - _BOTTOM}
    shape = {"class": f"bar s{bar.slot}{' chosen' if bar.is_chosen else ''}", "x": left, "y": top, "width": width}
    label = {"class": "tick", "x": round((left + right) / 2, 1), "y": _HEIGHT - 14, "text-anchor": "middle"}
    inside = (
        el("rect", shape | {"height": round(max(bottom - top, 1.5 if bar.amount else 0), 1), "rx": 2}),
        el("rect", strip),
        el("text", label, bar.name if len(bar.name) <= letters else f"{bar.name[: letters - 1]}…") if letters else None,
        el("title", told),
    )
    # SVG links take the keyboard too.
    return el("a", {"href": bar.href, "aria-label": told}, *inside) if bar.href else el("g", *inside)


@dataclass(frozen=True)
class _Frame:
    """Maps points of the data to coordinates of the picture."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def place(self, point: Point) -> tuple[float, float]:
        x = _LEFT + (point[0] - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)
        share = (point[1] - self.y_low) / (self.y_high - self.y_low)
        return round(x, 1), round(_HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def levels(self) -> list[Element]:
        parts: list[Element] = []
        for quarter in range(5):
            value = self.y_low + (self.y_high - self.y_low) * quarter / 4
            _, y = self.place((self.x_low, value))
            parts.append(el("line", {"class": "rule", "x1": _LEFT, "x2": _WIDTH - _RIGHT, "y1": y, "y2": y}))
            parts.append(el("text", {"class": "tick", "x": _LEFT - 6, "y": y + 4, "text-anchor": "end"}, number(value)))
        return parts

    def grid(self, x_label: str) -> list[Element]:
        ticks = [
            el("text", {"class": "tick", "x": self.place((x, 0))[0], "y": _HEIGHT - 18, "text-anchor": "middle"}, text)
            for x, text in ((x, number(x)) for x in _round_numbers(self.x_low, self.x_high))
        ]
        label = {"class": "tick", "x": _WIDTH - _RIGHT, "y": _HEIGHT - 4, "text-anchor": "end"}
        return [*self.levels(), *ticks, el("text", label, x_label)]


def number(value: float | None) -> str:
    """A figure for people: four significant digits, thousands separated."""
    if value is None:
        return "–"
    if value and abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _frame(
    xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], y_low: float | None, y_high: float | None
) -> _Frame:
    low = y_low if y_low is not None else min(0.0, -_round_up(-min(lows)))
    high = y_high if y_high is not None else _round_up(max(highs))
    # A single point, or only zeros, would divide by zero.
    return _Frame(min(xs), max(max(xs), min(xs) + 1), low, high if high > low else low + 1)


def _drawn(curve: Curve, frame: _Frame) -> list[Element]:
    places = [frame.place(point) for point in curve.points]
    told = " ".join(f"{x},{y}" for x, y in places)
    parts = [el("polyline", {"class": f"curve s{curve.slot % _SLOTS}", "points": told})]
    if curve.interval:
        xs = [band[0] for band in curve.interval]
        lows, highs = [band[1] for band in curve.interval], [band[2] for band in curve.interval]
        parts.insert(0, _area(xs, lows, highs, frame, curve.slot, "band"))
    # A polyline of one point is invisible.
    if curve.marks or len(places) == 1:
        parts += [el("circle", {"class": f"mark s{curve.slot % _SLOTS}", "cx": x, "cy": y, "r": 3}) for x, y in places]
    return parts


def _area(
    xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], frame: _Frame, slot: int, kind: str
) -> Element:
    up = [frame.place((x, high)) for x, high in zip(xs, highs, strict=True)]
    down = [frame.place((x, low)) for x, low in zip(xs, lows, strict=True)]
    told = " ".join(f"{x},{y}" for x, y in (*up, *reversed(down)))
    return el("polygon", {"class": f"{kind} s{slot % _SLOTS}", "points": told})


def _strips(
    curves: Sequence[Curve], frame: _Frame, x_label: str, link: Callable[[float], str] | None
) -> Iterable[Element]:
    figures: dict[float, list[str]] = {}
    for curve in curves:
        for x, y in curve.points:
            figures.setdefault(x, []).append(f"{curve.name} {number(y)}")
    xs = sorted(figures)
    middles = [frame.place((x, frame.y_low))[0] for x in xs]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(middles)), _WIDTH - _RIGHT]
    for x, (left, right) in zip(xs, pairwise(edges), strict=True):
        shape = {"class": "strip", "x": round(left, 1), "y": _TOP, "width": round(max(right - left, 0.1), 1)}
        told = f"{x_label} {number(x)}: {', '.join(figures[x])}"
        inside = el("rect", shape | {"height": _HEIGHT - _TOP - _BOTTOM}), el("title", told)
        # Out of the order of the tabulator: hundreds of stops; the table below the plots has the same links.
        yield el("a", {"href": link(x), "tabindex": -1, "aria-label": told}, *inside) if link else el("g", *inside)


def _figure(title: str, body: Sequence[object], series: Sequence[tuple[str, int]]) -> Element:
    names = [el("span", el("i", {"class": f"s{slot % _SLOTS}"}), name) for name, slot in series]
    drawing = el("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img", "aria-label": title}, *body)
    return el(
        "figure",
        {"class": "plot"},
        el("figcaption", el("b", title), el("output")),
        drawing,
        el("div", {"class": "legend"}, *names) if len(series) > 1 else None,
    )


def _empty(title: str) -> Element:
    return el(
        "figure", {"class": "plot"}, el("figcaption", el("b", title)), el("p", {"class": "empty"}, "No data yet.")
    )


def _round_up(value: float) -> float:
    """The next number of the form 1, 2, 2.5, 4, 5 or 8 times a power of ten."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 2.5, 4, 5, 8, 10, 20) if value <= digit * power * (1 + 1e-9))


def _round_numbers(low: float, high: float) -> list[float]:
    """Seven at most."""
    span = high - low
    step = next(digit * 10.0**power for power in range(18) for digit in (1, 2, 5) if span <= 6 * digit * 10**power)
    first = math.ceil(low / step) * step
    return [first + step * count for count in range(int((high - first) // step) + 1)]
