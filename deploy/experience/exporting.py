"""Trajectories and rewards from the log as files: Parquet, JSON lines, or a folder that Hugging Face `datasets` loads.

    FOLDER/manifest.json               what was asked, how far the log was read, and the digest of every file
    FOLDER/data/trajectories-0-….parquet   records of one partition, from the offset in its name on
    FOLDER/README.md                   of a dataset: its configurations

A file is complete or not there: it is fsynced and renamed into place, then the manifest names it. An export that was
interrupted, or repeated later, goes on where the manifest ends and writes no offset twice.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from replayground.deploy.experience.export_rows import KINDS, record
from replayground.deploy.local.folder import write_whole
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Position, RewardAssigned
from replayground.streams.log.protocol import Delivery, Log, Reader

Form = Literal["parquet", "jsonl", "datasets"]
_RECORDS_MAX = 2000
"records of a file"
_BYTES_MAX = 64 * 1024 * 1024
"of messages on the log: a file is ended early when its trajectories are long, which bounds the memory"
_POLL_SECONDS = 1.0


class ExportQuery(Struct, frozen=True, kw_only=True):
    """What is exported."""

    kinds: tuple[str, ...]
    form: Form
    runs: tuple[str, ...] = ()
    "empty = all"
    selection: str = ""
    "id of the TrajectoriesSelected; empty = all trajectories. Rewards are those of the chosen trajectories"
    first: int = 0
    "offset in each partition from which on"
    following: int | None = None
    "offset in each partition before which; null = the end of the log at the time"


class ExportedFile(Struct, frozen=True, kw_only=True):
    name: str
    topic: str
    partition: int
    first: int
    following: int
    "what was read for it: offsets first … following - 1"
    records: int
    bytes: int
    sha256: str


class Manifest(Struct, kw_only=True):
    """What a folder holds."""

    query: ExportQuery
    positions: list[Position]
    "the next offset to read, by partition"
    files: list[ExportedFile]

    @property
    def records(self) -> int:
        return sum(file.records for file in self.files)


Chosen = Mapping[int, Callable[[int], bool]]
"by partition of topic trajectories: whether an offset is selected"


class Export:
    """One export into one folder. Progress is called with the offsets that are read and those there are."""

    def __init__(self, log: Log, folder: Path, query: ExportQuery, chosen: Chosen | None) -> None:
        """Raises BadInput when the folder holds something else."""
        self._log = log
        self._folder = folder
        self._chosen = chosen
        self.manifest = _open_manifest(folder, query)

    def run(self, progress: Callable[[int, int], None]) -> Manifest:
        """Exports up to the end of the log as it is now. Raises LogUnavailable, BadInput."""
        self._remove_strangers()
        query = self.manifest.query
        ends = {
            (end.topic, end.partition): end.offset if query.following is None else min(end.offset, query.following)
            for end in self._log.end_positions(query.kinds)
        }
        at = {place: max(query.first, self._position(*place)) for place in ends}
        total = sum(max(0, ends[place] - at[place]) for place in ends)
        done = 0
        for (topic, partition), end in sorted(ends.items()):
            for deliveries, following in self._pieces(topic, partition, at[topic, partition], end):
                self._write(topic, partition, deliveries, at[topic, partition], following)
                done += following - at[topic, partition]
                at[topic, partition] = following
                progress(done, total)
        if query.form == "datasets":
            write_whole(self._folder / "README.md", _card(query).encode())
        return self.manifest

    def _pieces(self, topic: str, partition: int, first: int, end: int) -> Iterator[tuple[list[Delivery], int]]:
        """Deliveries of one file each, and the offset after what was read for it."""
        if first >= end:
            return
        start = [Position(topic=topic, partition=partition, offset=first)]
        reader = self._log.reader([topic], start=start, partitions=[partition])
        taken: list[Delivery] = []
        size = 0
        try:
            for delivery in _before(reader, end):
                if self._wants(delivery):
                    taken.append(delivery)
                    size += len(delivery.value)
                if len(taken) >= _RECORDS_MAX or size >= _BYTES_MAX:
                    yield taken, delivery.address.offset + 1
                    taken, size = [], 0
        finally:
            reader.close()
        yield taken, end

    def _wants(self, delivery: Delivery) -> bool:
        event, query = delivery.event, self.manifest.query
        # Undecodable messages are no records; they are rows of the trace store.
        if event is None or (query.runs and event.meta.run_id not in query.runs):
            return False
        if self._chosen is None:
            return True
        # A reward goes with the trajectory that it judges.
        at = event.trajectory if isinstance(event, RewardAssigned) else delivery.address
        is_chosen = self._chosen.get(at.partition)
        return is_chosen is not None and is_chosen(at.offset)

    def _write(self, topic: str, partition: int, deliveries: Sequence[Delivery], first: int, following: int) -> None:
        if deliveries:
            form = self.manifest.query.form
            name = f"data/{topic}-{partition}-{first:012}.{'jsonl' if form == 'jsonl' else 'parquet'}"
            records = [record(one.address, one.event) for one in deliveries if one.event is not None]
            data = msgspec.json.Encoder().encode_lines(records) if form == "jsonl" else _parquet(topic, records)
            write_whole(self._folder / name, data)
            self.manifest.files.append(
                ExportedFile(
                    name=name,
                    topic=topic,
                    partition=partition,
                    first=first,
                    following=following,
                    records=len(records),
                    bytes=len(data),
                    sha256=hashlib.sha256(data).hexdigest(),
                )
            )
        others = [p for p in self.manifest.positions if (p.topic, p.partition) != (topic, partition)]
        self.manifest.positions = [*others, Position(topic=topic, partition=partition, offset=following)]
        write_whole(self._folder / "manifest.json", msgspec.json.format(msgspec.json.encode(self.manifest)))

    def _position(self, topic: str, partition: int) -> int:
        return next((p.offset for p in self.manifest.positions if (p.topic, p.partition) == (topic, partition)), 0)

    def _remove_strangers(self) -> None:
        """Removes files that an interrupted export wrote and did not come to name."""
        named = {self._folder / file.name for file in self.manifest.files}
        for path in (self._folder / "data").iterdir():
            if path not in named:
                path.unlink()


def _before(reader: Reader, end: int) -> Iterator[Delivery]:
    """What the reader of one partition delivers before this offset."""
    while not reader.caught_up():
        for delivery in reader.poll(_RECORDS_MAX, _POLL_SECONDS):
            if delivery.address.offset >= end:
                return
            yield delivery


def _open_manifest(folder: Path, query: ExportQuery) -> Manifest:
    """The manifest of the folder, which is made if need be. Raises BadInput."""
    file = folder / "manifest.json"
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise BadInput(f"{folder} is not empty and holds no export: name a new folder")
        (folder / "data").mkdir(parents=True, exist_ok=True)
        write_whole(file, msgspec.json.encode(Manifest(query=query, positions=[], files=[])))
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise BadInput(f"{file} cannot be read: {error}") from error
    if manifest.query != query:
        raise BadInput(f"{folder} holds an export of something else (see its manifest.json): name a new folder")
    return manifest


def _parquet(topic: str, records: Sequence[dict[str, Any]]) -> bytes:
    # Imported here: it takes a second, and comes with chDB.
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    table = pyarrow.Table.from_pylist(list(records), schema=_schema(topic))
    parquet.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())


def _schema(topic: str) -> Any:
    """The types of a topic's columns. Not inferred: a file whose column is null throughout would get another type."""
    import pyarrow as pa

    text, whole, number = pa.string(), pa.int64(), pa.float64()
    place = [(name, text) for name in ("id", "run_id", "session_id", "task_id", "group_id", "trajectory_id")]
    place += [
        ("attempt_id", text),
        ("purpose", text),
        ("timestamp", whole),
        ("partition", pa.int32()),
        ("offset", whole),
    ]
    said = pa.struct([("role", text), ("content", text), ("name", text), ("is_error", pa.bool_())])
    own = {
        "trajectories": [
            *[(name, text) for name in ("prompt", "reference", "agent", "split", "tags")],
            ("messages", pa.list_(said)),
            *[(name, text) for name in ("answer", "ended_by", "reason")],
            *[(name, whole) for name in ("index", "seed", "turns", "tokens_sampled", "policy_version_oldest")],
            ("cost", number),
            ("tokens", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
        ],
        "rewards": [
            *[(name, text) for name in ("scorer", "scorer_version", "scorer_set")],
            ("score", number),
            ("weight", number),
            ("passed", pa.bool_()),
            *[(name, text) for name in ("verdict", "excluded_because", "parts", "evidence", "ended_by")],
            *[(name, whole) for name in ("tokens_sampled", "policy_version_oldest")],
            ("trajectory_partition", pa.int32()),
            ("trajectory_offset", whole),
        ],
    }[topic]
    return pa.schema([*place, *own])


def _card(query: ExportQuery) -> str:
    """The README of a dataset: `datasets.load_dataset(FOLDER, "trajectories")` reads its head."""
    configs = "".join(
        f"- config_name: {kind}\n  data_files:\n  - split: train\n    path: data/{kind}-*.parquet\n"
        for kind in query.kinds
    )
    asked = msgspec.json.encode(query).decode()
    return f"---\nconfigs:\n{configs}---\nExported by `replayground export`; see manifest.json. Query: `{asked}`\n"


def require_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds to export, all without any. Raises BadInput."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise BadInput(f"{unknown[0]} cannot be exported; there are: {', '.join(KINDS)}")
    return tuple(kinds) or tuple(KINDS)
