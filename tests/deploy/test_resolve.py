"""What the programs of a field and of a run are told, and what of it goes on the log."""

import json
import socket
from pathlib import Path

import msgspec
import pytest

from replayground.deploy.config import parse_config
from replayground.deploy.field import prepare_field
from replayground.deploy.local.folder import FieldFolder, RunFolder, create_field_folder, create_run_folder
from replayground.deploy.resolve import (
    RequestedConfig,
    config_for_log,
    connectable,
    load,
    read_request,
    require_agreement,
    resolve_field,
    resolve_run,
    save,
)
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Position
from replayground.schemas.run import FIELD

ELSEWHERE = '[log]\nbootstrap_servers = "kafka:9092"\nregistry_url = "http://registry:8081"\ntopic_prefix = "us."\n'


def asked_for(folder: Path, text: str = "", seed: int = 0) -> RequestedConfig:
    path = folder / "job.toml"
    path.write_text(text)
    return read_request(path, seed)


@pytest.fixture
def field(tmp_path: Path) -> FieldFolder:
    folder = FieldFolder(tmp_path / "field")
    create_field_folder(folder)
    return folder


def test_a_field_of_nothing_is_embedded(tmp_path: Path, field: FieldFolder) -> None:
    resolved = resolve_field(field, asked_for(tmp_path))
    assert resolved.is_embedded
    assert resolved.log.bootstrap_servers == f"127.0.0.1:{resolved.ports['local.kafka_port']}"
    assert resolved.log.registry_url.startswith(f"http://127.0.0.1:{resolved.ports['local.registry_port']}/")
    assert resolved.blobs_url == field.blobs_url
    assert resolved.config.traces.dsn == f"chdb://{field.path}/traces"
    assert resolved.page_url == f"http://127.0.0.1:{resolved.ports['traces.port']}"
    assert resolved.run_of("traces", "traces").run_id == FIELD


def test_addresses_of_a_field_elsewhere_are_taken_as_they_are(tmp_path: Path, field: FieldFolder) -> None:
    resolved = resolve_field(field, asked_for(tmp_path, ELSEWHERE + '[blobs]\nurl = "s3://bucket/prefix/"\n'))
    assert not resolved.is_embedded
    assert resolved.log.bootstrap_servers == "kafka:9092"
    assert resolved.log.topic_prefix == "us."
    assert resolved.blobs_url == "s3://bucket/prefix"
    assert [name for name in resolved.ports if name.startswith("local.")] == []


def test_ports_of_a_field_stay_from_start_to_start_while_they_are_free(tmp_path: Path, field: FieldFolder) -> None:
    asked = asked_for(tmp_path)
    first = resolve_field(field, asked)
    assert resolve_field(field, asked, first).ports == first.ports
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first.ports["local.kafka_port"]))
        listener.listen()
        second = resolve_field(field, asked, first)
    assert second.ports["local.kafka_port"] != first.ports["local.kafka_port"]
    assert second.ports["traces.port"] == first.ports["traces.port"]


def test_a_field_is_started_again_as_it_was_asked_for(tmp_path: Path, field: FieldFolder) -> None:
    first = resolve_field(field, asked_for(tmp_path, "[local]\nkafka_heap_mebibytes = 300\n"))
    save(field, first)
    assert load(field) == first
    assert prepare_field(field, None).config.local.kafka_heap_mebibytes == 300


def test_a_field_cannot_become_that_of_another_log(tmp_path: Path, field: FieldFolder) -> None:
    save(field, resolve_field(field, asked_for(tmp_path)))
    with pytest.raises(BadInput, match="on this machine and cannot become a cluster elsewhere with prefix us"):
        prepare_field(field, asked_for(tmp_path, ELSEWHERE))


def test_a_run_gets_the_addresses_of_its_field_and_what_was_set_stays(tmp_path: Path, field: FieldFolder) -> None:
    asked = asked_for(tmp_path, '[rollouts]\nservers = ["http://elsewhere:1"]\n', seed=3)
    on = resolve_field(field, asked)
    folder = field.run("one")
    positions = (Position(topic="tasks", partition=0, offset=5),)
    resolved = resolve_run(folder, on, asked, positions, start_number=2)
    create_run_folder(folder)
    save(folder, resolved)
    assert load(folder) == resolved
    assert list(resolved.config.rollouts.servers) == ["http://elsewhere:1"]
    assert list(resolved.config.reloader.servers) == [f"http://127.0.0.1:{resolved.config.vllm.port}"]
    run = resolved.run_of("cut-1", "cut")
    assert (run.run_id, run.seed, run.program, run.worker) == ("one", 3, "cut", "cut-1")
    assert (run.log, run.blobs_url, run.start, run.start_number) == (on.log, on.blobs_url, positions, 2)


def test_a_busy_port_of_a_program_is_refused(tmp_path: Path, field: FieldFolder) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(BadInput, match=r"traces\.port = \d+ is in use"):
            resolve_field(field, asked_for(tmp_path, f"[traces]\nport = {port}\n"))
        asked = asked_for(tmp_path, f"[vllm]\nport = {port}\n")
        with pytest.raises(BadInput, match=r"vllm\.port = \d+ is in use"):
            resolve_run(RunFolder(tmp_path / "one"), resolve_field(field, asked), asked, (), 0)


def test_the_log_gets_every_default_and_nothing_of_this_machine(tmp_path: Path) -> None:
    text = '[job]\nsteps = 0\n[vllm]\nport = 8100\n[streams]\nstate_folder = "/here"\n[local]\nkafka_port = 9\n'
    config = json.loads(config_for_log(asked_for(tmp_path, text)))
    assert config["job"]["steps"] == 0
    assert config["job"]["group_size"] == 8
    assert not {"log", "blobs", "traces", "local"} & set(config)
    assert not {"port", "folder"} & set(config["vllm"])
    assert "state_folder" not in config["streams"]
    assert "servers" not in config["rollouts"]
    assert "servers" not in config["reloader"]
    assert parse_config(config, Path("log")).job.steps == 0, "a run is resumed from it"


def test_servers_that_a_person_named_are_part_of_the_run(tmp_path: Path) -> None:
    asked = asked_for(tmp_path, '[rollouts]\nservers = ["http://gpu:8000"]\n')
    assert json.loads(config_for_log(asked))["rollouts"]["servers"] == ["http://gpu:8000"]


@pytest.mark.parametrize(
    ("of_job", "told"),
    [
        ("", None),
        ("[local]\nkafka_heap_mebibytes = 512\n", None),
        ("[log.security]\nprotocol = 'plaintext'\n", None),
        ("[local]\nkafka_heap_mebibytes = 300\n", "local.kafka_heap_mebibytes is 300 and the field has 512"),
        ("[blobs]\nurl = 's3://b'\n", "blobs.url is 's3://b' and the field has ''"),
        ("[log.security]\nprotocol = 'ssl'\n", "log.security.protocol is 'ssl' and the field has 'plaintext'"),
    ],
)
def test_what_a_job_says_of_the_field_must_be_so(
    tmp_path: Path, field: FieldFolder, of_job: str, told: str | None
) -> None:
    on = resolve_field(field, asked_for(tmp_path))
    asked = asked_for(tmp_path, of_job)
    if told is None:
        require_agreement(asked, on)
        return
    with pytest.raises(BadInput) as caught:
        require_agreement(asked, on)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '[log.security]\npassword = "hunter2"\n',
        '[log.security]\nregistry_password = "hunter2"\n',
        '[traces]\ndsn = "clickhouse://me:hunter2@host:8123/db"\n',
    ],
)
def test_a_secret_is_never_written_down(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match="must not be written down: give env:NAME") as caught:
        asked_for(tmp_path, text)
    assert "hunter2" not in str(caught.value)


def test_references_to_secrets_are_kept_as_references(tmp_path: Path, field: FieldFolder) -> None:
    asked = asked_for(tmp_path, ELSEWHERE + '[log.security]\nusername = "us"\npassword = "env:KAFKA_PASSWORD"\n')
    assert b'"env:KAFKA_PASSWORD"' in msgspec.json.encode(resolve_field(field, asked))
    assert "KAFKA_PASSWORD" not in config_for_log(asked)


def test_one_address_of_a_log_without_the_other_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"set both log\.bootstrap_servers and log\.registry_url, or neither"):
        asked_for(tmp_path, '[log]\nbootstrap_servers = "kafka:9092"\n')


def test_what_listens_everywhere_is_reached_on_loopback() -> None:
    assert [connectable(bind) for bind in ("127.0.0.1", "0.0.0.0", "10.0.0.7")] == [
        "127.0.0.1",
        "127.0.0.1",
        "10.0.0.7",
    ]
