"""Text that others wrote, made fit for a terminal: what agents say may hold sequences that move the cursor, change the
title, or show characters in another order."""

_TAB = "    "


def plain(text: str) -> str:
    """The text with line breaks as they are, and every character that does not print (control characters, also those
    of C1, marks of direction, zero-width ones) as its escape."""
    return "".join(_shown(character) for character in text)


def one_line(text: str, characters_max: int) -> str:
    """The text on one line: what does not print is a space, and what is too long is cut."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= characters_max else shown[: characters_max - 1] + "…"


def _shown(character: str) -> str:
    if character == "\t":
        return _TAB
    # isprintable is False for all of the categories Cc, Cf, Cs, Co, Cn, Zl, Zp, and Zs but the space.
    if character == "\n" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
