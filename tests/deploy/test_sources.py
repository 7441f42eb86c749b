"""The files of a run go to the blob store and come back, on this machine or another."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from replayground.deploy.sources import code_version, files_of, package_versions, restore_files, store_files
from replayground.schemas.blobs import Blobs
from replayground.schemas.errors import BadInput
from replayground.schemas.events import RunFile


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    for name, text in {
        "job.py": "import words\n",
        "words.py": "WORDS = ()\n",
        "agents.toml": "\n",
        "notes.txt": "not of the job\n",
        "data/tasks.jsonl": "{}\n",
        "model/config.json": "{}",
        "model/deep/weights": "1",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def config_of(job: Path) -> dict[str, Any]:
    return {
        "job": {"module": str(job / "job.py"), "agents": str(job / "agents.toml")},
        "feeder": {"tasks_file": str(job / "data/tasks.jsonl")},
        "trainer": {"model": {"path": str(job / "model")}},
        "rollouts": {"tools": {"search": {"corpus": None, "recordings": None}}},
    }


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs((tmp_path / "blobs").as_uri())


def test_every_file_that_a_run_needs_is_found(job: Path) -> None:
    assert {source.name: source.setting for source in files_of(config_of(job))} == {
        "job.py": "job.module",
        "words.py": None,
        "agents.toml": "job.agents",
        "feeder.tasks_file/tasks.jsonl": "feeder.tasks_file",
        "model/config.json": "trainer.model.path",
        "model/deep/weights": "trainer.model.path",
    }


def test_a_module_by_its_dotted_name_is_its_file_alone() -> None:
    (source,) = files_of({"job": {"module": "replayground.producers.stockroom"}})
    assert (source.name, source.setting) == ("stockroom.py", "job.module")


def test_files_that_are_still_there_stay_where_they_are(job: Path, blobs: Blobs, tmp_path: Path) -> None:
    config = config_of(job)
    restored = restore_files(blobs, config, store_files(blobs, config), tmp_path / "restored")
    assert restored.raw == config
    assert len(restored.told) == 4
    assert all(line.endswith("unchanged") for line in restored.told)
    assert not (tmp_path / "restored").exists()


def test_files_that_are_gone_come_from_the_store(job: Path, blobs: Blobs, tmp_path: Path) -> None:
    config = config_of(job)
    files = store_files(blobs, config)
    shutil.rmtree(job)
    target = tmp_path / "restored"
    raw = restore_files(blobs, config, files, target).raw
    assert raw["job"]["module"] == str(target / "job.py")
    assert (target / "words.py").read_text() == "WORDS = ()\n", "what the module imports lies beside it"
    assert Path(raw["job"]["agents"]).read_text() == "\n"
    assert Path(raw["feeder"]["tasks_file"]).read_text() == "{}\n"
    assert (Path(raw["trainer"]["model"]["path"]) / "deep" / "weights").read_text() == "1"


def test_a_file_that_has_changed_is_not_taken_for_the_one_of_the_run(job: Path, blobs: Blobs, tmp_path: Path) -> None:
    config = config_of(job)
    files = store_files(blobs, config)
    (job / "words.py").write_text("WORDS = ('other',)\n")
    restored = restore_files(blobs, config, files, tmp_path / "restored")
    assert restored.raw["job"]["module"] == str(tmp_path / "restored" / "job.py")
    assert restored.raw["job"]["agents"] == config["job"]["agents"], "this one is as it was"
    assert "from the log, since" in restored.told[0]


def test_a_missing_file_is_named(job: Path, blobs: Blobs) -> None:
    config = config_of(job)
    (job / "agents.toml").unlink()
    with pytest.raises(BadInput, match=r"agents\.toml cannot be read"):
        store_files(blobs, config)


def test_a_lost_blob_is_named(job: Path, blobs: Blobs, tmp_path: Path) -> None:
    config = config_of(job)
    files = store_files(blobs, config)
    shutil.rmtree(job)
    for blob in list(blobs.list_stored()):
        blobs.remove(blob)
    with pytest.raises(BadInput, match=r"job\.py of the run is lost"):
        restore_files(blobs, config, files, tmp_path / "restored")


def test_a_name_cannot_lead_out_of_the_folder(job: Path, blobs: Blobs, tmp_path: Path) -> None:
    uri, sha256 = blobs.put(b"evil")
    file = RunFile(name="../../job.py", setting="job.module", uri=uri, sha256=sha256, size_bytes=4)
    with pytest.raises(BadInput, match="outside of its folder"):
        restore_files(blobs, {"job": {"module": "/gone/job.py"}}, [file], tmp_path / "run" / "job")


def test_the_code_has_a_version() -> None:
    assert len(code_version()) >= 12
    assert code_version() == code_version()
    assert "torch" in package_versions()
