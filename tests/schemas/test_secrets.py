"""Secrets are read where they are, and stand nowhere else."""

from pathlib import Path

import msgspec
import pytest

from replayground.schemas.errors import BadInput
from replayground.schemas.run import JobSettings, LogSettings, Run, SecuritySettings
from replayground.schemas.secrets import read_secret
from replayground.streams.log.connection import AuthenticationFailures, Connection

FIELD = "password in [log.security]"


def test_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD_OF_cut", "secret")
    assert read_secret("env:PASSWORD_OF_{program}", "cut", FIELD) == "secret"


def test_a_secret_of_a_file_is_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "cut").write_text("secret: with a colon\nand a remark\n")
    assert read_secret(f"file:{tmp_path}/{{program}}", "cut", FIELD) == "secret: with a colon"


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    with pytest.raises(BadInput, match=r"password in \[log.security\] is env:NO_SUCH, .* no variable NO_SUCH"):
        read_secret("env:NO_SUCH", "cut", FIELD)


@pytest.mark.parametrize("content", [None, "", "\nsecond"])
def test_a_missing_or_empty_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "secret").write_text(content)
    with pytest.raises(BadInput, match=f"file:{tmp_path}/secret"):
        read_secret(f"file:{tmp_path}/secret", "cut", FIELD)


@pytest.mark.parametrize("reference", ["hunter2", "env:", "file:", ""])
def test_a_secret_itself_is_refused_and_not_repeated(reference: str) -> None:
    with pytest.raises(BadInput, match="env:NAME or file:PATH") as refusal:
        read_secret(reference, "cut", FIELD)
    assert "hunter2" not in str(refusal.value)


def test_nothing_that_is_written_down_has_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_PASSWORD", "hunter2")
    security = SecuritySettings(protocol="sasl_ssl", username="{program}", password="env:LOG_PASSWORD")
    run = Run(run_id="r", seed=0, job=JobSettings(), log=LogSettings(security=security), blobs_url="memory://")
    connection = Connection(run.log, "cut")
    settings = connection.settings(AuthenticationFailures())
    assert (settings["sasl.username"], settings["sasl.password"]) == ("cut", "hunter2")
    assert "hunter2" not in f"{run!r}{connection!r}{msgspec.json.encode(run)!r}{vars(connection)}"


@pytest.mark.parametrize("prefix", ["team", "a b-", "ü-", "x" * 100 + "-"])
def test_a_prefix_that_kafka_or_the_acls_could_not_tell_apart_is_refused(prefix: str) -> None:
    with pytest.raises(BadInput, match="topic_prefix"):
        Connection(LogSettings(topic_prefix=prefix), "cut")
