"""Data folders: refused when they are of another version or in use, never half-written."""

from pathlib import Path

import pytest

from deploy.local.folder import (
    RunFolder,
    create_run_folder,
    is_locked,
    latest_run_folder,
    locked,
    open_run_folder,
    point_latest_at,
    require_disk,
    write_whole,
)
from schemas.errors import BadInput


def created(runs: Path, run_id: str) -> RunFolder:
    folder = RunFolder(runs / run_id)
    create_run_folder(folder, "{}")
    return folder


def test_a_new_folder_can_be_opened_again(tmp_path: Path) -> None:
    folder = created(tmp_path / "runs", "one")
    assert open_run_folder(tmp_path / "runs" / "one") == folder
    assert not folder.is_finished


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = created(tmp_path, "one")
    (folder.path / "version").write_text("99\n")
    with pytest.raises(BadInput, match="was written by version 99 of the data layout"):
        open_run_folder(folder.path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no data folder of a run"):
        open_run_folder(tmp_path)


def test_an_existing_folder_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    created(tmp_path, "one")
    with pytest.raises(BadInput, match="exists already"):
        created(tmp_path, "one")


def test_latest_points_at_the_last_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        point_latest_at(created(tmp_path, name))
    assert latest_run_folder(tmp_path).run_id == "two"


def test_no_run_yet_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no run in"):
        latest_run_folder(tmp_path)


def test_a_second_lock_is_refused(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(BadInput, match="a stack is running in"), locked(tmp_path):
            pass
    assert not is_locked(tmp_path)


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    require_disk(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(BadInput, match="bytes free and a run wants"):
        require_disk(tmp_path, 1 << 62)


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(BadInput, match="cannot be written"), locked(Path("/proc/runs")):
        pass


def test_the_control_socket_fits_into_its_limit(tmp_path: Path) -> None:
    assert RunFolder(Path("/short")).control_socket == Path("/short/supervisor.sock")
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    assert len(str(RunFolder(deep).control_socket)) <= 90
    assert RunFolder(deep).control_socket == RunFolder(deep).control_socket


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "summary.json", "{}\n")
    write_whole(tmp_path / "summary.json", '{"steps": 1}\n')
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert (tmp_path / "summary.json").read_text() == '{"steps": 1}\n'
