"""Steps a minute of a retraining, beside those of the run that practised, both on one field.

python -m bench.replay_field FIELD RETRAINING    after examples/replay/showcase.py, for instance; FIELD may be up or down

The clock runs from the first optimizer step of a run to its last, by the times in the events: what either needs to
start is left out. The last line is JSON.
"""

import json
import sys

from bench.rounds import Figure, figure
from replayground import Field
from replayground.events import RunStarted, StepTaken


def retrain_to_online(field: Field, run: str) -> dict[str, Figure]:
    """Limit: at least 3."""
    started = {event.meta.run_id: event for event in field.tail("runs") if isinstance(event, RunStarted)}
    (retraining,) = [event for run_id, event in started.items() if run_id.startswith(run)]
    origin = retraining
    # A rescored run has batches and no steps: what was practised is behind it.
    while origin.kind != "practise":
        origin = started[origin.sources[0]]
    again, online = (_steps_per_minute(field, event.meta.run_id) for event in (retraining, origin))
    print(f"{online:.1f} steps a minute online, {again:.1f} again", flush=True)
    return {"retrain_to_online": figure([again / online]), "retrain_steps_per_minute": figure([again])}


def _steps_per_minute(field: Field, run_id: str) -> float:
    steps = [
        event for event in field.tail("steps", run=run_id) if isinstance(event, StepTaken) and event.kind == "grpo"
    ]
    times = [step.meta.timestamp for step in steps]
    return 60e6 * (len(times) - 1) / (max(times) - min(times))


if __name__ == "__main__":
    found = retrain_to_online(Field(sys.argv[1]), sys.argv[2])
    print(json.dumps({name: value.median for name, value in found.items()}))
