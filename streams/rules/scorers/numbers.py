"""Numbers as people and agents write them: 1,234.5 or $12 or 40%. Pure."""

import math
import re

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,4})?"
_WHOLE = re.compile(rf"([-+]?)[$€£¥]?\s?({_NUMBER})\s?%?")
_ANYWHERE = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4})?|[-+]?\.\d+")
_DIGITS_MAX = 400
"a longer text is no number that a float holds"


def number_of(text: str) -> float | None:
    """The finite number that a text is, without currency, percent sign and thousands separators; else None."""
    text = text.strip().rstrip(".")
    if len(text) > _DIGITS_MAX:
        return None
    match = _WHOLE.fullmatch(text)
    return None if match is None else _finite(match[1] + match[2])


def last_number_in(text: str) -> float | None:
    """The last finite number in a text; None when there is none."""
    found = [number for match in _ANYWHERE.finditer(text) if (number := _finite(match[0])) is not None]
    return found[-1] if found else None


def _finite(text: str) -> float | None:
    if len(text) > _DIGITS_MAX:
        return None
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None
