"""Which run a message belongs to, by its first bytes. Pure.

Every event begins with `meta`, which begins with `id` and `run_id`. Avro writes these as two strings, each a length and
its bytes, so the run is known without decoding the rest. Readers of one run use it to skip the messages of other runs
without decoding them (decision 0023).
"""

from typing import Any

RUN_ID_BYTES_MAX = 255
"a longer run_id counts as none: names of runs are short, and a forged message must not make readers keep a long one"
_FIRST_FIELDS = [("id", "string"), ("run_id", "string")]


def begins_with_run(schema: Any) -> bool:
    """Whether every message of this schema begins with `meta.id` and `meta.run_id`, both plain strings."""
    meta = _first_type(schema, "meta")
    # A union would write its branch number before the record.
    if not isinstance(meta, dict) or meta.get("type") != "record":
        return False
    fields = meta.get("fields")
    # Only plain strings: optional, bytes and logical types are written or decoded differently.
    return isinstance(fields, list) and [_name_and_type(field) for field in fields[:2]] == _FIRST_FIELDS


def run_at(data: bytes, start: int) -> str | None:
    """The second of two Avro strings that begin at `start`; None when there are none. Never raises."""
    try:
        skipped, at = _length(data, start)
        length, at = _length(data, at + skipped)
        # Checked before slicing: a slice beyond the end is silently shorter.
        if length > RUN_ID_BYTES_MAX or at + length > len(data):
            return None
        return data[at : at + length].decode()
    except (IndexError, ValueError):  # the bytes end early, or are no valid length or UTF-8
        return None


def _length(data: bytes, at: int) -> tuple[int, int]:
    """An Avro length and the offset after it. Raises IndexError, ValueError."""
    # A zigzag varint: seven bits in each byte, low bits first; the lowest bit of the number is the sign.
    byte = data[at]
    number, shift = byte & 0x7F, 7
    while byte >= 0x80:
        # A 64-bit number has at most ten bytes. Without the bound, a long row of 0x80 would be read to its end.
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
