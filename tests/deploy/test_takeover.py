"""One run resumed in another folder while it is still active: the newer start has it, and the older one ends with a sentence."""

import os
import subprocess
from pathlib import Path

import pytest

from replayground.deploy.local.folder import FieldFolder
from replayground.deploy.local.stack import LogAddresses
from replayground.deploy.runs import list_runs
from replayground.schemas.events import RunEnded
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Delivery, Log
from tests.deploy.test_cli import ONE_PROGRAM, called, command
from tests.deploy.test_supervisor import eventually, members

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fields(tmp_path: Path, kafka_addresses: LogAddresses) -> tuple[FieldFolder, FieldFolder]:
    """Two fields in folders of their own, on one log."""
    config = tmp_path / "field.toml"
    config.write_text(
        f'[log]\nbootstrap_servers = "{kafka_addresses.log.bootstrap_servers}"\n'
        f'registry_url = "{kafka_addresses.log.registry_url}"\n[blobs]\nurl = "{kafka_addresses.blobs_url}"\n'
    )
    made = FieldFolder(tmp_path / "one" / "field"), FieldFolder(tmp_path / "two" / "field")
    for field in made:
        field.path.parent.mkdir()
        (field.path.parent / "job.toml").write_text(ONE_PROGRAM)
        up = called(field.path.parent, "up", str(config))
        assert up.returncode == 0, up.stderr
    return made


def test_the_newer_start_has_the_run(fields: tuple[FieldFolder, FieldFolder], kafka_addresses: LogAddresses) -> None:
    one, two = fields
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    older = subprocess.Popen(
        command("run", "job.toml"),
        cwd=one.path.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert eventually(lambda: bool(one.running()) and "monitor" in _programs(one.running()[0].logs), 120)
        run_id = one.latest_run().run_id
        newer = called(two.path.parent, "resume", run_id, "--detach")
        assert newer.returncode == 0, newer.stderr
        _, told = older.communicate(timeout=120)
        assert older.returncode == 1
        assert f"{run_id} was resumed elsewhere, so it was stopped here" in told
        assert members(one.run(run_id)) == []
        assert [folder.run_id for folder in two.running()] == [run_id]
        assert called(two.path.parent, "stop", run_id).returncode == 0
    finally:
        older.kill()
        older.wait()
        for field in fields:
            called(field.path.parent, "down")
    log = open_log(kafka_addresses.run_of("test"))
    state = list_runs(log)[run_id]
    ends = [
        (delivery.event.start, delivery.event.reason)
        for delivery in _all_of(log)
        if isinstance(delivery.event, RunEnded) and delivery.event.meta.run_id == run_id
    ]
    log.close()
    assert ends == [(0, "taken_over"), (1, "stopped")]
    assert (state.starts, state.reason) == (1, "stopped")


def _programs(logs: Path) -> set[str]:
    return {path.stem for path in logs.glob("*.log")}


def _all_of(log: Log) -> list[Delivery]:
    reader = log.reader(["runs"])
    found: list[Delivery] = []
    while not reader.caught_up():
        found += reader.poll(1000, 0.5)
    reader.close()
    return found
