"""`replayground eval`: the config of a run that judges one weight version of any run on held-out tasks."""

import copy
from typing import Any

from replayground.deploy.experience.retraining import digests_of
from replayground.deploy.experience.runs import origin_of, restored_config
from replayground.deploy.local.folder import FieldFolder
from replayground.deploy.programs import PROGRAMS_OF_RUN
from replayground.deploy.resolve import RequestedConfig, ResolvedConfig
from replayground.deploy.runs import find_run, list_runs
from replayground.schemas.errors import BadInput
from replayground.schemas.events import VersionAddress
from replayground.schemas.run import version_address
from replayground.streams.log.protocol import Log
from replayground.streams.log.weights import weights_at
from replayground.streams.rules.runs import RunState

_TRAINING_ONLY = ("cut",)
"programs that an evaluation does not need; the trainer publishes the copy of the version"


def request_evaluation(
    log: Log, folder: FieldFolder, field: ResolvedConfig, text: str, tasks: int | None
) -> tuple[RequestedConfig, RunState]:
    """The config of an evaluation of RUN[:VERSION], and the run. Raises BadInput."""
    if tasks is not None and tasks < 1:
        raise BadInput(f"--tasks {tasks}: at least one task is needed")
    address, state = find_version(log, text)
    # Job, tools and tasks are those of the run that practised; a retraining has the same.
    raw: dict[str, Any] = copy.deepcopy(restored_config(folder, field, origin_of(log, state)))
    raw["job"] |= {
        "weights_from": f"{address.run_id}:{address.version}",
        "demonstrations": 0,
        "steps": 0,
        "evaluates_only": True,
    }
    if tasks is not None:
        raw.setdefault("feeder", {})["evaluation_tasks"] = tasks
    programs = raw.setdefault("harness", {}).get("programs") or [program.name for program in PROGRAMS_OF_RUN]
    raw["harness"]["programs"] = [name for name in programs if name not in _TRAINING_ONLY]
    return RequestedConfig(source=f"eval-v{address.version}", raw=raw, seed=state.seed), state


def find_version(log: Log, text: str) -> tuple[VersionAddress, RunState]:
    """RUN:VERSION, or the newest version of RUN; any beginning of the run's id is enough. Raises BadInput."""
    states = list_runs(log)
    if ":" not in text:
        state = find_run(states.values(), text)
        versions = digests_of(log, state)
        if not versions:
            raise BadInput(f"{state.run_id} has published no weights")
        return VersionAddress(run_id=state.run_id, version=max(versions)), state
    asked = version_address(text)
    state = find_run(states.values(), asked.run_id)
    address = VersionAddress(run_id=state.run_id, version=asked.version)
    if weights_at(log, address, state.positions) is None:
        there = sorted(digests_of(log, state))
        known = f"it has {there[0]} to {there[-1]}" if there else "it has none"
        raise BadInput(f"{state.run_id} has no version {asked.version}: {known}")
    return address, state
