"""HTML as a tree of elements. Text stays text: it is escaped when the tree is rendered, and nothing else is written. Pure.

    el("p", {"class": "soft"}, "answered ", el("b", text_from_an_agent))

Attributes cannot run anything either: no `on…`, no `style`, and addresses only on this server.
"""

from collections.abc import Iterable, Mapping
from html import escape

from msgspec import Struct

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})
_ADDRESSES = frozenset({"href", "src", "action"})


class Element(Struct, frozen=True):
    """A tag with attributes and children."""

    tag: str
    attributes: Mapping[str, str]
    children: tuple[object, ...]


def el(tag: str, *parts: object) -> Element:
    """An element. Parts that are mappings are attributes, all others are children: elements, text, numbers, None, or
    iterables of them. An attribute that is None or False is left out, True stands without a value."""
    attributes: dict[str, str] = {}
    children: list[object] = []
    for part in parts:
        if isinstance(part, Mapping):
            attributes |= {
                name: "" if value is True else str(value)
                for name, value in part.items()
                if value is not None and value is not False
            }
        else:
            children.append(part)
    _require_harmless(attributes)
    return Element(tag, attributes, tuple(children))


def document(root: Element) -> str:
    """A whole page."""
    return f"<!doctype html>{render(root)}"


def render(node: object) -> str:
    """The HTML of an element, of text, or of several of them."""
    parts: list[str] = []
    _write(node, parts)
    return "".join(parts)


def visible(text: str) -> str:
    """Text with the characters made visible that would reorder, hide or end what stands around them."""
    return text.translate(_HIDDEN)


def _write(node: object, parts: list[str]) -> None:
    match node:
        case None:
            return
        case str():
            parts.append(escape(visible(node)))
        case int() | float():
            parts.append(str(node))
        case Element():
            told = "".join(f' {name}="{escape(visible(value))}"' for name, value in node.attributes.items())
            parts.append(f"<{node.tag}{told}>")
            for child in node.children:
                _write(child, parts)
            if node.tag not in _VOID:
                parts.append(f"</{node.tag}>")
        case Iterable():
            for child in node:
                _write(child, parts)
        case _:
            raise TypeError(f"a page holds elements and text, not {type(node).__name__}")


def _require_harmless(attributes: Mapping[str, str]) -> None:
    for name, value in attributes.items():
        if name.startswith("on") or name == "style":
            raise ValueError(f"attribute {name} is not written: behaviour and looks stand in assets/")
        # Two slashes would be another host.
        if name in _ADDRESSES and (not value.startswith(("/", "?", "#")) or value.startswith(("//", "/\\"))):
            raise ValueError(f"{value!r} is no address on this server")


def _hidden_characters() -> dict[int, str]:
    controls = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"}
    # C1 controls; marks, embeddings and isolates that change the direction of text; separators; invisible characters.
    others = (
        *range(0x80, 0xA0),
        *(0x61C, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, 0xFEFF),
        *range(0x202A, 0x202F),
        *range(0x2060, 0x2070),
        *range(0xD800, 0xE000),  # halves of surrogate pairs, which have no bytes in UTF-8
    )
    return controls | {code: f"\u27e8U+{code:04X}\u27e9" for code in others}


_HIDDEN = _hidden_characters()
