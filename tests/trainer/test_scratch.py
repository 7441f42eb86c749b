"""The temporary folder of a trainer: gone at the end, and after a kill at the next start; one in use stays."""

import subprocess
import sys
from pathlib import Path

import pytest

from replayground.trainer.scratch import scratch_folder

_HOLD_CODE = """
import sys
from replayground.trainer.scratch import scratch_folder
with scratch_folder("trainer-") as folder:
    (folder / "model").write_bytes(b"weights")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_of_a_killed_process_is_removed_and_one_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD_CODE],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        with scratch_folder("trainer-") as own:
            assert (held / "model").read_bytes() == b"weights"
            assert held != own
        assert list(tmp_path.iterdir()) == [held]
        holder.kill()
    with scratch_folder("trainer-") as own:
        assert list(tmp_path.iterdir()) == [own]
    assert list(tmp_path.iterdir()) == []
