"""`replayground traces rebuild`, as a person calls it: the store is filled again from the log, and is the one that it was."""

from pathlib import Path

from replayground.deploy.local.stack import LogAddresses
from replayground.deploy.resolve import load
from replayground.deploy.traces_client import TracesClient
from tests.deploy.recorded_field import PROJECT, command, record_run, running_field


def test_a_store_is_rebuilt_from_the_log_alone(tmp_path: Path, kafka_addresses: LogAddresses) -> None:
    with running_field(tmp_path, kafka_addresses) as field:
        run_id = record_run(field, PROJECT / "examples/times_tables/job.py", [["7", "8"]], ["exact"])
        refused = command("traces", "rebuild", "--field", str(field.path))
        assert (refused.returncode, "is running" in refused.stderr) == (2, True)
        client = TracesClient(load(field).page_url)
        client.catch_up()
        asked = f"SELECT count() FROM events WHERE run_id = '{run_id}'"
        ((before,),) = client.sql(asked)["rows"]
        assert before > 0
    store = field.path / "traces"
    (store / "stray").write_text("of the store before")
    rebuilt = command("traces", "rebuild", "--field", str(field.path))
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert "identical to those before" in rebuilt.stdout
    # Another folder, and the one before is gone.
    assert not (store / "stray").exists()
    assert not store.with_name("traces.before").exists()
    again = command("sql", asked, "--format", "csv", "--field", str(field.path))
    assert again.stdout.split()[-1] == str(before), again.stderr
