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
from itertools import batched
from pathlib import Path
from typing import Any, Literal

import msgspec

from replayground.consumers.reports.runs import job_of
from replayground.deploy import sources
from replayground.deploy.config import parse_config, set_setting
from replayground.deploy.experience.runs import (
    ShowProgress,
    config_of,
    heartbeat,
    logs_in,
    origin_of,
    require_trajectories,
    restored_config,
    run_of,
    write_new_run,
)
from replayground.deploy.local.folder import FieldFolder, create_run_folder
from replayground.deploy.resolve import ResolvedConfig
from replayground.deploy.runs import end_positions, list_runs, started_event, write_end
from replayground.producers.chat import CHAT_FILES, chat_of
from replayground.schemas.blobs import open_blobs
from replayground.schemas.errors import BadInput, LogBroken
from replayground.schemas.events import (
    BatchCut,
    Position,
    RunStarted,
    StepTaken,
    TrajectoriesSelected,
    TrajectoryAssembled,
    VersionAddress,
    WeightsPublished,
)
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import version_address
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Log
from replayground.streams.log.weights import weights_at
from replayground.streams.replay.copying import CopyRule, batches_from, copy_batches
from replayground.streams.replay.request import RetrainRequest, SftRequest
from replayground.streams.replay.selection import TOPIC, addresses_of, by_partition, find_selection
from replayground.streams.rules.runs import RunState

SAMPLE_SIZE_MIN = 0.1
"effective sample size of a batch, below which it is too far off-policy to be learned from unless that is forced"
_LOOK_SECONDS = 0.3
_READ_AT_ONCE = 1000


@dataclass
class RetrainResult:
    """What came of it."""

    run_id: str
    source: str
    steps: list[StepTaken] = field(default_factory=list)
    seconds: float = 0.0
    compared_with: str = ""
    "the run whose versions of the same numbers these are compared with"
    equal_versions: int = 0
    "versions whose files are those of that run, byte for byte"
    other_versions: int = 0
    "versions that it has too, with other files"


def ask(
    log: Log,
    source: RunState,
    *,
    begin: VersionAddress | None = None,
    until: int | None = None,
    selected: TrajectoriesSelected | None = None,
    is_followed: bool = False,
) -> RetrainRequest:
    """Resolves a request. Raises BadInput."""
    if source.kind not in ("practise", "replay", "retrain"):
        raise BadInput(f"{source.run_id} is of kind {source.kind}: it has no batches to train on")
    begin = begin or first_weights_of(log, source)
    require_version(log, begin)
    if until is not None and until <= begin.version:
        raise BadInput(
            f"--until {until}: it begins with version {begin.version}, so the first one that it can make is the next"
        )
    batches = _batches(log, source)
    bases = [batch.base_version for batch in batches]
    wanted = [
        batch
        for batch in batches
        if batch.base_version >= begin.version and (until is None or batch.base_version < until)
    ]
    require_trajectories(log, _first_places(wanted))
    if not wanted and not (is_followed and source.is_active):
        there = f"versions {min(bases)} to {max(bases) + 1}" if bases else "no batch"
        raise BadInput(f"{source.run_id} has no batch to train on in that range: it has {there}")
    if until is not None and until > max(bases, default=0) + 1 and not is_followed:
        raise BadInput(f"--until {until}: the batches of {source.run_id} lead to version {max(bases) + 1}")
    if selected is not None and not is_followed:
        _require_members(wanted, selected)
    return RetrainRequest(
        source=source.run_id,
        weights_from=f"{begin.run_id}:{begin.version}",
        # What an active source cuts from now on is not wanted: the trainer would wait for steps that it must not take.
        until=until if is_followed or until is not None else max(bases) + 1,
        selection="" if selected is None else selected.meta.id,
        is_followed=is_followed,
    )


def _require_members(batches: Sequence[BatchCut], selected: TrajectoriesSelected) -> None:
    """Raises BadInput when no batch has a chosen member: a retraining without a step would look like one that is done."""
    chosen = {(address.partition, address.offset) for address in addresses_of(selected)}
    places = (member.trajectory for batch in batches for member in batch.members)
    if not any((place.partition, place.offset) in chosen for place in places):
        raise BadInput(
            f"no member of these batches is in selection {selected.name}: choose among those of view batches"
        )


def require_version(log: Log, address: VersionAddress) -> None:
    """Raises BadInput when a version is not on the log."""
    if weights_at(log, address) is None:
        raise BadInput(
            f"version {address.version} of {address.run_id} is not on the log: it was removed (versions_kept) or never "
            "existed"
        )


def _batches(log: Log, source: RunState) -> list[BatchCut]:
    try:
        return list(batches_from(log, source.run_id, source.positions))
    except LogBroken as error:
        raise BadInput(f"the batches of {source.run_id} are not all on the log any more: {error}") from error


def _first_places(batches: Sequence[BatchCut]) -> list[Position]:
    """The first trajectory of these batches on each partition."""
    first: dict[int, int] = {}
    for batch in batches:
        for member in batch.members:
            place = member.trajectory
            first[place.partition] = min(place.offset, first.get(place.partition, place.offset))
    return [Position(topic=TOPIC, partition=partition, offset=offset) for partition, offset in sorted(first.items())]


def first_weights_of(log: Log, source: RunState) -> VersionAddress:
    """The version that the first batch of a run was cut for."""
    if source.kind == "replay":
        told: str = msgspec.json.decode(source.request)["weights_from"]
        if not told:
            raise BadInput(
                f"{source.run_id} judged runs of different jobs, so it has no batches: rescore one job at a time"
            )
        return version_address(told)
    job = job_of(source)
    return job.copied_version or VersionAddress(run_id=source.run_id, version=job.first_version)


def weights_run_of(log: Log, source: RunState) -> str:
    """The run whose versions a bare number means: a replay has none of its own. Raises BadInput."""
    return first_weights_of(log, source).run_id if source.kind == "replay" else source.run_id


def start(
    log: KafkaLog,
    source: RunState,
    request: RetrainRequest,
    overrides: Mapping[str, Any],
    is_forced: bool,
    selected: TrajectoriesSelected | None = None,
) -> RunState:
    """Writes RunStarted of the retraining, and the selection that was made for it. Raises BadInput for overrides that no
    setting has, LogUnavailable."""
    config = _config(log, source, request, overrides, is_forced)
    if selected is not None:
        log.append(selected)
    return _write_start(log, "retrain", source, config, [source.run_id], request, source.scorers)


def _write_start(
    log: KafkaLog,
    kind: Literal["retrain", "sft"],
    source: RunState,
    config: dict[str, Any],
    source_ids: Sequence[str],
    request: RetrainRequest | SftRequest,
    scorers: Mapping[str, str],
) -> RunState:
    def made(run_id: str) -> RunStarted:
        return started_event(
            run_id=run_id,
            kind=kind,
            config=msgspec.json.encode(config).decode(),
            files=list(source.files),
            seed=source.seed,
            code_version=sources.code_version(),
            packages=sources.package_versions(),
            positions=end_positions(log),
            sources=source_ids,
            scorers=scorers,
            request=msgspec.json.encode(request).decode(),
        )

    return write_new_run(log, kind, made)


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
    return _overridden(raw, overrides)


def require_settings(source: RunState, overrides: Mapping[str, Any]) -> None:
    """Raises BadInput for what no setting is, before the work begins."""
    _overridden(copy.deepcopy(config_of(source)), overrides)


def _overridden(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these settings. Raises BadInput, before anything is written, for what no setting is."""
    for setting, value in overrides.items():
        # Those that say how many batches there are and where to begin follow from the request: a trainer that waits for
        # more batches than there are would never end.
        if not setting.startswith("trainer."):
            raise BadInput(
                f"--set {setting}: only settings of the trainer can be others here, such as trainer.grpo.mode"
            )
        set_setting(raw, setting, value)
    parse_config(raw, Path("--set"))
    return raw


def go_on(
    log: KafkaLog, folder: FieldFolder, field_config: ResolvedConfig, state: RunState, show: ShowProgress
) -> RetrainResult:
    """Continues a retraining to its end and writes RunEnded. Call it within `ended_on_log`. Raises KeyboardInterrupt,
    ReplaygroundError."""
    began = time.monotonic()
    create_run_folder(folder.run(state.run_id))
    request = msgspec.json.decode(state.request, type=RetrainRequest)
    with heartbeat("trainer", field_config, state), logs_in(folder.run(state.run_id), "trainer"):
        _Work(log, folder, field_config, state, request).go(show)
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


def ask_sft(
    log: Log, field_config: ResolvedConfig, selected: TrajectoriesSelected, begin: VersionAddress
) -> SftRequest:
    """Resolves a request for SFT. Raises BadInput, also for trajectories of another tokenizer: their ids are other words."""
    version = weights_at(log, begin)
    require_version(log, begin)
    assert version is not None, "it is on the log"
    expected = _template_of(field_config, version)
    try:
        for addresses in batched(addresses_of(selected), _READ_AT_ONCE):
            for event in log.read_at(addresses):
                assert isinstance(event, TrajectoryAssembled), event
                if event.template_hash not in ("", expected):
                    raise BadInput(
                        f"trajectory {event.meta.trajectory_id} of {event.meta.run_id} was tokenised for another model than "
                        f"version {begin.version} of {begin.run_id}: choose runs of the same model with --run"
                    )
    except (LookupError, LogBroken) as error:
        raise BadInput(f"trajectories of selection {selected.name} are not on the log any more: {error}") from error
    return SftRequest(selection=selected.meta.id, weights_from=f"{begin.run_id}:{begin.version}")


def _template_of(field_config: ResolvedConfig, version: WeightsPublished) -> str:
    """The hash of tokenizer and chat template of a version, as trajectories have it."""
    blobs = open_blobs(field_config.run_of("operator"))
    return chat_of(
        {file.name: blobs.get(file.uri, file.sha256) for file in version.files if file.name in CHAT_FILES}
    ).template_hash


def start_sft(
    log: KafkaLog,
    source: RunState,
    request: SftRequest,
    overrides: Mapping[str, Any],
    selected: TrajectoriesSelected,
    is_selection_new: bool,
) -> RunState:
    """Writes RunStarted of an SFT: job and config are those of the run whose weights it begins with. Raises BadInput."""
    raw = copy.deepcopy(config_of(source))
    raw["job"] |= {"weights_from": request.weights_from, "demonstrations": 0, "steps": 1}
    config = _overridden(raw, overrides)
    if is_selection_new:
        log.append(selected)
    # The job first: config and files are its own.
    source_ids = [source.run_id, *(run_id for run_id in selected.runs if run_id != source.run_id)]
    return _write_start(log, "sft", source, config, source_ids, request, {})


def go_on_sft(
    log: KafkaLog, folder: FieldFolder, field_config: ResolvedConfig, state: RunState, show: ShowProgress
) -> RetrainResult:
    """Continues an SFT to its end and writes RunEnded. Call it within `ended_on_log`. Raises KeyboardInterrupt,
    ReplaygroundError."""
    began = time.monotonic()
    create_run_folder(folder.run(state.run_id))
    request = msgspec.json.decode(state.request, type=SftRequest)
    with heartbeat("trainer", field_config, state), logs_in(folder.run(state.run_id), "trainer"):
        _SftWork(log, folder, field_config, state, request).go(show)
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
    states = list_runs(log)
    result.compared_with, theirs = request.source, digests_of(log, states[request.source])
    if not theirs:  # a replay has no weights
        result.compared_with, theirs = begin.run_id, digests_of(log, states[begin.run_id])
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
