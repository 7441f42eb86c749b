"""Curves in files that TensorBoard and W&B read: decoded here by protobuf itself, from the definitions of both.

They were also read by tensorboard 2 and by wandb's own reader once; neither library is in the environment of the tests.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from replayground.deploy.experience.curve_files import Point, crc32c, tensorboard_file, wandb_file
from replayground.deploy.experience.curves import curves_on, export_curves
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import RewardAssigned, StepTaken
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog
from tests.consumers.synthetic_run import SyntheticRun, run_of

POINTS = [Point(step, 1_790_000_000.5 + step, {"steps/loss": 0.5 / step, "a": float(step)}) for step in range(1, 900)]
_TYPES = {"double": 1, "float": 2, "int64": 3, "int32": 5, "string": 9}
# Message: (number, name, type, is repeated); another message's name is its type.
_DEFINITIONS = {
    "Value": [(1, "tag", "string", False), (2, "simple_value", "float", False)],
    "Summary": [(1, "value", "Value", True)],
    "Event": [
        (1, "wall_time", "double", False),
        (2, "step", "int64", False),
        (3, "file_version", "string", False),
        (5, "summary", "Summary", False),
    ],
    "Item": [(1, "key", "string", False), (16, "value_json", "string", False)],
    "Step": [(1, "num", "int64", False)],
    "History": [(1, "item", "Item", True), (2, "step", "Step", False)],
    "SummaryRecord": [(1, "update", "Item", True)],
    "Time": [(1, "seconds", "int64", False), (2, "nanos", "int32", False)],
    "Run": [
        (1, "run_id", "string", False),
        (3, "project", "string", False),
        (8, "display_name", "string", False),
        (17, "start_time", "Time", False),
    ],
    "Exit": [(1, "exit_code", "int32", False), (2, "runtime", "int32", False)],
    "Record": [
        (1, "num", "int64", False),
        (2, "history", "History", False),
        (3, "summary", "SummaryRecord", False),
        (17, "run", "Run", False),
        (18, "exit", "Exit", False),
    ],
}


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="curves.proto", package="curves", syntax="proto3")
    for name, fields in _DEFINITIONS.items():
        message = file.message_type.add(name=name)
        for number, field, kind, is_repeated in fields:
            made = message.field.add(name=field, number=number, label=3 if is_repeated else 1)
            made.type = _TYPES.get(kind, 11)
            if kind not in _TYPES:
                made.type_name = f".curves.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"curves.{name}")) for name in _DEFINITIONS
    }


MESSAGES = _messages()


def decoded(kind: str, data: bytes) -> Any:
    message = MESSAGES[kind].FromString(data)
    # Nothing that the definition does not have, and nothing twice.
    assert len(message.SerializeToString()) == len(data)
    return message


def tf_records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        head, body = data[at : at + 8], data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 8)[0] == masked(head)
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked(body)
        yield body
        at += 16 + length


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def leveldb_records(data: bytes) -> Iterator[bytes]:
    assert data[:7] == struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
    at, parts = 7, b""
    while at < len(data):
        room = 32768 - at % 32768
        if room < 7:
            assert not any(data[at : at + room])
            at += room
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + 7 : at + 7 + length]
        assert length <= room - 7
        assert checksum == zlib.crc32(bytes([kind]) + body)
        assert bool(parts) == (kind in (3, 4))
        parts += body
        if kind in (1, 4):
            yield parts
            parts = b""
        at += 7 + length
    assert not parts


def test_the_checksum_is_castagnolis() -> None:
    # RFC 3720, B.4
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_tensorboard_finds_every_figure() -> None:
    first, *events = [decoded("Event", record) for record in tf_records(tensorboard_file(POINTS))]
    assert first.file_version == "brain.Event:2"
    assert [(e.step, e.wall_time) for e in events] == [(point.step, point.at_seconds) for point in POINTS]
    for event, point in zip(events, POINTS, strict=True):
        assert {v.tag: v.simple_value for v in event.summary.value} == pytest.approx(dict(point.figures))


def test_wandb_finds_every_figure_across_blocks() -> None:
    data = wandb_file("run-1", "p", POINTS)
    assert len(data) > 3 * 32768
    run, *records = [decoded("Record", record) for record in leveldb_records(data)]
    assert [record.num for record in (run, *records)] == list(range(1, len(POINTS) + 4))
    assert (run.run.run_id, run.run.project, run.run.start_time.seconds) == ("run-1", "p", 1_790_000_001)
    history = [{item.key: json.loads(item.value_json) for item in r.history.item} for r in records[: len(POINTS)]]
    assert [r.history.step.num for r in records[: len(POINTS)]] == [point.step for point in POINTS]
    for shown, point in zip(history, POINTS, strict=True):
        assert shown == dict(point.figures) | {
            "_step": point.step,
            "_timestamp": point.at_seconds,
            "_runtime": point.at_seconds - POINTS[0].at_seconds,
        }
    assert {item.key for item in records[-2].summary.update} == {"steps/loss", "a"}
    assert records[-1].exit.runtime == 898


@pytest.fixture
def log(tmp_path: Path) -> MemoryLog:
    made = MemoryLog(Codec(MemoryRegistry(), Blobs(f"file://{tmp_path}/blobs")))
    for run_id in ("one", "two"):
        SyntheticRun(run_of(steps=3, demonstrations=3, run_id=run_id), evaluation_tasks=4).append_to(made)
    return made


def nothing(done: int, total: int) -> None:
    """Shows no progress."""


def test_curves_are_those_of_the_log(log: MemoryLog, tmp_path: Path) -> None:
    events = [delivery.event for delivery in log.reader(["steps", "rewards"]).poll(10_000, 0)]
    curves = curves_on(log, frozenset(), nothing)
    assert set(curves) == {"one", "two"}
    assert set(curves_on(log, frozenset(("two",)), nothing)) == {"two"}
    shown = {point.step: point.figures for point in curves["one"]}
    steps = [e for e in events if isinstance(e, StepTaken) and e.meta.run_id == "one"]
    assert {version for version, figures in shown.items() if any("seconds/" in name for name in figures)} == {
        step.new_version for step in steps if step.seconds
    }
    for step in (step for step in steps if step.kind == "grpo"):
        assert {f"steps/{name}": value for name, value in step.metrics.items()}.items() <= shown[
            step.new_version
        ].items()
    # Every trajectory of the made-up evaluations has one scorer and one attempt that counts.
    rewards = [e for e in events if isinstance(e, RewardAssigned) and e.meta.session_id == "eval-v0001-sampled"]
    counted = {
        e.meta.trajectory_id: e.score
        for e in reversed(rewards)
        if e.meta.run_id == "one" and e.ended_by != "infra_error"
    }
    assert shown[1]["evaluation/pass_at_1_sampled"] == sum(score == 1 for score in counted.values()) / len(counted)


def test_a_repeated_export_replaces_its_files(log: MemoryLog, tmp_path: Path) -> None:
    for _ in range(2):
        assert export_curves(log, tmp_path / "out", ("tensorboard", "wandb"), frozenset(), nothing) == 2
    files = sorted(
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*") if path.is_file()
    )
    assert [file.split("/")[:2] for file in files if file.startswith("tensorboard")] == [
        ["tensorboard", "one"],
        ["tensorboard", "two"],
    ]
    assert [file.rpartition("/")[2] for file in files if file.startswith("wandb")] == ["run-one.wandb", "run-two.wandb"]
