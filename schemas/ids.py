"""Identifiers: UUIDv7 for first-hand facts, UUIDv5 for derived facts.

Deriving a fact again gives the same id, so readers recognise repeats.
"""

import hashlib
import os
import time
import uuid

# Must never change: with another namespace, what is derived again would not match the ids on existing logs.
_NAMESPACE = uuid.UUID("6f0d8a52-8a4c-5d5b-9d55-7265706c6179").bytes


def now_microseconds() -> int:
    return time.time_ns() // 1000


def new_id(timestamp_microseconds: int | None = None) -> str:
    """A UUIDv7: sortable by time, unique by 74 random bits."""
    milliseconds = (now_microseconds() if timestamp_microseconds is None else timestamp_microseconds) // 1000
    # Layout of RFC 9562: 48 bits of time, version 7, 12 random bits, variant 0b10, 62 random bits.
    random_bits = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80
    value |= 0x7 << 76 | (random_bits >> 62 & 0xFFF) << 64
    value |= 0b10 << 62 | random_bits & 0x3FFF_FFFF_FFFF_FFFF
    return str(uuid.UUID(int=value))


def derived_id(kind: str, *inputs: object) -> str:
    """A UUIDv5 of the kind of fact and all inputs it was derived from."""
    # The separator keeps ("a", "b") and ("ab",) apart.
    name = "\x1f".join((kind, *map(str, inputs)))
    # What uuid.uuid5 does, in a third of the time: the version is 5, the variant 0b10 (RFC 9562).
    digest = hashlib.sha1(_NAMESPACE + name.encode(), usedforsecurity=False).hexdigest()
    variant = "89ab"[int(digest[16], 16) & 3]
    return f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:32]}"
