"""The harness around a program, in a process of its own on the real broker."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Producer

from replayground.deploy.local.folder import FieldFolder, RunFolder
from replayground.deploy.local.supervisor import TAKEN_OVER
from replayground.deploy.programs import PROGRAM_BY_NAME
from replayground.deploy.resolve import RequestedConfig, resolve_field, resolve_run
from replayground.deploy.serve import StallWatch, Usage, settings_of
from replayground.schemas.events import WorkerSeen
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from tests.deploy.test_supervisor import eventually

PROJECT = Path(__file__).resolve().parents[2]
SERVE = """
import sys
from pathlib import Path
from replayground.deploy.programs import Program
from replayground.deploy.resolve import load_file
from replayground.deploy.serve import end_process, serve
folder = Path(sys.argv[1])
program = Program("cut", "tests.deploy.programs_for_tests", "", 1, ends_when_stalled=sys.argv[2] == "hangs")
end_process(serve(program, load_file(folder / "run.json"), sys.argv[2], folder), 2.0)
"""


class Served:
    """A program that is being served."""

    def __init__(self, folder: Path, run: Run, worker: str) -> None:
        look_seconds = 1.0 if worker == "waits" else 3600.0
        harness = {"heartbeat_seconds": 0.2, "stall_seconds": 1.0, "retention_look_seconds": look_seconds}
        asked = RequestedConfig(source="test.toml", raw={"harness": harness}, seed=0)
        field = resolve_field(FieldFolder(folder), asked)
        on = msgspec.structs.replace(field, log=run.log, blobs_url=run.blobs_url)
        resolved = resolve_run(RunFolder(folder / f"serve-{worker}"), on, asked, (), 0)
        (folder / "run.json").write_bytes(msgspec.json.encode(resolved))
        self.run_id = resolved.run_id
        self.address = f"127.0.0.1:{resolved.health_ports['cut']}"
        self._url = f"http://{self.address}"
        command = [sys.executable, "-c", SERVE, str(folder), worker]
        self.process = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True)

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self._url + path, timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ended(self) -> tuple[int, str]:
        """Exit code and what was printed."""
        _, printed = self.process.communicate(timeout=60)
        return self.process.returncode, printed


def heartbeats(run: Run, run_id: str) -> list[WorkerSeen]:
    log = open_log(run)
    reader = log.reader(["control"])
    found: list[WorkerSeen] = []
    while not reader.caught_up():
        events = [delivery.event for delivery in reader.poll(1000, 1.0)]
        found += [event for event in events if isinstance(event, WorkerSeen) and event.meta.run_id == run_id]
    reader.close()
    log.close()
    return found


def test_a_program_is_watched_while_it_runs_and_drains_when_told(tmp_path: Path, kafka_run: Run) -> None:
    served = Served(tmp_path, kafka_run, "works")
    # The port opens before the program has done anything, so its first answer may be "ok".
    assert eventually(lambda: served.page("/healthz") == (200, "waiting to be stopped\n"), 60)
    assert 'replayground_events_read{program="cut",worker="works"} 7.0' in served.page("/metrics")[1]
    assert served.page("/else")[0] == 404
    (target,) = (tmp_path / "targets").iterdir()
    (scraped,) = json.loads(target.read_text())
    assert scraped == {"targets": [served.address], "labels": {"run": served.run_id}}
    time.sleep(1.0)  # for some beats; they are read when it has ended, or the reader would run after them
    served.process.terminate()
    code, printed = served.ended()
    assert code == 0
    assert not target.exists()
    assert [json.loads(line)["event"] for line in printed.splitlines()] == ["started", "health", "drained"]
    beats = heartbeats(kafka_run, served.run_id)
    last = beats[-1]
    assert len(beats) > 1
    assert last.role == "cut"
    assert (last.load["events_read"], last.load["events_written"]) == (7, 1), "the last beat has the final figures"
    assert last.load["memory_bytes_peak"] >= last.load["memory_bytes"] > 10_000_000
    assert last.load["cpu_seconds"] > 0


def test_what_waits_unread_for_too_long_is_an_error_and_a_figure(tmp_path: Path, kafka_run: Run) -> None:
    """Of the group of another program, which may be the one that hangs. A message of 29 days ago stands for a long wait."""
    log = open_log(kafka_run)
    reader = log.reader(["control"], "traces")
    while not reader.caught_up():
        reader.poll(1000, 1.0)
    reader.commit()
    reader.close()
    log.close()
    producer = Producer({"bootstrap.servers": kafka_run.log.bootstrap_servers})
    producer.produce("control", b"no event", b"key", timestamp=int((time.time() - 29 * 24 * 3600) * 1000))
    producer.flush()
    served = Served(tmp_path, kafka_run, "waits")
    figure = 'replayground_retention_seconds_left{program="cut",worker="waits"}'
    assert eventually(lambda: figure in served.page("/metrics")[1], 60)
    served.process.terminate()
    code, printed = served.ended()
    assert code == 0
    (alarm,) = [told for told in map(json.loads, printed.splitlines()) if told["event"] == "unread_messages_expiring"]
    assert (alarm["level"], alarm["group"], alarm["topic"]) == ("error", "traces", "control")
    assert alarm["seconds_left"] < 24 * 3600


def test_ctrl_c_drains_too_and_who_has_finished_stays_until_told(tmp_path: Path, kafka_run: Run) -> None:
    served = Served(tmp_path, kafka_run, "finishes")
    assert eventually(lambda: served.page("/healthz") == (200, "finished\n"), 60)
    os.kill(served.process.pid, signal.SIGINT)
    assert served.ended()[0] == 0


def test_a_stall_is_an_error_that_is_reported(tmp_path: Path, kafka_run: Run) -> None:
    served = Served(tmp_path, kafka_run, "stalls")
    assert eventually(lambda: served.page("/healthz")[0] == 503, 60)
    served.process.terminate()
    assert '"event": "stalled"' in served.ended()[1]


def test_a_program_that_hangs_is_ended_to_be_started_again(tmp_path: Path, kafka_run: Run) -> None:
    code, printed = Served(tmp_path, kafka_run, "hangs").ended()
    assert code == 1
    assert '"event": "stalled"' in printed


def test_a_program_whose_library_leaves_a_thread_ends_all_the_same(tmp_path: Path, kafka_run: Run) -> None:
    """Else the process would stay, do nothing, and never be started again."""
    code, printed = Served(tmp_path, kafka_run, "leaves-a-thread").ended()
    assert code == 1
    told = [json.loads(line) for line in printed.splitlines()]
    assert [line["event"] for line in told][-2:] == ["crashed", "threads_left"]
    assert "of a library" in told[-1]["threads"]


def test_a_further_worker_answers_on_a_port_of_its_own(tmp_path: Path, kafka_run: Run) -> None:
    first = Served(tmp_path, kafka_run, "works")
    assert eventually(lambda: first.page("/healthz")[0] == 200, 60)
    second = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path), "works-too"], cwd=PROJECT, stderr=subprocess.PIPE, text=True
    )
    assert second.stderr is not None
    for line in second.stderr:
        if '"event": "health"' in line:
            break
    with urllib.request.urlopen(json.loads(line)["address"], timeout=5) as response:
        assert response.status == 200
    second.terminate()
    second.communicate(timeout=60)
    assert second.returncode == 0
    first.process.terminate()
    first.ended()


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, kafka_run: Run) -> None:
    code, printed = Served(tmp_path, kafka_run, "refuses").ended()
    assert code == 2
    assert printed.splitlines()[-1] == "tasks.jsonl line 3 is no task: give it a prompt"
    assert (tmp_path / "stopped_because").read_text() == "tasks.jsonl line 3 is no task: give it a prompt\n"


def test_a_run_that_was_taken_over_is_exit_code_3(tmp_path: Path, kafka_run: Run) -> None:
    code, printed = Served(tmp_path, kafka_run, "gives-way").ended()
    assert code == TAKEN_OVER == 3
    assert json.loads(printed.splitlines()[-1])["reason"] == "start 0 of run serve was taken over by start 1"


def test_a_crash_is_logged_with_its_traceback(tmp_path: Path, kafka_run: Run) -> None:
    code, printed = Served(tmp_path, kafka_run, "crashes").ended()
    assert code == 1
    crashed = json.loads(printed.splitlines()[-1])
    assert crashed["event"] == "crashed"
    assert "ValueError: something unexpected" in crashed["exception"]
    assert not (tmp_path / "stopped_because").exists()


@pytest.mark.parametrize(
    ("figures", "stalled"),
    [
        ([{"lag": 1.0}, {"lag": 1.0}, {"lag": 1.0}], [False, False, True]),
        ([{"lag": 1.0}, {"lag": 1.0, "events_read": 1.0}, {"lag": 1.0, "events_read": 1.0}], [False, False, False]),
        ([{"lag": 0.0}, {"lag": 0.0}, {"lag": 0.0}], [False, False, False]),
        ([{"lag": 1.0}, {"lag": 0.0}, {"lag": 1.0}, {"lag": 1.0}], [False, False, False, True]),
    ],
)
def test_stalled_is_work_waiting_and_none_taken(figures: list[dict[str, float]], stalled: list[bool]) -> None:
    watch = StallWatch(stall_seconds=10.0)
    assert [watch.is_stalled(seen, 100.0 + 6.0 * beat) for beat, seen in enumerate(figures)] == stalled


def test_time_in_which_nobody_looked_is_no_stall() -> None:
    """A process that was stopped and goes on after minutes has had no chance to take anything."""
    watch, waits = StallWatch(stall_seconds=10.0), {"lag": 1.0}
    assert [watch.is_stalled(waits, now) for now in (100.0, 102.0, 500.0, 502.0)] == [False] * 4
    assert [watch.is_stalled(waits, now) for now in (504.0, 506.0, 508.0, 510.0)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("dsn", "told"),
    [
        ("chdb:///folder", "chdb:///folder"),
        ("clickhouse://me@host:8123/db", "clickhouse://me@host:8123/db"),
        ("clickhouse://me:env:STORE_PASSWORD@host:8123/db", "clickhouse://me:p%40ss@host:8123/db"),
    ],
)
def test_the_password_of_the_store_is_read_when_the_program_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsn: str, told: str
) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "p@ss")
    asked = RequestedConfig(source="test.toml", raw={"traces": {"dsn": dsn}})
    resolved = resolve_field(FieldFolder(tmp_path), asked)
    assert resolved.config.traces.dsn == dsn, "what is written down"
    assert settings_of(PROGRAM_BY_NAME["traces"], resolved).dsn == told


def test_processor_time_of_children_that_ended_still_counts() -> None:
    usage = Usage()
    burn = "import time\nuntil = time.process_time() + 0.5\nwhile time.process_time() < until: pass\ninput()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE)
    before = usage.figures()["cpu_seconds"]
    assert eventually(lambda: usage.figures()["cpu_seconds"] > before + 0.4)
    peak = usage.figures()
    child.communicate(b"\n")
    after = usage.figures()
    assert after["cpu_seconds"] >= peak["cpu_seconds"]
    assert after["memory_bytes_peak"] >= peak["memory_bytes"]
