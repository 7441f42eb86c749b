"""kill -9 of `rescore` and `retrain` at random moments, on a real field, until each has ended: nothing is lost or counted twice.

python -m tests.torture.replay_kills FIELD RUN [--kills 10]     RUN has practised on FIELD, which is up
"""

import argparse
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayground import Field
from replayground.schemas.events import BatchCut, GroupCompleted, RewardAssigned, StepTaken, WeightsPublished
from tests.torture.progress import tell

_COMMAND = Path(sys.executable).with_name("replayground")
_STARTED = re.compile(rb"(?:rescoring|retraining) as ([^\s,]+)")


@dataclass(frozen=True)
class Disturbed:
    """A command that was killed and resumed until it ended."""

    run_id: str
    kills: int


def torture_replay(field: Path, run: str, kills: int, seed: int) -> str:
    """Both commands, disturbed and undisturbed, from the same run. Returns what came of it; asserts that it holds."""
    chance = random.Random(seed)
    quiet = _run_to_end(field, ["rescore", "--run", run])
    rough = _kill_and_resume(field, ["rescore", "--run", run], kills, chance)
    for topic in ("rewards", "groups", "batches"):
        expected, found = (_facts(field, topic, run_id) for run_id in (quiet, rough.run_id))
        assert expected == found, f"{topic} differ: {len(expected)} and {len(found)}"
        tell(f"replay: {len(found):,} {topic} are those of the undisturbed one, after {rough.kills} kills")
    quiet_model = _run_to_end(field, ["retrain", "--run", quiet, "--force"])
    rough_model = _kill_and_resume(field, ["retrain", "--run", quiet, "--force"], kills, chance)
    expected, found = (_facts(field, "weights", run_id) for run_id in (quiet_model, rough_model.run_id))
    assert expected == found, "weights differ"
    steps = _facts(field, "steps", rough_model.run_id)
    assert len({step[0] for step in steps}) == len(steps), "a step was taken twice"
    return (
        f"{rough.kills} times kill -9 of a rescore and {rough_model.kills} of a retrain: rewards, groups and batches "
        f"equal those of undisturbed ones, {len(found)} weight versions byte for byte"
    )


def _run_to_end(field: Path, arguments: Sequence[str]) -> str:
    done = subprocess.run([_COMMAND, *arguments, "--field", field], stdout=subprocess.PIPE, check=True)
    return _run_id(done.stdout)


def _kill_and_resume(field: Path, arguments: Sequence[str], kills: int, chance: random.Random) -> Disturbed:
    began = time.monotonic()
    _run_to_end(field, arguments)
    usual_seconds = time.monotonic() - began
    run_id, hits = "", 0
    command: Sequence[str] = arguments
    while True:
        with subprocess.Popen([_COMMAND, *command, "--field", field], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            if not run_id:
                run_id = _run_id(next(line for line in process.stdout if _STARTED.search(line)))
            try:
                limit = chance.uniform(0.0, usual_seconds) if hits < kills else None
                process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                process.kill()
                hits += 1
                command = ["resume", run_id]
                continue
        assert process.returncode == 0, f"{' '.join(command)} ended with exit code {process.returncode}"
        return Disturbed(run_id, hits)


def _run_id(text: bytes) -> str:
    found = _STARTED.search(text)
    assert found is not None, text
    return found.group(1).decode()


def _facts(field: Path, topic: str, run_id: str) -> list[Any]:
    """What the events of a run say, without the names that each run has of its own; sorted."""
    return sorted(_plain(event) for event in Field(field).tail(topic, run=run_id))


def _plain(event: Any) -> tuple[Any, ...]:
    match event:
        case RewardAssigned():
            return (event.meta.attempt_id, event.scorer, event.score, event.verdict)
        case GroupCompleted():
            return (event.meta.group_id, [(member.attempt_id, member.advantage) for member in event.members])
        case BatchCut():
            return (event.base_version, [(member.trajectory_id, member.advantage) for member in event.members])
        case WeightsPublished():
            return (event.version, [(file.name, file.sha256) for file in event.files])
        case StepTaken():
            return (event.new_version, event.kind)
    raise AssertionError(f"{type(event).__name__} is not compared")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.replay_kills", description=__doc__)
    parser.add_argument("field", type=Path)
    parser.add_argument("run")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    print(torture_replay(given.field, given.run, given.kills, given.seed))
