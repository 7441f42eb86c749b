"""A recording of a terminal as one SVG that plays in a browser and in a README, by CSS alone."""

import io
import re
from collections.abc import Sequence

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType

_COLUMNS = 100
_FRAMES_MAX = 24
_FRAME_SECONDS = 1.0
_LAST_FRAME_SECONDS = 4.0
_OUTER = re.compile(r"<svg[^>]*?(?P<box>viewBox=\"[^\"]*\")[^>]*>(?P<inner>.*)</svg>", re.DOTALL)
# Rich's SVG loads fonts from another host; without them the reader's own monospaced font is used.
_WITHOUT_WEB_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def recording_of(looks: Sequence[RenderableType]) -> str:
    """What a terminal showed, one look after another: at most so many, evenly spread."""
    return animation([frame(look, number) for number, look in enumerate(thin(looks, _FRAMES_MAX))])


def thin[Item](items: Sequence[Item], count: int) -> list[Item]:
    """At most so many items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(number * (len(items) - 1) / (count - 1))] for number in range(count)]


def frame(shown: RenderableType, number: int) -> str:
    """What a terminal would show, as an SVG whose class names no other frame uses."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    return console.export_svg(title="replayground run", code_format=_WITHOUT_WEB_FONTS, unique_id=f"frame{number}")


def animation(frames: Sequence[str]) -> str:
    """Frames one after another without end, by CSS alone: scripts do not run in a picture."""
    starts = [number * _FRAME_SECONDS for number in range(len(frames))]
    total_seconds = starts[-1] + _LAST_FRAME_SECONDS
    parts: list[str] = []
    rules: list[str] = []
    box = ""
    for number, (text, start) in enumerate(zip(frames, starts, strict=True)):
        found = _OUTER.search(text)
        assert found is not None, "rich writes one svg element with a viewBox"
        box = box or found["box"]
        end = starts[number + 1] if number + 1 < len(frames) else total_seconds
        rules.append(_visible_between(number, 100 * start / total_seconds, 100 * end / total_seconds, total_seconds))
        parts.append(f'<g class="shown{number}">{found["inner"]}</g>')
    style = "\n".join(rules)
    return f'<svg {box} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{"".join(parts)}</svg>\n'


def _visible_between(number: int, from_percent: float, to_percent: float, total_seconds: float) -> str:
    # step-end holds each value until the next key frame: nothing fades, and exactly one frame is visible at a time
    hidden = "0% {visibility:hidden} " if from_percent else ""
    shown = f"{from_percent:.3f}% {{visibility:visible}}"
    over = f" {to_percent:.3f}% {{visibility:hidden}}" if to_percent < 100 else ""
    return (
        f"@keyframes show{number} {{{hidden}{shown}{over}}} "
        f".shown{number} {{visibility:hidden; animation: show{number} {total_seconds:.1f}s step-end infinite}}"
    )
