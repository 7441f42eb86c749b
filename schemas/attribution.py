"""Which run a message belongs to, told by its first bytes. Pure.

Every event begins with `meta`, and that with `id` and `run_id`: in Avro two strings, each a length and its bytes, so the run is
known without decoding the rest. Readers of one run pass over the messages of others by it (decision 0023).
"""

from typing import Any

RUN_ID_BYTES_MAX = 255
"a longer one is nobody's: names of runs are short, and what follows from a message must not grow with what it claims"
_FIRST_FIELDS = [("id", "string"), ("run_id", "string")]


def begins_with_run(schema: Any) -> bool:
    """Whether whatever is written by this schema begins with `meta.id` and `meta.run_id`, both plain strings."""
    meta = _first_type(schema, "meta")
    if not isinstance(meta, dict) or meta.get("type") != "record":
        return False
    fields = meta.get("fields")
    return isinstance(fields, list) and [_name_and_type(field) for field in fields[:2]] == _FIRST_FIELDS


def run_at(data: bytes, start: int) -> str | None:
    """The second of the two strings that begin at `start`; None when there are no such strings. Never raises."""
    try:
        skipped, at = _length(data, start)
        length, at = _length(data, at + skipped)
        if length > RUN_ID_BYTES_MAX or at + length > len(data):
            return None
        return data[at : at + length].decode()
    except (IndexError, ValueError):  # the bytes end, or are no length or no text
        return None


def _length(data: bytes, at: int) -> tuple[int, int]:
    """A length in Avro's variable zigzag form, and where it ends. Raises IndexError, ValueError."""
    byte = data[at]
    number, shift = byte & 0x7F, 7
    while byte >= 0x80:
        if shift > 63:
            raise ValueError("a length has at most ten bytes")
        at += 1
        byte = data[at]
        number |= (byte & 0x7F) << shift
        shift += 7
    if number & 1:
        raise ValueError("a length is never negative")
    return number >> 1, at + 1


def _first_type(schema: Any, name: str) -> Any:
    """The type of the first field of a record, if that field has this name."""
    fields = schema.get("fields") if isinstance(schema, dict) else None
    first = fields[0] if isinstance(fields, list) and fields else None
    return first.get("type") if isinstance(first, dict) and first.get("name") == name else None


def _name_and_type(field: Any) -> tuple[Any, Any] | None:
    return (field.get("name"), field.get("type")) if isinstance(field, dict) else None
