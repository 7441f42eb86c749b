"""`replayground rescore`: a run of kind replay, from its request to its end.

ask        resolves runs, range, scorers and selection; nothing is written
start      writes RunStarted; from then on everything that is needed stands on the log
go_on      judges, cuts batches, compares, writes RunEnded when all is done; also what `resume` does
dry_run    judges and compares without writing anything
"""

import heapq
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path

import msgspec

from replayground.consumers.reports.runs import job_of
from replayground.deploy import sources
from replayground.deploy.experience.runs import (
    ShowProgress,
    config_of,
    heartbeat,
    origin_of,
    require_trajectories,
    restored_config,
    run_of,
    write_new_run,
)
from replayground.deploy.experience.scorer_files import (
    ChosenScorers,
    bounded_by_name,
    judges_of,
    require_known,
    require_replayable,
)
from replayground.deploy.experience.workers import Standing, Work, end_of, rescore, start_of
from replayground.deploy.local.folder import FieldFolder, create_run_folder
from replayground.deploy.resolve import ResolvedConfig
from replayground.deploy.runs import end_positions, list_runs, started_event, write_end
from replayground.schemas.blobs import open_blobs
from replayground.schemas.errors import BadInput, LogBroken
from replayground.schemas.events import (
    JudgementMade,
    Position,
    RewardAssigned,
    RunFile,
    RunStarted,
    TrajectoriesSelected,
)
from replayground.schemas.job import Scorer
from replayground.schemas.topics import TOPIC_BY_NAME
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Log
from replayground.streams.replay.cutting import cut_replay
from replayground.streams.replay.request import RescoreRequest
from replayground.streams.replay.rescoring import Judges, PartitionState, Rescoring
from replayground.streams.replay.selection import TOPIC, PartitionSelection, by_partition
from replayground.streams.rules.comparison import Comparison, JudgedAttempt, compare, judgements
from replayground.streams.rules.runs import RunState
from replayground.streams.rules.scoring import BUILT_IN, versions_of

SCORER_SETTING = "replay.scorer"
"RunFile.setting of the file with the scorers"
_BESIDE_SETTING = "replay.scorer.beside"
"of the *.py beside it, which it may import and which count in its version"
PARTITIONS = TOPIC_BY_NAME[TOPIC].partitions
_POLL_EVENTS = 2000


@dataclass(frozen=True)
class RescorePlan:
    """A request whose parts all exist, before anything is written."""

    request: RescoreRequest
    source: RunState
    "the first source: job and config are its"
    module: str
    scorers: Mapping[str, Scorer]
    scorer_file: Path | None
    selected: TrajectoriesSelected | None = None
    "None = all of the sources"
    is_selection_new: bool = False
    "it is written together with RunStarted"


@dataclass
class RescoreResult:
    """What came of it."""

    run_id: str
    standings: dict[int, Standing] = field(default_factory=dict)
    batches: int = 0
    comparison: Comparison = field(default_factory=Comparison)
    seconds: float = 0.0

    def total(self, name: str) -> int:
        return sum(int(getattr(standing.counts, name)) for standing in self.standings.values())


def ask(
    log: Log,
    folder: FieldFolder,
    field_config: ResolvedConfig,
    states: Sequence[RunState],
    chosen: ChosenScorers,
    is_forced: bool = False,
    is_followed: bool = False,
) -> RescorePlan:
    """Resolves a request. Raises BadInput for what the user can mend, such as sources that retention has removed."""
    _require_sources(states)
    first = states[0]
    module = module_of(folder, field_config, first)
    scorers = judges_of(module, chosen.file)
    require_known(chosen.names, scorers)
    require_replayable([scorers[name] for name in chosen.names or scorers], is_forced)
    is_one_job = all(_is_same_job(first, state) for state in states)
    if not is_one_job:
        _require_foreign(chosen, states)
    start = tuple(_earliest(states))
    require_trajectories(log, start)
    job = job_of(first)
    origin = origin_of(log, first)
    request = RescoreRequest(
        sources=tuple(state.run_id for state in states),
        start=start,
        end=tuple(log.end_positions([TOPIC])),
        scorers=chosen.names,
        scorer_file="" if chosen.file is None else chosen.file.name,
        is_forced=is_forced,
        is_followed=is_followed,
        # Batches of several jobs would mix the tokens of several tokenizers.
        weights_from=f"{origin.run_id}:{job_of(origin).first_version}" if is_one_job else "",
        groups_per_batch=job.groups_per_batch,
        advantage=config_of(first).get("streams", {}).get("advantage", "centred"),
    )
    return RescorePlan(request, first, module, scorers, chosen.file)


def _require_sources(states: Sequence[RunState]) -> None:
    """Raises BadInput for a run that has no trajectories of its own."""
    for state in states:
        if state.kind not in ("practise", "eval"):
            sources = ", ".join(state.sources) or "another run"
            raise BadInput(
                f"{state.run_id} is of kind {state.kind} and has no trajectories of its own: rescore its sources, {sources}"
            )


def _is_same_job(one: RunState, other: RunState) -> bool:
    """Whether two runs have the same job, with the same code, and the same model."""
    return _identity(one) == _identity(other)


def _identity(state: RunState) -> tuple[object, ...]:
    config = config_of(state)
    # Folders of the machine that started a run say nothing about its job; its files do.
    code = sorted((file.name, file.sha256) for file in state.files)
    return Path(state.job).name, tuple(code), msgspec.json.encode(config.get("trainer", {}).get("model", {}))


def _require_foreign(chosen: ChosenScorers, states: Sequence[RunState]) -> None:
    """Raises BadInput when the scorers of one job would judge tasks of another one."""
    built_in = {scorer.name for scorer in BUILT_IN}
    if chosen.file is None and not (chosen.names and built_in.issuperset(chosen.names)):
        names = ", ".join(state.run_id for state in states)
        raise BadInput(
            f"{names} have different jobs, so the scorers of one cannot judge all of them: rescore them one by one, or give "
            "--scorer with a file or a built-in scorer"
        )


def module_of(folder: FieldFolder, field_config: ResolvedConfig, state: RunState) -> str:
    """The job module of a run on this machine. Raises BadInput."""
    module: str = restored_config(folder, field_config, state)["job"]["module"]
    return module


def start(log: KafkaLog, field_config: ResolvedConfig, asked: RescorePlan) -> RunState:
    """Writes RunStarted of the replay. Raises BadInput, LogUnavailable."""
    used = asked.request.scorers or tuple(asked.scorers)
    files = [*asked.source.files, *_stored(field_config, asked.scorer_file)]
    if asked.selected is not None and asked.is_selection_new:
        log.append(asked.selected)

    def made(run_id: str) -> RunStarted:
        return started_event(
            run_id=run_id,
            kind="replay",
            config=asked.source.config,
            files=files,
            seed=asked.source.seed,
            code_version=sources.code_version(),
            packages=sources.package_versions(),
            positions=end_positions(log),
            sources=asked.request.sources,
            scorers={name: version for name, version in versions_of(asked.scorers).items() if name in used},
            request=msgspec.json.encode(_request(asked)).decode(),
        )

    return write_new_run(log, "rescore", made)


def _request(asked: RescorePlan) -> RescoreRequest:
    if asked.selected is None:
        return asked.request
    return msgspec.structs.replace(asked.request, selection=asked.selected.meta.id)


def _stored(field_config: ResolvedConfig, file: Path | None) -> list[RunFile]:
    if file is None:
        return []
    blobs, found = open_blobs(field_config.run_of("operator")), list[RunFile]()
    for path in (file, *(beside for beside in sorted(file.parent.glob("*.py")) if beside != file)):
        put, setting = blobs.put_file(path), SCORER_SETTING if path == file else _BESIDE_SETTING
        found.append(
            RunFile(name=path.name, setting=setting, uri=put.uri, sha256=put.sha256, size_bytes=put.size_bytes)
        )
    return found


def go_on(
    log: KafkaLog,
    folder: FieldFolder,
    field_config: ResolvedConfig,
    state: RunState,
    processes: int,
    show: ShowProgress,
) -> RescoreResult:
    """Continues a replay to its end and writes RunEnded. Call it within `ended_on_log`. Raises KeyboardInterrupt,
    ReplaygroundError."""
    began = time.monotonic()
    create_run_folder(folder.run(state.run_id))
    with heartbeat("replay", field_config, state):
        result = _do(log, folder, field_config, state, processes, show)
    result.seconds = time.monotonic() - began
    write_end(log, state.run_id, state.starts, "finished", f"{result.total('trajectories')} trajectories judged again")
    return result


def _do(
    log: KafkaLog,
    folder: FieldFolder,
    field_config: ResolvedConfig,
    state: RunState,
    processes: int,
    show: ShowProgress,
) -> RescoreResult:
    request = msgspec.json.decode(state.request, type=RescoreRequest)
    run = run_of(field_config, state, "replay")
    module = module_of(folder, field_config, state)
    file = restored_scorer_file(folder, field_config, state)
    _require_same_versions(state, judges_of(module, file))
    result = RescoreResult(state.run_id)
    progress = _Progress(request, show, result.standings)
    rescore(Work(run, request, module, file), processes, progress)
    if request.weights_from:
        version = int(request.weights_from.rpartition(":")[2])
        with closing(open_log(run)) as writer:
            batches = cut_replay(run, writer, request.groups_per_batch, version, lambda count: None, threading.Event())
        result.batches = batches or 0
    show(1, 1, "comparing with the old rewards")
    # All is judged: what retention has removed of the old rewards must not make a failure of it.
    with suppress(LogBroken):
        result.comparison = compare_runs(log, request, list_runs(log), state)
    return result


def restored_scorer_file(folder: FieldFolder, field_config: ResolvedConfig, state: RunState) -> Path | None:
    """The file with the scorers of a replay, from the blobs; None when it has none. Raises BadInput."""
    blobs, main = open_blobs(field_config.run_of("operator")), None
    for file in state.files:
        if file.setting in (SCORER_SETTING, _BESIDE_SETTING):
            target = folder.run(state.run_id).job / "scorers" / Path(file.name).name
            target.parent.mkdir(parents=True, exist_ok=True)
            blobs.get_to_file(file.uri, file.sha256, target)
            main = target if file.setting == SCORER_SETTING else main
    return main


def _require_same_versions(state: RunState, scorers: Mapping[str, Scorer]) -> None:
    """Raises BadInput when a scorer has changed since the run began: half of it would be judged otherwise."""
    now = versions_of(scorers)
    for name, version in state.scorers.items():
        if now.get(name) != version:
            raise BadInput(
                f"scorer {name} is version {now.get(name, 'unknown')} here, and {state.run_id} began with {version}: "
                "start a new rescore"
            )


class _Progress:
    """Sums up what the workers report."""

    def __init__(self, request: RescoreRequest, show: ShowProgress, standings: dict[int, Standing]) -> None:
        self._starts = {end.partition: start_of(request, end.partition).offset for end in request.end}
        self._total = sum(end.offset - self._starts[end.partition] for end in request.end)
        self._show = show
        self._standings = standings

    def __call__(self, standing: Standing) -> None:
        self._standings[standing.partition] = standing
        done = sum(s.offset - self._starts[s.partition] for s in self._standings.values())
        # A followed source grows beyond the end that it had at first.
        self._total = max(self._total, done)
        judged = sum(s.counts.trajectories for s in self._standings.values())
        self._show(done, self._total, f"{judged:,} judged")


def dry_run(
    log: Log, asked: RescorePlan, states: Mapping[str, RunState], show: ShowProgress, limit: int | None = None
) -> RescoreResult:
    """Judges and compares in this process, without writing anything; with a limit, so many trajectories at most."""
    request = asked.request
    scorers = bounded_by_name(asked.scorers, request.score_seconds_max)
    judges = Judges("dry-run", frozenset(request.sources), scorers, request.scorers, request.advantage)
    selections = None if asked.selected is None else by_partition(asked.selected)
    result = RescoreResult("dry-run")
    progress = _Progress(request, show, result.standings)
    began = time.monotonic()
    for partition in range(PARTITIONS):
        chosen = None if selections is None else selections.get(partition, PartitionSelection.empty())
        state = PartitionState(start_of(request, partition).offset)
        # What is left is shared by the partitions that are left, as some may have less than their share.
        share = None if limit is None else -((result.total("trajectories") - limit) // (PARTITIONS - partition))
        if share == 0:
            break
        rewards = _judged(log, Rescoring(judges, chosen), request, partition, state, progress, share)
        before = _old_judgements(log, request, states, partition)
        if share is not None:
            # All of them now: where to stop reading the old ones is known only then.
            rewards = iter(list(rewards))
            before = takewhile(partial(_is_before, state.offset), before)
        result.comparison += compare(before, judgements(rewards), partition)
    result.seconds = time.monotonic() - began
    return result


def _is_before(offset: int, judgement: JudgedAttempt) -> bool:
    return judgement.offset < offset


def _judged(
    log: Log,
    fold: Rescoring,
    request: RescoreRequest,
    partition: int,
    state: PartitionState,
    progress: _Progress,
    limit: int | None,
) -> Iterator[RewardAssigned]:
    end = end_of(request, partition)
    start = [start_of(request, partition)]
    reader = log.reader([TOPIC], start=start, run_id=frozenset(request.sources), partitions=[partition])
    with closing(reader):
        while state.offset < end and not reader.caught_up():
            for delivery in reader.poll(_POLL_EVENTS, 0.2):
                if state.counts.trajectories == limit:
                    progress(Standing(partition, end, state.counts))
                    return
                state.offset = delivery.address.offset + 1
                if delivery.event is None or delivery.address.offset >= end:
                    continue
                for event in fold.take(state, delivery.event, delivery.address):
                    if isinstance(event, RewardAssigned):
                        yield event
            progress(Standing(partition, min(state.offset, end), state.counts))


def compare_runs(log: Log, request: RescoreRequest, states: Mapping[str, RunState], replay: RunState) -> Comparison:
    """Compares the rewards of a replay with those of its sources, partition by partition."""
    total = Comparison()
    for partition in range(PARTITIONS):
        after = judgements(_rewards(log, replay, partition))
        total += compare(_old_judgements(log, request, states, partition), after, partition)
    return total


def _old_judgements(
    log: Log, request: RescoreRequest, states: Mapping[str, RunState], partition: int
) -> Iterator[JudgedAttempt]:
    """Of all sources, in the order of the trajectories."""
    # One reader for each: the streams of two runs are not equally fast, so their rewards are not in one order.
    of_sources = [judgements(_in_order(log, states[source], partition)) for source in request.sources]
    return heapq.merge(*of_sources, key=lambda judgement: judgement.offset)


def _in_order(log: Log, state: RunState, partition: int) -> Iterator[RewardAssigned]:
    """The rewards of a run in the order of the trajectories."""
    rewards = _rewards(log, state, partition)
    if not _has_judgements(log, state, partition):
        return rewards
    # Judges and people write theirs later, and in any order. All of a partition are in memory only for such runs.
    return iter(sorted(rewards, key=lambda reward: reward.trajectory.offset))


def _has_judgements(log: Log, state: RunState, partition: int) -> bool:
    """Whether somebody was asked about attempts of this partition: their judgements are on the one of the same number."""
    start = [place for place in state.positions if (place.topic, place.partition) == ("judgements", partition)]
    with closing(log.reader(["judgements"], start=start, run_id=state.run_id, partitions=[partition])) as reader:
        while not reader.caught_up():
            for delivery in reader.poll(_POLL_EVENTS, 0.2):
                if isinstance(delivery.event, JudgementMade) and delivery.event.meta.run_id == state.run_id:
                    return True
    return False


def _rewards(log: Log, state: RunState, partition: int) -> Iterator[RewardAssigned]:
    start = [
        position for position in state.positions if position.topic == "rewards" and position.partition == partition
    ]
    with closing(log.reader(["rewards"], start=start, run_id=state.run_id, partitions=[partition])) as reader:
        while not reader.caught_up():
            for delivery in reader.poll(_POLL_EVENTS, 0.2):
                if isinstance(delivery.event, RewardAssigned) and delivery.event.meta.run_id == state.run_id:
                    yield delivery.event


def _earliest(states: Sequence[RunState]) -> Iterator[Position]:
    """The lowest start of the given runs on each partition of topic trajectories."""
    for partition in range(PARTITIONS):
        offsets = [
            next((p.offset for p in state.positions if (p.topic, p.partition) == (TOPIC, partition)), 0)
            for state in states
        ]
        yield Position(topic=TOPIC, partition=partition, offset=min(offsets))
