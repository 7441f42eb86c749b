"""A copy of the store is made in a folder that its reader has open already, however often it has to be made anew."""

import os
import shutil
from pathlib import Path

import pytest

from replayground.consumers.clickhouse.sql_snapshot import SnapshotFailed, take_snapshot

DATABASE, TABLE = "10000000-0000-4000-8000-000000000001", "20000000-0000-4000-8000-000000000002"


def stored(folder: Path) -> Path:
    """A store with one table of one part, laid out as chDB does."""
    metadata, table = folder / "store" / DATABASE[:3] / DATABASE, folder / "store" / TABLE[:3] / TABLE
    (table / "all_1_1_0").mkdir(parents=True)
    (table / "all_1_1_0" / "data.bin").write_text("rows")
    (table / "format_version.txt").write_text("1")
    metadata.mkdir(parents=True)
    (metadata / "events.sql").write_text(f"ATTACH TABLE _ UUID '{TABLE}' (x Int32)")
    (folder / "metadata").mkdir()
    (folder / "metadata" / "traces.sql").write_text(f"ATTACH DATABASE _ UUID '{DATABASE}'")
    return table


def test_a_copy_that_had_to_be_made_anew_is_seen_by_who_had_the_folder_open(tmp_path: Path) -> None:
    table, target = stored(tmp_path / "store"), tmp_path / "copy"
    target.mkdir()
    held = os.open(target, os.O_RDONLY)  # as the mount in the jail of the reader does
    try:
        # What a merge does between listing and linking: something of the table is gone.
        (table / "format_version.txt").rename(table / "away")
        with pytest.raises(SnapshotFailed, match="changed 5 times"):
            take_snapshot(tmp_path / "store", "traces", target)
        assert os.listdir(held) == []
        (table / "away").rename(table / "format_version.txt")
        take_snapshot(tmp_path / "store", "traces", target)
        assert sorted(os.listdir(held)) == ["metadata", "store"]
        copied = target / "store" / TABLE[:3] / TABLE / "all_1_1_0" / "data.bin"
        assert copied.samefile(table / "all_1_1_0" / "data.bin")
    finally:
        os.close(held)


def test_a_part_that_is_removed_while_it_is_linked_makes_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, target = stored(tmp_path / "store"), tmp_path / "copy"
    target.mkdir()
    merged = table / "all_2_2_0"
    (merged / "by_place.proj").mkdir(parents=True)
    (merged / "by_place.proj" / "data.bin").write_text("rows")
    link, listed = os.link, []

    def link_after_removal(source: str, copy: Path) -> None:
        if "all_2_2_0" in str(source):
            # The folder was listed, and is gone before its file is linked.
            listed.append(source)
            shutil.rmtree(merged)
        link(source, copy)

    monkeypatch.setattr(os, "link", link_after_removal)
    take_snapshot(tmp_path / "store", "traces", target)
    assert len(listed) == 1
    assert sorted(os.listdir(target / "store" / TABLE[:3] / TABLE)) == ["all_1_1_0", "format_version.txt"]
