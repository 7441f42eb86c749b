"""Regular expressions in linear time: what an agent writes must not make a pattern run for ever. Pure.

The syntax is that of RE2, which has neither look-around nor back-references.
"""

from functools import lru_cache
from typing import Any

import re2


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> Any:
    """A pattern of RE2. Raises ValueError."""
    options = re2.Options()
    # It would write to stderr besides raising.
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeError) as error:
        told = error.args[0] if error.args else error
        reason = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
        raise ValueError(f"{pattern!r} is not a pattern of RE2: {reason}") from error


def found_in(pattern: str, text: str, *, whole: bool = False) -> str | None:
    """What a pattern matches in a text, or in the whole of it; None when it does not. Raises ValueError for a bad
    pattern, whatever the text is."""
    # Half of a surrogate pair, which RE2 cannot read.
    readable = text.encode("utf-8", "replace").decode()
    match = compiled(pattern).fullmatch(readable) if whole else compiled(pattern).search(readable)
    return None if match is None else str(match.group(0))
