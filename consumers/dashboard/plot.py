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
_BAR_WIDTH_MAX = 64
_SPANS_WIDTH, _LANE, _LANES_LEFT = 960, 16, 64
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
    is_dashed: bool = False
    "so that a curve below it can be seen"


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram."""

    name: str
    amount: float
    href: str | None = None
    is_chosen: bool = False
    slot: int = 0


@dataclass(frozen=True)
class Span:
    """A stretch of time in a lane of its kind."""

    lane: str
    begin: float
    end: float
    told: str
    slot: int = 0
    href: str | None = None


def line_plot(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str = "weight version",
    x_is_whole: bool = True,
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
    xs = [x for curve in drawn for x, _ in curve.points]
    frame = _frame(xs, lows, highs, y_low, y_high, x_is_whole)
    shade = [_shade(drawn[0], frame)] if len(drawn) == 1 and not drawn[0].interval else []
    lines = [_drawn(curve, frame) for curve in drawn]
    body = [frame.grid(x_label), shade, *lines, _strips(drawn, frame, x_label, link)]
    return _figure(title, body, [(curve.name, curve.slot) for curve in drawn], _newest(drawn))


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
    return _figure(title, body, [(curve.name, curve.slot) for curve in drawn], _newest(drawn))


def bar_plot(title: str, bars: Sequence[Bar], x_label: str = "") -> Element:
    """Vertical bars with their names below; bars with an address are links."""
    if not bars:
        return _empty(title)
    high = _round_up(max(bar.amount for bar in bars)) or 1.0
    frame = _Frame(0.0, float(len(bars)), 0.0, high)
    every = -(-len(bars) // 10)
    letters = int((_WIDTH - _LEFT - _RIGHT) * every / len(bars) / _LETTER)
    shown = [_bar(bar, number, frame, letters if number % every == 0 else 0) for number, bar in enumerate(bars)]
    return _figure(title, [frame.levels(), *shown, _x_label(x_label)], [])


def span_plot(title: str, spans: Sequence[Span]) -> Element | None:
    """Where the time went: a lane for each kind, from the first beginning to the last end. None without any time."""
    first, last = min((one.begin for one in spans), default=0.0), max((one.end for one in spans), default=0.0)
    if last <= first:
        return None
    lanes = list(dict.fromkeys(one.lane for one in spans))
    height = _LANE * len(lanes) + 2
    scale = (_SPANS_WIDTH - _LANES_LEFT) / (last - first)
    names = [el("text", {"class": "tick", "x": 0, "y": _LANE * place + 13}, lane) for place, lane in enumerate(lanes)]
    shown = [_span(one, _LANES_LEFT + (one.begin - first) * scale, scale, lanes.index(one.lane)) for one in spans]
    kind = {"viewBox": f"0 0 {_SPANS_WIDTH} {height}", "role": "group", "aria-label": title}
    caption = el("figcaption", el("b", title), el("output"))
    return el("figure", {"class": "plot spans"}, caption, el("svg", kind, names, shown))


def _span(span: Span, x: float, scale: float, lane: int) -> Element:
    # What took no time is still there.
    width = max(3.0, (span.end - span.begin) * scale)
    left = min(x, _SPANS_WIDTH - width)
    shape = {"class": f"bar s{span.slot % _SLOTS}", "x": round(left, 1), "width": round(width, 1), "rx": 2}
    inside = (el("rect", shape | {"y": _LANE * lane + 3, "height": _LANE - 4}), el("title", span.told))
    if span.href is None:
        return el("g", *inside)
    return el("a", {"href": span.href, "tabindex": -1, "aria-label": span.told}, *inside)


def _bar(bar: Bar, number: int, frame: "_Frame", letters: int) -> Element:
    left, top = frame.place((number + 0.08, bar.amount))
    right, bottom = frame.place((number + 0.92, 0.0))
    # A few bars as wide as the plot would look like a wall.
    width = round(min(right - left, _BAR_WIDTH_MAX), 1)
    x = round((left + right - width) / 2, 1)
    told = f"{bar.name}: {bar.amount:,.0f}"
    # The strip is as high as the plot: a bar of one among thousands could not be hit.
    strip = {"class": "strip", "x": x, "y": _TOP, "width": width, "height": _HEIGHT - _TOP - _BOTTOM}
    shape = {"class": f"bar s{bar.slot}{' chosen' if bar.is_chosen else ''}", "x": x, "y": top, "width": width}
    label = {"class": "tick", "x": round((left + right) / 2, 1), "y": _HEIGHT - 18, "text-anchor": "middle"}
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
    x_is_whole: bool = True

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
            for x, text in ((x, number(x)) for x in _round_numbers(self.x_low, self.x_high, self.x_is_whole))
        ]
        return [*self.levels(), *ticks, _x_label(x_label)]


def _x_label(told: str) -> Element:
    return el("text", {"class": "tick", "x": _WIDTH - _RIGHT, "y": _HEIGHT - 4, "text-anchor": "end"}, told)


def number(value: float | None) -> str:
    """A figure for people: four significant digits, thousands separated."""
    if value is None:
        return "–"
    if value and abs(value) < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _frame(
    xs: Sequence[float],
    lows: Sequence[float],
    highs: Sequence[float],
    y_low: float | None,
    y_high: float | None,
    x_is_whole: bool = True,
) -> _Frame:
    low = y_low if y_low is not None else min(0.0, -_round_up(-min(lows)))
    high = y_high if y_high is not None else _round_up(max(highs))
    # A single point, or only zeros, would divide by zero.
    x_high = max(max(xs), min(xs) + (1 if x_is_whole else 0.01))
    return _Frame(min(xs), x_high, low, high if high > low else low + 1, x_is_whole)


def _drawn(curve: Curve, frame: _Frame) -> list[Element]:
    places = [frame.place(point) for point in curve.points]
    told = " ".join(f"{x},{y}" for x, y in places)
    look = f"curve s{curve.slot % _SLOTS}{' dashed' if curve.is_dashed else ''}"
    parts = [el("polyline", {"class": look, "points": told})]
    if curve.interval:
        xs = [band[0] for band in curve.interval]
        lows, highs = [band[1] for band in curve.interval], [band[2] for band in curve.interval]
        parts.insert(0, _area(xs, lows, highs, frame, curve.slot, "band"))
    # A polyline of one point is invisible.
    if curve.marks or len(places) == 1:
        parts += [el("circle", {"class": f"mark s{curve.slot % _SLOTS}", "cx": x, "cy": y, "r": 3}) for x, y in places]
    return parts


def _shade(curve: Curve, frame: _Frame) -> Element:
    """The area between a curve that stands alone and the bottom of its plot."""
    xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
    return _area(xs, [frame.y_low] * len(xs), ys, frame, curve.slot, "shade")


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


def _newest(curves: Sequence[Curve]) -> str:
    """The newest figures, which stand above a plot that nobody points at."""
    if len(curves) == 1:
        return f"newest {number(curves[0].points[-1][1])}"
    return f"newest: {', '.join(f'{curve.name} {number(curve.points[-1][1])}' for curve in curves)}"


def _figure(title: str, body: Sequence[object], series: Sequence[tuple[str, int]], newest: str = "") -> Element:
    names = [el("span", el("i", {"class": f"s{slot % _SLOTS}"}), name) for name, slot in series]
    # A group, not an image: inside an image links could not be reached.
    drawing = el("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "group", "aria-label": title}, *body)
    return el(
        "figure",
        {"class": "plot"},
        el("figcaption", el("b", title), el("output", {"data-rest": newest or None}, newest)),
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


def _round_numbers(low: float, high: float, are_whole: bool) -> list[float]:
    """Seven at most."""
    span = high - low
    powers = range(0 if are_whole else -4, 18)
    step = next(digit * 10.0**power for power in powers for digit in (1, 2, 5) if span <= 6 * digit * 10**power)
    first = math.ceil(low / step) * step
    return [first + step * count for count in range(int((high - first) // step) + 1)]
