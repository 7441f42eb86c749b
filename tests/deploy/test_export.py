"""Exports hold each record once, however often they are interrupted, and what they say of their files is true."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pyarrow import parquet

from replayground.deploy.experience import exporting
from replayground.deploy.experience.exporting import Export, ExportQuery, Manifest, require_kinds
from replayground.deploy.experience.spans import export_spans
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Event, RewardAssigned, RolloutEnded, TrajectoryAssembled, TurnGenerated
from replayground.schemas.packed import unpack_tokens
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog
from tests.consumers.synthetic_run import SyntheticRun, run_of

BOTH = ("trajectories", "rewards")


def nothing(done: int, total: int) -> None:
    """Shows no progress."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> MemoryLog:
    made = MemoryLog(Codec(MemoryRegistry(), Blobs(f"file://{tmp_path_factory.mktemp('blobs')}")))
    for run_id in ("one", "two"):
        SyntheticRun(run_of(steps=3, demonstrations=3, run_id=run_id), evaluation_tasks=2).append_to(made)
    return made


def events(log: MemoryLog, kind: type[Event]) -> list[Event]:
    deliveries = log.reader(list(BOTH)).poll(10_000, 0)
    return [delivery.event for delivery in deliveries if isinstance(delivery.event, kind)]


def read(folder: Path, kind: str) -> list[dict[str, object]]:
    """All records of an export, and no file that its manifest does not name truly."""
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    assert {path.name for path in (folder / "data").iterdir()} == {Path(file.name).name for file in manifest.files}
    found: list[dict[str, object]] = []
    for file in manifest.files:
        data = (folder / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.bytes, file.sha256)
        records = (
            parquet.read_table(folder / file.name).to_pylist()
            if file.name.endswith(".parquet")
            else [msgspec.json.decode(line) for line in data.splitlines()]
        )
        assert len(records) == file.records
        found += records if file.topic == kind else []
    return found


@pytest.mark.parametrize("form", ["parquet", "jsonl", "datasets"])
def test_every_record_is_there_once(log: MemoryLog, tmp_path: Path, form: exporting.Form) -> None:
    folder = tmp_path / "out"
    Export(log, folder, ExportQuery(kinds=BOTH, form=form), None).run(nothing)
    for kind, made in (("trajectories", TrajectoryAssembled), ("rewards", RewardAssigned)):
        records = {record["id"]: record for record in read(folder, kind)}
        assert records.keys() == {event.meta.id for event in events(log, made)}
    (event, *_) = (e for e in events(log, TrajectoryAssembled) if isinstance(e, TrajectoryAssembled))
    (record,) = (one for one in read(folder, "trajectories") if one["id"] == event.meta.id)
    assert record["tokens"] == unpack_tokens(event.tokens)
    assert record["messages"][0] == {  # type: ignore[index]
        "role": "user",
        "content": event.task.prompt,
        "name": None,
        "is_error": False,
    }
    if form == "datasets":
        head = (folder / "README.md").read_text().split("---")[1]
        assert [f"path: data/{kind}-*.parquet" in head for kind in BOTH] == [True, True]


def test_an_interrupted_export_goes_on_and_a_later_one_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_RECORDS_MAX", 3)
    log = MemoryLog(Codec(MemoryRegistry(), Blobs(f"file://{tmp_path}/blobs")))
    SyntheticRun(run_of(steps=2, demonstrations=4), evaluation_tasks=2).append_to(log)
    folder, query = tmp_path / "out", ExportQuery(kinds=BOTH, form="jsonl")

    class Interrupted(Exception):
        pass

    def after(calls: int) -> Callable[[int, int], None]:
        seen = iter(range(calls))

        def stop(done: int, total: int) -> None:
            if next(seen, None) is None:
                raise Interrupted

        return stop

    for calls in (0, 2):
        with pytest.raises(Interrupted):
            Export(log, folder, query, None).run(after(calls))
        # Killed between writing a file and naming it.
        (folder / "data" / "trajectories-9-000000000000.jsonl").write_text("{}")
    Export(log, folder, query, None).run(nothing)
    SyntheticRun(run_of(steps=1, demonstrations=0, run_id="later"), evaluation_tasks=1).append_to(log)
    Export(log, folder, query, None).run(nothing)
    ids = [record["id"] for record in read(folder, "rewards")]
    assert sorted(map(str, ids)) == sorted(event.meta.id for event in events(log, RewardAssigned))


def test_runs_ranges_and_selections_limit_it(log: MemoryLog, tmp_path: Path) -> None:
    Export(log, tmp_path / "run", ExportQuery(kinds=("rewards",), form="jsonl", runs=("two",)), None).run(nothing)
    assert {record["run_id"] for record in read(tmp_path / "run", "rewards")} == {"two"}
    few = ExportQuery(kinds=("rewards",), form="jsonl", first=1, following=3)
    Export(log, tmp_path / "range", few, None).run(nothing)
    assert {record["offset"] for record in read(tmp_path / "range", "rewards")} == {1, 2}
    judged = [event.trajectory for event in events(log, RewardAssigned) if isinstance(event, RewardAssigned)]
    at = judged[0]
    chosen = {at.partition: lambda offset: offset == at.offset}
    Export(log, tmp_path / "some", ExportQuery(kinds=BOTH, form="jsonl", selection="s"), chosen).run(nothing)
    assert [(r["partition"], r["offset"]) for r in read(tmp_path / "some", "trajectories")] == [
        (at.partition, at.offset)
    ]
    rewards = read(tmp_path / "some", "rewards")
    assert len(rewards) == judged.count(at)
    assert {(r["trajectory_partition"], r["trajectory_offset"]) for r in rewards} == {(at.partition, at.offset)}


def test_a_folder_of_something_else_is_refused(log: MemoryLog, tmp_path: Path) -> None:
    Export(log, tmp_path / "out", ExportQuery(kinds=("rewards",), form="jsonl"), None)
    with pytest.raises(BadInput, match="export of something else"):
        Export(log, tmp_path / "out", ExportQuery(kinds=("rewards",), form="parquet"), None)
    with pytest.raises(BadInput, match="is not empty"):
        Export(log, tmp_path, ExportQuery(kinds=("rewards",), form="parquet"), None)
    with pytest.raises(BadInput, match="turns cannot be exported"):
        require_kinds(["turns"])


def test_spans_are_one_trace_for_each_attempt(log: MemoryLog, tmp_path: Path) -> None:
    written = export_spans(log, tmp_path / "spans.jsonl", frozenset(("one",)), nothing)
    messages = [d.event for d in log.reader(["messages"]).poll(10_000, 0) if d.event and d.event.meta.run_id == "one"]
    traces = [msgspec.json.decode(line) for line in (tmp_path / "spans.jsonl").read_bytes().splitlines()]
    assert written == len(traces) == sum(isinstance(event, RolloutEnded) for event in messages)
    spans = [span for trace in traces for span in trace["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    chats = [span for span in spans if span["name"] == "chat"]
    assert len(chats) == sum(isinstance(event, TurnGenerated) for event in messages)
    assert len({span["spanId"] for span in spans}) == len(spans)
    roots = {span["spanId"]: span["traceId"] for span in spans if not span["parentSpanId"]}
    assert len(roots) == written
    assert all(roots[span["parentSpanId"]] == span["traceId"] for span in spans if span["parentSpanId"])
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in spans)
    named = {one["key"]: one["value"] for one in chats[0]["attributes"]}
    assert named["gen_ai.operation.name"] == {"stringValue": "chat"}
    assert int(named["gen_ai.usage.output_tokens"]["intValue"]) > 0
