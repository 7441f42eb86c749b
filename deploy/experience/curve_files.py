"""Curves as the files of TensorBoard and of an offline run of W&B, without either library: both are protobuf in a log.

    tensorboard   records of length, checksum, Event, checksum (TFRecord with masked CRC-32C)
    wandb         a log of LevelDB: blocks of 32 KiB, a Record in one or more fragments, each with a CRC-32

Only the fields that a curve needs are written. Numbers of fields are those of tensorflow/core/util/event.proto,
tensorflow/core/framework/summary.proto and wandb_internal.proto; they never change their meaning.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """Named figures at one step of a run."""

    step: int
    at_seconds: float
    "event time, since the epoch"
    figures: Mapping[str, float]


# --- protobuf

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


def _varint(value: int) -> bytes:
    encoded = bytearray()
    value &= 2**64 - 1  # negative numbers as two's complement
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _integer(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _key(number, _FIXED_64) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _key(number, _FIXED_32) + struct.pack("<f", value)


def _message(number: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return _key(number, _BYTES) + _varint(len(body)) + body


def _text(number: int, value: str) -> bytes:
    return _message(number, value.encode())


# --- TensorBoard

_POLYNOMIAL = 0x82F63B78


def _crc32c_table() -> tuple[int, ...]:
    table: list[int] = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC32C = _crc32c_table()


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC32C[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def tensorboard_file(points: Sequence[Point]) -> bytes:
    """An event file: one scalar for each figure of each point."""
    first = points[0].at_seconds if points else 0.0
    events = [_double(1, first) + _text(3, "brain.Event:2"), *map(_event, points)]
    return b"".join(map(_tf_record, events))


def _event(point: Point) -> bytes:
    values = [_message(1, _text(1, name), _float(2, value)) for name, value in sorted(point.figures.items())]
    return _double(1, point.at_seconds) + _integer(2, point.step) + _message(5, *values)


def _tf_record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _masked(length) + event + _masked(event)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# --- W&B

_MAGIC = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK_BYTES = 32 * 1024
_HEAD_BYTES = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def wandb_file(run_id: str, project: str, points: Sequence[Point]) -> bytes:
    """The transaction log of an offline run, which `wandb sync` sends to a server. Steps must grow."""
    first, last = (points[0].at_seconds, points[-1].at_seconds) if points else (0.0, 0.0)
    seconds = int(first)
    started = _integer(1, seconds) + _integer(2, round((first - seconds) * 1e9))
    run = _message(17, _text(1, run_id), _text(3, project), _text(8, run_id), _message(17, started))
    history = [_message(2, *_history(point, first), _message(2, _integer(1, point.step))) for point in points]
    summary = [_message(3, *_items(points[-1].figures))] if points else []
    records = [run, *history, *summary, _message(18, _integer(2, int(last - first)))]
    return _MAGIC + b"".join(_fragments(_numbered(records)))


def _numbered(records: Iterable[bytes]) -> Iterator[bytes]:
    for number, record in enumerate(records, start=1):
        yield _integer(1, number) + record


def _history(point: Point, first: float) -> list[bytes]:
    own = {"_step": point.step, "_timestamp": point.at_seconds, "_runtime": point.at_seconds - first}
    return _items({**own, **point.figures})


def _items(figures: Mapping[str, float]) -> list[bytes]:
    return [_message(1, _text(1, name), _text(16, json.dumps(value))) for name, value in sorted(figures.items())]


def _fragments(records: Iterable[bytes]) -> Iterator[bytes]:
    """Records in the blocks of a LevelDB log, of which the magic bytes are the beginning."""
    at = len(_MAGIC)
    for record in records:
        rest, is_first = record, True
        while is_first or rest:
            room = _BLOCK_BYTES - at % _BLOCK_BYTES
            # A header is never split: what is left of a block is filled with zeros.
            if room < _HEAD_BYTES:
                yield bytes(room)
                at += room
                continue
            part, rest = rest[: room - _HEAD_BYTES], rest[room - _HEAD_BYTES :]
            kind = (_FULL if is_first else _LAST) if not rest else (_FIRST if is_first else _MIDDLE)
            yield struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            at += _HEAD_BYTES + len(part)
            is_first = False
