"""Data folders: refused when they are of another layout or in use, never half-written."""

from pathlib import Path

import pytest

from replayground.deploy.field import mention_old_runs
from replayground.deploy.local.folder import (
    FieldFolder,
    RunFolder,
    create_field_folder,
    create_run_folder,
    field_folder,
    hold_lock,
    is_locked,
    old_runs,
    point_latest_at,
    require_disk,
    write_whole,
)
from replayground.schemas.errors import BadInput


@pytest.fixture
def field(tmp_path: Path) -> FieldFolder:
    folder = FieldFolder(tmp_path / "field")
    create_field_folder(folder)
    folder.file.write_text("{}")
    return folder


def created(field: FieldFolder, run_id: str) -> RunFolder:
    folder = field.run(run_id)
    create_run_folder(folder)
    return folder


def test_a_new_field_can_be_opened_again(field: FieldFolder) -> None:
    assert field_folder(field.path) == field
    assert field.exists
    assert not field_folder(field.path / ".." / "other").exists


def test_a_field_of_another_layout_is_refused(field: FieldFolder) -> None:
    (field.path / "version").write_text("99\n")
    with pytest.raises(BadInput, match="version 99 of the data layout"):
        field_folder(field.path)


def test_a_run_of_another_layout_is_refused(field: FieldFolder) -> None:
    folder = created(field, "one")
    (folder.path / "version").write_text("99\n")
    with pytest.raises(BadInput, match="version 99 of the data layout"):
        create_run_folder(folder)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(BadInput, match="is no field"):
        field_folder(tmp_path)


def test_a_field_that_was_never_begun_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()  # whoever began it was refused after it had taken the lock
    assert not field_folder(tmp_path).exists


def test_a_field_whose_making_was_killed_is_made_again(tmp_path: Path) -> None:
    for name in ("lock", ".version.unfinished"):
        (tmp_path / name).touch()
    (tmp_path / "blobs").mkdir()
    create_field_folder(field_folder(tmp_path))
    assert not field_folder(tmp_path).exists, "it has no config yet"
    field_folder(tmp_path).file.write_text("{}")
    assert field_folder(tmp_path).exists


def test_a_folder_with_files_of_somebody_is_no_unfinished_field(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "precious").touch()
    with pytest.raises(BadInput, match="exists and is no field"):
        field_folder(tmp_path)


def test_runs_of_the_layout_before_fields_are_refused_and_left_alone(tmp_path: Path) -> None:
    old = tmp_path / "20260101-stockroom-seed0"
    old.mkdir()
    (old / "version").write_text("1\n")
    assert old_runs(tmp_path) == [old]
    with pytest.raises(BadInput, match=r"holds 1 runs of an older release .* name another folder with --field"):
        field_folder(tmp_path)
    assert (old / "version").read_text() == "1\n"


def test_a_new_field_beside_runs_of_the_layout_before_fields_mentions_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were in `runs`, a field is in `field`: no list of the new field would show them."""
    monkeypatch.chdir(tmp_path)
    old = tmp_path / "runs" / "20260101-stockroom-seed0"
    old.mkdir(parents=True)
    (old / "version").write_text("1\n")
    said: list[str] = []
    mention_old_runs(field_folder(tmp_path / "field"), said.append)
    create_field_folder(field_folder(tmp_path / "field"))
    field_folder(tmp_path / "field").file.write_text("{}")
    mention_old_runs(field_folder(tmp_path / "field"), said.append)
    assert len(said) == 1
    assert "runs/ holds 1 runs of an older release" in said[0]
    assert "read them with the release that wrote them" in said[0]


def test_runs_are_listed_newest_first(field: FieldFolder) -> None:
    for name in ("20260101-a", "20260102-b"):
        point_latest_at(created(field, name))
    (field.runs / "20260103-never-begun").mkdir()
    assert [folder.run_id for folder in field.run_folders()] == ["20260102-b", "20260101-a"]
    assert field.latest_run().run_id == "20260102-b"
    assert field.running() == []
    with hold_lock(field.run("20260101-a").path, ""):
        assert [folder.run_id for folder in field.running()] == ["20260101-a"]


def test_no_run_yet_is_told(field: FieldFolder) -> None:
    with pytest.raises(BadInput, match="no run was started in"):
        field.latest_run()


def test_a_second_lock_is_refused_in_the_words_of_the_caller(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with hold_lock(tmp_path, "it runs already"):
        assert is_locked(tmp_path)
        with pytest.raises(BadInput, match=r"^it runs already$"), hold_lock(tmp_path, "it runs already"):
            pass
    assert not is_locked(tmp_path)


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    require_disk(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(BadInput, match="bytes free and"):
        require_disk(tmp_path, 1 << 62)


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(BadInput, match="cannot be written"), hold_lock(Path("/proc/field"), ""):
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
