"""`replayground retrain` and `sft`: trains on batches that are on the log, without one new rollout, as a run of its own.

    batches of the source ─► copied into this run ─► trainer ─► its own steps and weight versions

The trainer is the one of every run. It begins with a version of the source, under the same number, so that versions of
both runs line up: with the same batches, settings and machine their files are equal, byte for byte.
"""

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from replayground.consumers.reports.runs import job_of
from replayground.deploy import sources
from replayground.deploy.config import parse_config, set_setting
from replayground.deploy.experience.runs import (
    ShowProgress,
    config_of,
    heartbeat,
    logs_in,
    new_run_id,
    origin_of,
    restored_config,
    run_of,
)
from replayground.deploy.local.folder import FieldFolder, create_run_folder
from replayground.deploy.resolve import ResolvedConfig
from replayground.deploy.runs import end_positions, list_runs, started_event, write_end, write_start
from replayground.schemas.errors import BadInput, ReplaygroundError
from replayground.schemas.events import StepTaken, TrajectoryAssembled, VersionAddress, WeightsPublished
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import version_address
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Log
from replayground.streams.log.weights import weights_at
from replayground.streams.replay.copying import CopyRule, batches_from, copy_batches
from replayground.streams.replay.request import RetrainRequest, SftRequest
from replayground.streams.replay.selection import addresses_of, by_partition, find_selection
from replayground.streams.rules.runs import RunState

SAMPLE_SIZE_MIN = 0.1
"effective sample size of a batch, below which it is too far off-policy to be learned from unless that is forced"
_LOOK_SECONDS = 0.3


@dataclass
class RetrainResult:
    """What came of it."""

    run_id: str
    source: str
    steps: list[StepTaken] = field(default_factory=list)
    seconds: float = 0.0
    equal_versions: int = 0
    "versions whose files are those of the source, byte for byte"
    other_versions: int = 0
    "versions that the source has too, with other files"


def ask(
    log: Log,
    source: RunState,
    *,
    begin: VersionAddress | None = None,
    until: int | None = None,
    selection: str = "",
    is_followed: bool = False,
) -> RetrainRequest:
    """Resolves a request. Raises BadInput."""
    if source.kind not in ("practise", "replay", "retrain"):
        raise BadInput(f"{source.run_id} is of kind {source.kind}: it has no batches to train on")
    begin = begin or first_weights_of(log, source)
    if weights_at(log, begin) is None:
        raise BadInput(
            f"version {begin.version} of {begin.run_id} is not on the log: it was removed (versions_kept) or never existed"
        )
    bases = [batch.base_version for batch in batches_from(log, source.run_id, source.positions)]
    wanted = [base for base in bases if base >= begin.version and (until is None or base < until)]
    if not wanted and not (is_followed and source.is_active):
        there = f"versions {min(bases)} to {max(bases) + 1}" if bases else "no batch"
        raise BadInput(f"{source.run_id} has no batch to train on in that range: it has {there}")
    if until is not None and until > max(bases, default=0) + 1 and not is_followed:
        raise BadInput(f"--until {until}: the batches of {source.run_id} lead to version {max(bases) + 1}")
    return RetrainRequest(
        source=source.run_id,
        weights_from=f"{begin.run_id}:{begin.version}",
        until=until,
        selection=selection,
        is_followed=is_followed,
    )


def first_weights_of(log: Log, source: RunState) -> VersionAddress:
    """The version that the first batch of a run was cut for."""
    if source.kind == "replay":
        told: str = msgspec.json.decode(source.request)["weights_from"]
        return version_address(told)
    job = job_of(source)
    return job.copied_version or VersionAddress(run_id=source.run_id, version=job.first_version)


def start(
    log: KafkaLog,
    folder: FieldFolder,
    source: RunState,
    request: RetrainRequest,
    overrides: Mapping[str, Any],
    is_forced: bool,
) -> RunState:
    """Writes RunStarted of the retraining. Raises BadInput for overrides that no setting has, LogUnavailable."""
    run_id = new_run_id(log, "retrain")
    event = started_event(
        run_id=run_id,
        kind="retrain",
        config=msgspec.json.encode(_config(log, source, request, overrides, is_forced)).decode(),
        files=list(source.files),
        seed=source.seed,
        code_version=sources.code_version(),
        packages=sources.package_versions(),
        positions=end_positions(log),
        sources=[source.run_id],
        scorers=source.scorers,
        request=msgspec.json.encode(request).decode(),
    )
    create_run_folder(folder.run(run_id))
    return write_start(log, event)


def _config(
    log: Log, source: RunState, request: RetrainRequest, overrides: Mapping[str, Any], is_forced: bool
) -> dict[str, Any]:
    """The config of the source, with what a retraining does differently."""
    raw = copy.deepcopy(config_of(source))
    begin = version_address(request.weights_from)
    origin = job_of(origin_of(log, source))
    bases = [batch.base_version for batch in batches_from(log, source.run_id, source.positions)]
    wanted = [base for base in bases if base >= begin.version and (request.until is None or base < request.until)]
    is_known = not (request.is_followed or request.selection)
    steps = len(wanted) if is_known else 0
    raw["job"] |= {"weights_from": request.weights_from, "demonstrations": 0, "steps": steps}
    grpo = raw.setdefault("trainer", {}).setdefault("grpo", {})
    # The line of the learning rate is the source's: a retraining of some of its versions must not begin it anew.
    grpo["schedule_steps"] = max(origin.steps, len(bases)) if origin.steps else 0
    grpo["schedule_start"] = max(0, begin.version - origin.first_version)
    grpo["effective_sample_size_min"] = 0.0 if is_forced else SAMPLE_SIZE_MIN
    for setting, value in overrides.items():
        set_setting(raw, setting, value)
    # Checked here, so that a misspelt setting is reported before anything is written.
    parse_config(raw, Path("--set"))
    return raw


def go_on(
    log: KafkaLog, folder: FieldFolder, field_config: ResolvedConfig, state: RunState, show: ShowProgress
) -> RetrainResult | None:
    """Continues a retraining to its end and writes RunEnded; None when Ctrl-C stopped it. Raises ReplaygroundError."""
    began = time.monotonic()
    request = msgspec.json.decode(state.request, type=RetrainRequest)
    try:
        with heartbeat("trainer", field_config, state), logs_in(folder.run(state.run_id), "trainer"):
            _Work(log, folder, field_config, state, request).go(show)
    except KeyboardInterrupt:
        write_end(log, state.run_id, state.starts, "stopped", "interrupted")
        return None
    except ReplaygroundError as error:
        write_end(log, state.run_id, state.starts, "failed", str(error))
        raise
    result = _result(log, state, request)
    result.seconds = time.monotonic() - began
    write_end(log, state.run_id, state.starts, "finished", f"{len(result.steps)} steps taken")
    return result


class _Work:
    """Copies batches in one thread and trains in another, until all that is wanted is trained."""

    def __init__(
        self,
        log: KafkaLog,
        folder: FieldFolder,
        field_config: ResolvedConfig,
        state: RunState,
        request: RetrainRequest,
    ) -> None:
        self._log, self._field, self._state, self._request = log, field_config, state, request
        self._raw = restored_config(folder, field_config, state)
        self._stop = threading.Event()
        self._metrics = ProgramMetrics()
        self._failures: list[BaseException] = []
        self._batches: int | None = None
        "how many there are, once all are copied"
        self._source = list_runs(log)[request.source]
        self._first_version = version_address(request.weights_from).version

    def go(self, show: ShowProgress) -> None:
        """Blocks until the last version is published. Raises what a thread raised."""
        threads = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True) for work in (self._copy, self._train)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(_LOOK_SECONDS)
                self._look(show)
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._failures:
            raise self._failures[0]

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:  # handed to the thread that waits
            self._failures.append(error)
            self._stop.set()

    def _look(self, show: ShowProgress) -> None:
        taken = int(self._metrics.figures().get("version", self._first_version)) - self._first_version
        show(taken, self._batches or 0, self._metrics.detail)
        if self._batches is not None and taken >= self._batches:
            self._stop.set()

    def _copy(self) -> None:
        request, run = self._request, run_of(self._field, self._state, "replay")
        selections = by_partition(find_selection(self._log, request.selection)) if request.selection else None
        rule = CopyRule(
            run_id=run.run_id,
            source=request.source,
            first_version=self._first_version,
            until=request.until,
            selections=selections,
        )
        with closing(open_log(run)) as log:
            copied = copy_batches(run, log, rule, self._source.positions, self._has_ended, self._stop)
        if copied is not None:
            self._batches = copied.index_next

    def _has_ended(self) -> bool:
        return not self._request.is_followed or not list_runs(self._log)[self._request.source].is_active

    def _train(self) -> None:
        # Here, since it loads torch.
        from replayground.trainer.config import TrainerSettings
        from replayground.trainer.loop import run as run_trainer

        run = run_of(self._field, self._state, "trainer")
        run = msgspec.structs.replace(run, job=msgspec.structs.replace(run.job, module=self._raw["job"]["module"]))
        settings = msgspec.convert(self._raw.get("trainer", {}), TrainerSettings)
        # Somebody waits at the terminal: a step that is refused ends the run with its reason.
        run_trainer(run, settings, self._metrics, self._stop, pauses_when_refused=False)


def ask_sft(log: Log, selection: str, begin: VersionAddress) -> SftRequest:
    """Resolves a request for SFT. Raises BadInput."""
    if weights_at(log, begin) is None:
        raise BadInput(
            f"version {begin.version} of {begin.run_id} is not on the log: it was removed (versions_kept) or never existed"
        )
    return SftRequest(selection=selection, weights_from=f"{begin.run_id}:{begin.version}")


def start_sft(
    log: KafkaLog, folder: FieldFolder, source: RunState, request: SftRequest, overrides: Mapping[str, Any]
) -> RunState:
    """Writes RunStarted of an SFT: job and config are those of the run whose weights it begins with. Raises BadInput."""
    raw = copy.deepcopy(config_of(source))
    raw["job"] |= {"weights_from": request.weights_from, "demonstrations": 0, "steps": 1}
    for setting, value in overrides.items():
        set_setting(raw, setting, value)
    parse_config(raw, Path("--set"))
    run_id = new_run_id(log, "sft")
    selected = find_selection(log, request.selection)
    event = started_event(
        run_id=run_id,
        kind="sft",
        config=msgspec.json.encode(raw).decode(),
        files=list(source.files),
        seed=source.seed,
        code_version=sources.code_version(),
        packages=sources.package_versions(),
        positions=end_positions(log),
        sources=sorted({source.run_id, *selected.runs}),
        request=msgspec.json.encode(request).decode(),
    )
    create_run_folder(folder.run(run_id))
    return write_start(log, event)


def go_on_sft(
    log: KafkaLog, folder: FieldFolder, field_config: ResolvedConfig, state: RunState, show: ShowProgress
) -> RetrainResult | None:
    """Continues an SFT to its end and writes RunEnded; None when Ctrl-C stopped it. Raises ReplaygroundError."""
    began = time.monotonic()
    request = msgspec.json.decode(state.request, type=SftRequest)
    try:
        with heartbeat("trainer", field_config, state), logs_in(folder.run(state.run_id), "trainer"):
            _SftWork(log, folder, field_config, state, request).go(show)
    except KeyboardInterrupt:
        write_end(log, state.run_id, state.starts, "stopped", "interrupted")
        return None
    except ReplaygroundError as error:
        write_end(log, state.run_id, state.starts, "failed", str(error))
        raise
    result = RetrainResult(state.run_id, state.sources[0])
    result.steps = [step for step in steps_of(log, state) if step.kind == "sft"]
    result.seconds = time.monotonic() - began
    write_end(log, state.run_id, state.starts, "finished", "fine-tuned")
    return result


class _SftWork:
    """Fine-tunes in a thread, so that the terminal shows how far it is."""

    def __init__(
        self, log: KafkaLog, folder: FieldFolder, field_config: ResolvedConfig, state: RunState, request: SftRequest
    ) -> None:
        self._log, self._field, self._state, self._request = log, field_config, state, request
        self._raw = restored_config(folder, field_config, state)
        self._stop = threading.Event()
        self._metrics = ProgramMetrics()
        self._failures: list[BaseException] = []

    def go(self, show: ShowProgress) -> None:
        thread = threading.Thread(target=self._guarded, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_LOOK_SECONDS)
                share = self._metrics.figures().get("progress", 0.0)
                show(round(1000 * share), 1000, self._metrics.detail)
        finally:
            self._stop.set()
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _guarded(self) -> None:
        try:
            self._train()
        except BaseException as error:  # handed to the thread that waits
            self._failures.append(error)

    def _train(self) -> None:
        # Here, since it loads torch.
        from replayground.trainer.config import TrainerSettings
        from replayground.trainer.loop import run_sft

        run = run_of(self._field, self._state, "trainer")
        run = msgspec.structs.replace(run, job=msgspec.structs.replace(run.job, module=self._raw["job"]["module"]))
        self._metrics.detail = "reading the chosen trajectories"
        chosen = list(addresses_of(find_selection(self._log, self._request.selection)))
        trajectories = [event for event in self._log.read_at(chosen) if isinstance(event, TrajectoryAssembled)]
        settings = msgspec.convert(self._raw.get("trainer", {}), TrainerSettings)
        run_sft(run, settings, trajectories, self._metrics, self._stop)


def _result(log: Log, state: RunState, request: RetrainRequest) -> RetrainResult:
    begin = version_address(request.weights_from)
    result = RetrainResult(state.run_id, request.source)
    result.steps = [step for step in steps_of(log, state) if step.kind == "grpo"]
    theirs = digests_of(log, list_runs(log)[request.source]) or digests_of(log, list_runs(log)[begin.run_id])
    for version, files in digests_of(log, state).items():
        if version > begin.version and version in theirs:
            result.equal_versions += files == theirs[version]
            result.other_versions += files != theirs[version]
    return result


def steps_of(log: Log, state: RunState) -> Sequence[StepTaken]:
    """All steps of a run, in order."""
    found: list[StepTaken] = []
    with closing(log.reader(["steps"], start=state.positions, run_id=state.run_id)) as reader:
        while not reader.caught_up():
            events = [delivery.event for delivery in reader.poll(1000, 0.2)]
            found += [e for e in events if isinstance(e, StepTaken) and e.meta.run_id == state.run_id]
    return found


def digests_of(log: Log, state: RunState) -> dict[int, dict[str, str]]:
    """Digests of the files of every version of a run, by name."""
    found: dict[int, dict[str, str]] = {}
    with closing(log.reader(["weights"], start=state.positions, run_id=state.run_id)) as reader:
        while not reader.caught_up():
            for delivery in reader.poll(1000, 0.2):
                event = delivery.event
                if isinstance(event, WeightsPublished) and event.meta.run_id == state.run_id:
                    found[event.version] = {file.name: file.sha256 for file in event.files}
    return found
