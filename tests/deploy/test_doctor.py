"""The doctor tells what a machine lacks, with the remedy, and changes nothing."""

import json
import shutil
import socket
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from replayground.deploy import doctor
from replayground.deploy.doctor import Finding, examine_machine
from replayground.deploy.local.folder import FieldFolder, create_field_folder
from replayground.deploy.local.stack import LogAddresses
from replayground.deploy.resolve import RequestedConfig, ResolvedConfig, resolve_field, save
from replayground.schemas.run import LogSettings
from tests.deploy.test_cli import called


def findings(field: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine_machine(field)}


def a_field(path: Path, log: LogSettings | None = None) -> ResolvedConfig:
    """A field that was started once and is down."""
    folder = FieldFolder(path)
    create_field_folder(folder)
    resolved = resolve_field(folder, RequestedConfig(source="tests", raw={}))
    if log is not None:
        config = msgspec.structs.replace(resolved.config, log=log)
        resolved = msgspec.structs.replace(resolved, config=config, log=log)
    save(folder, resolved)
    return resolved


def test_it_looks_at_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = findings(tmp_path / "field")
    wanted = {
        *("Python", "packages", "packages of a run", "Java", "Kafka", "schema registry"),
        *("bubblewrap", "user namespaces", "cgroups", "libraries of the tools", "gVisor"),
        *("Chromium", "tesseract", "flite", "kcat", "strace", "disk", "memory", "open files", "ports", "field"),
    }
    assert wanted <= set(found)
    assert list(tmp_path.iterdir()) == []


def test_whatever_is_not_there_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda command, path=None: None)
    found = findings(tmp_path / "field")
    assert {name: found[name].state for name in ("bubblewrap", "libraries of the tools", "gVisor", "kcat")} == {
        "bubblewrap": "needed",
        "libraries of the tools": "needed",
        "gVisor": "optional",
        "kcat": "optional",
    }
    assert all(finding.remedy for finding in found.values() if finding.state != "ok")


def test_a_package_of_another_version_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["fastavro==0.0.1", "no-such-package>=1"])
    found = findings(tmp_path / "field")["packages"]
    assert found.state == "needed"
    assert "not 0.0.1, no-such-package is missing" in found.detail


def test_the_command_says_so_by_its_exit_code(tmp_path: Path) -> None:
    result = called(tmp_path, "doctor", "--json")
    found = msgspec.json.decode(result.stdout, type=list[Finding])
    assert result.returncode == (1 if any(finding.state == "needed" for finding in found) else 0)
    shown = called(tmp_path, "doctor")
    assert shown.returncode == result.returncode
    assert len(shown.stdout.splitlines()) == len(json.loads(result.stdout)) + 1
    assert list(tmp_path.iterdir()) == []


def test_bad_usage_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert called(tmp_path, "doctor", "--field", "file").returncode == 2
    assert called(tmp_path, "doctor", "--jsn").returncode == 2


def test_a_field_that_is_down_is_no_fault(tmp_path: Path) -> None:
    a_field(tmp_path / "field")
    found = findings(tmp_path / "field")
    assert found["field"].state == "ok"
    assert "is down" in found["field"].detail
    assert "broker" not in found, "nobody expects a broker of a field that is down"


def test_a_busy_port_of_the_field_is_told(tmp_path: Path) -> None:
    resolved = a_field(tmp_path / "field")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        local = msgspec.structs.replace(resolved.config.local, kafka_port=listener.getsockname()[1])
        config = msgspec.structs.replace(resolved.config, local=local)
        save(FieldFolder(tmp_path / "field"), msgspec.structs.replace(resolved, config=config))
        found = findings(tmp_path / "field")["ports"]
    assert found.state == "needed"
    assert "local.kafka_port" in found.detail


def test_a_log_elsewhere_that_does_not_answer_is_told(tmp_path: Path) -> None:
    a_field(tmp_path / "field", LogSettings(bootstrap_servers="127.0.0.1:1", registry_url="http://127.0.0.1:1"))
    found = findings(tmp_path / "field")
    assert found["broker"].state == found["registry"].state == "needed"
    assert "nobody listens on 127.0.0.1:1" in found["broker"].detail


def test_a_log_that_answers_is_told(tmp_path: Path, kafka_addresses: LogAddresses) -> None:
    a_field(tmp_path / "field", kafka_addresses.log)
    found = findings(tmp_path / "field")
    assert (found["broker"].state, found["registry"].state) == ("ok", "ok"), (found["broker"], found["registry"])
