"""Steps a minute of a retraining, beside those of the run that practised, both on one field: part `online` of bench.replay.

python -m bench.replay_online FIELD RETRAINING    the same of runs that are there; FIELD may be up or down

The default job practises with vLLM and sandboxes, and its batches are trained on again from the log. The clock runs from
the first optimizer step of a run to its last, by the times in the events: what either needs to start is left out. The
versions of both must be equal, byte for byte.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.rounds import Figure, figure
from replayground import Field
from replayground.deploy.config import DEFAULT_CONFIG
from replayground.events import Event, RunStarted, StepTaken, WeightsPublished

_STEPS = 12
"of the default job: the first ones"
_QUICK = {
    "steps = 40": "steps = 4",
    "demonstrations = 6000": "demonstrations = 600",
    "steps = 1400": "steps = 200",
    "groups_per_batch = 16": "groups_per_batch = 4",
}


def online(quick: bool) -> dict[str, Figure]:
    """Plays the job, retrains, and compares. Limit: retrain_to_online at least 3."""
    with _field() as folder:
        job = folder.parent / "job.toml"
        job.write_text(_job(quick))
        _replayground(folder, "run", str(job))
        field = Field(folder)
        (practised,) = (event.meta.run_id for event in _started(field).values())
        # Data of the run itself: it is as stale as it was then, so nothing is forced.
        _replayground(folder, "retrain", "--run", practised)
        (again,) = (event.meta.run_id for event in _started(field).values() if event.kind == "retrain")
        return retrain_to_online(field, again)


def _job(quick: bool) -> str:
    """The default job with fewer steps and hardly an evaluation, which is no part of what is compared."""
    few = {"evaluation_tasks = 600": "evaluation_tasks = 8", "evaluation_every = 20": "evaluation_every = 0"}
    text = DEFAULT_CONFIG.read_text()
    for old, new in (few | (_QUICK if quick else {"steps = 40": f"steps = {_STEPS}"})).items():
        assert f"\n{old} " in text or f"\n{old}\n" in text, old
        text = text.replace(f"\n{old}", f"\n{new}", 1)
    return text


@contextmanager
def _field() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="replayground-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "field"
        _replayground(folder, "up")
        try:
            yield folder
        finally:
            _replayground(folder, "down")


def _replayground(folder: Path, *arguments: str) -> None:
    """One command. What it prints goes to stderr: the last line of stdout is the result of the bench."""
    command = [sys.executable, "-m", "replayground.deploy.cli", *arguments, "--field", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def retrain_to_online(field: Field, run: str) -> dict[str, Figure]:
    """Figures of a retraining, named by the beginning of its id, and the run that practised."""
    started = _started(field)
    (retraining,) = [event for run_id, event in started.items() if run_id.startswith(run)]
    origin = retraining
    # A rescored run has batches and no steps: what was practised is behind it.
    while origin.kind != "practise":
        origin = started[origin.sources[0]]
    again, practised = (_steps_per_minute(field, event.meta.run_id) for event in (retraining, origin))
    equal, compared = _equal_versions(field, retraining.meta.run_id, origin.meta.run_id)
    print(f"{practised:.1f} steps a minute online, {again:.1f} again; {equal} of {compared} versions are equal")
    return {
        "retrain_to_online": figure([again / practised]),
        "retrain_steps_per_minute": figure([again]),
        "retrain_equal_versions": figure([equal / compared]),
    }


def _started(field: Field) -> dict[str, RunStarted]:
    return {event.meta.run_id: event for event in field.tail("runs") if isinstance(event, RunStarted)}


def _events[E: Event](field: Field, topic: str, run_id: str, kind: type[E]) -> list[E]:
    return [event for event in field.tail(topic, run=run_id) if isinstance(event, kind)]


def _steps_per_minute(field: Field, run_id: str) -> float:
    times = [step.meta.timestamp for step in _events(field, "steps", run_id, StepTaken) if step.kind == "grpo"]
    return 60e6 * (len(times) - 1) / (max(times) - min(times))


def _equal_versions(field: Field, again: str, practised: str) -> tuple[int, int]:
    """How many versions that both runs made have the same files, of how many."""
    digests = [
        {
            event.version: [file.sha256 for file in event.files]
            for event in _events(field, "weights", run_id, WeightsPublished)
            if event.copied_from is None
        }
        for run_id in (again, practised)
    ]
    both = digests[0].keys() & digests[1].keys()
    return sum(digests[0][version] == digests[1][version] for version in both), len(both)


if __name__ == "__main__":
    found = retrain_to_online(Field(sys.argv[1]), sys.argv[2])
    print(json.dumps({name: value.median for name, value in found.items()}))
