"""A field on the broker of the session with a run that was played and scored, for tests of commands on old experience."""

import contextlib
import io
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from replayground.deploy.cli import main
from replayground.deploy.local.folder import FieldFolder
from replayground.deploy.local.stack import LogAddresses
from replayground.deploy.resolve import RequestedConfig, config_for_log, load
from replayground.deploy.run_lifecycle import log_of, scorers_of
from replayground.deploy.runs import end_positions, started_event, write_start
from replayground.deploy.sources import store_files
from replayground.schemas.blobs import open_blobs
from replayground.schemas.events import Event, RolloutStarted
from replayground.schemas.job import load_job
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.protocol import Log
from tests.flow.synthetic import rollout

PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Called:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def command(*arguments: str) -> Called:
    """A command in this process: starting one takes seconds, most of them for imports."""
    out, err = io.StringIO(), io.StringIO()
    code, before = 0, sys.argv
    sys.argv = ["replayground", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.argv = before
    return Called(code, out.getvalue(), err.getvalue())


def run_apart(folder: Path, *arguments: str) -> int:
    """A command in a process of its own, which a field outlives; its exit code."""
    # Without a limit of ours: `up` itself gives up after five minutes.
    called = [sys.executable, "-m", "replayground.deploy.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    return subprocess.run(called, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False).returncode


@contextmanager
def running_field(folder: Path, addresses: LogAddresses) -> Iterator[FieldFolder]:
    """A field that is up: its traces program alone, since broker and registry are those of the session."""
    (folder / "field.toml").write_text(
        f'[log]\nbootstrap_servers = "{addresses.log.bootstrap_servers}"\nregistry_url = "{addresses.log.registry_url}"\n'
        f'[blobs]\nurl = "{addresses.blobs_url}"\n'
    )
    assert run_apart(folder, "up", "field.toml") == 0
    try:
        yield FieldFolder(folder / "field")
    finally:
        run_apart(folder, "down")


def record_run(
    field: FieldFolder,
    module: Path,
    answers: Sequence[Sequence[str]],
    scorers: Sequence[str],
    versions: Mapping[str, str] | None = None,
) -> str:
    """A run of a job with these groups of answers, the right one being 7, assembled and scored; returns its id.
    `versions`: what RunStarted says of its scorers, when that is not what the module has."""
    resolved = load(field)
    run_id = f"recorded-{uuid.uuid4().hex[:8]}"
    asked = RequestedConfig(source="test", raw={"job": {"module": str(module)}})
    with log_of(resolved) as log:
        log.make_topics()
        start = started_event(
            run_id=run_id,
            kind="practise",
            config=config_for_log(asked),
            files=store_files(open_blobs(resolved.run_of("operator")), asked.raw),
            seed=0,
            code_version="test",
            packages={},
            positions=end_positions(log),
            scorers={**scorers_of(str(module)), **(versions or {})},
        )
        write_start(log, start)
        play(log, run_id, answers, scorers)
        Driver(log, hops(load_job(str(module)).scorers, "centred"), run_id).run_until_caught_up()
    return run_id


def play(log: Log, run_id: str, answers: Sequence[Sequence[str]], scorers: Sequence[str]) -> None:
    for group, members in enumerate(answers):
        for index, answer in enumerate(members):
            for event in rollout(group, index, answer=answer, group_size=len(members), run_id=run_id):
                log.append(with_scorers(event, scorers))
    log.flush()


def with_scorers(event: Event, scorers: Sequence[str]) -> Event:
    if not isinstance(event, RolloutStarted):
        return event
    return msgspec.structs.replace(event, task=msgspec.structs.replace(event.task, scorers=list(scorers)))
