"""Numbers as people and agents write them: 1,234.5 or $12 or 40%. Pure."""

import math
import re
from decimal import Decimal

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,4})?"
_WHOLE = re.compile(rf"([-+]?)[$€£¥]?\s?({_NUMBER})\s?%?")
_ANYWHERE = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4})?|[-+]?\.\d+")
_DIGITS_MAX = 400
"a longer text is no number that a float holds"
_LARGE = 1e9
"twelve digits of a larger number would leave out what stands behind its point"


def number_of(text: str) -> float | None:
    """The finite number that a text is, without currency, percent sign and thousands separators; else None. A whole
    number is an int, since a float would take ids of seventeen digits for each other."""
    text = text.strip().rstrip(".")
    if len(text) > _DIGITS_MAX:
        return None
    match = _WHOLE.fullmatch(text)
    return None if match is None else _finite(match[1] + match[2])


def last_number_in(text: str) -> float | None:
    """The last finite number in a text; None when there is none."""
    found = [number for match in _ANYWHERE.finditer(text) if (number := _finite(match[0])) is not None]
    return found[-1] if found else None


def written(number: float) -> str:
    """A finite number as text, by which it is compared: whole numbers exactly, others to twelve digits, so that 0.1 + 0.2
    equals 0.3."""
    if isinstance(number, int):
        return str(number)
    if number.is_integer():
        # By its own digits, not by the float's value: 1e23 is a one and 23 zeros.
        return str(int(Decimal(repr(number))))
    return f"{number:.12g}" if abs(number) < _LARGE else f"{number:.15g}"


def _finite(text: str) -> float | None:
    if len(text) > _DIGITS_MAX:
        return None
    digits = text.replace(",", "")
    try:
        number = float(digits)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(digits) if digits.lstrip("+-").isdecimal() else number
