"""The trainer program: makes a weight version of each batch, exactly once.

    find the newest version of this run ─► none: base_model ─► publish version 0
                                             or a copy of a version of another run ([job] weights_from)
    version 0 and demonstrations wanted ─► wait for them ─► engine.sft ─► publish version 1
    each BatchCut ─► read its trajectories ─► engine.grpo ─► blobs, then StepTaken + WeightsPublished + offset as one

Modules: config (settings), phases (which versions are made how), batch and loss (what is learned), engines (how it is
computed), publish (blobs and events), retention (which older versions are removed), refusal (steps that cannot be
taken). Nothing is kept outside of the log and the blobs: a restart loads the newest version and continues, and a batch
that was already trained on is skipped. With each version a snapshot is written that says from where on to look for the
newest version, so a restart does not read all of them. A version whose files are damaged is made again from the one
before it (_remake).

train_sft is the same program with another end: one SFT phase on trajectories that the caller selected.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from replayground.schemas.blobs import Blobs, open_blobs
from replayground.schemas.errors import BadInput, BlobDamaged, Fenced, LogBroken, LogUnavailable, ReplaygroundError
from replayground.schemas.events import (
    BatchCut,
    Event,
    Position,
    Probe,
    StepKind,
    StepTaken,
    TrajectoryAssembled,
    VersionAddress,
    WeightsPublished,
)
from replayground.schemas.ids import now_microseconds
from replayground.schemas.job import Job, load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log, Reader, Transactor
from replayground.streams.log.takeover import fencing_error
from replayground.streams.log.weights import (
    newest_weights_from,
    removal_of,
    weights_at,
    weights_on_log,
    weights_snapshot,
)
from replayground.streams.rules.reward import member_passed
from replayground.trainer.base_model import base_model
from replayground.trainer.batch import counting_only
from replayground.trainer.config import GrpoSettings, TrainerSettings
from replayground.trainer.engines.protocol import Engine, GrpoBatch, StepRefused, StepReport
from replayground.trainer.phases import Phase, practice_phases, sft_phases
from replayground.trainer.publish import Publisher, probe_of, probe_tokens
from replayground.trainer.refusal import pause_until_resumed
from replayground.trainer.retention import Retention
from replayground.trainer.scratch import scratch_folder

_POLL_SECONDS = 0.2
_EVENTS_MAX = 2000
_RETRY_SECONDS = 1.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_logger = structlog.get_logger(__name__)


class BatchOutOfOrder(ReplaygroundError):
    """A batch was cut for another version than the one to be trained next. The program ends."""


class _Stopped(Exception):
    """`stop` was set while the program waited or trained. Unpublished work is repeated at the next start."""


def run(
    run: Run,
    settings: TrainerSettings,
    program_metrics: ProgramMetrics,
    stop: threading.Event,
    pauses_when_refused: bool = True,
) -> None:
    """The program; returns when `stop` is set. Raises Fenced, TakenOver, LogBroken, BadInput, BatchOutOfOrder,
    BlobDamaged; and StepRefused unless the run is paused then, for an operator to resume."""
    # torch and the clients take seconds to import: only a trainer that really starts pays for them.
    import torch

    from replayground.streams.log.connect import open_log

    torch.set_num_threads(settings.threads)
    log, engine = open_log(run), new_engine(settings, run.seed)
    try:
        train(
            *(run, settings, log, open_blobs(run), engine, program_metrics, stop),
            pauses_when_refused=pauses_when_refused,
        )
    # Says whether a newer start took over: then the supervisor must not start this program again.
    except Fenced as error:
        raise fencing_error(log, run, error) from error
    finally:
        engine.close()
        log.close()


def new_engine(settings: TrainerSettings, seed: int) -> Engine:
    """The engine that the settings name. Nothing is loaded yet."""
    if settings.engine == "swift":
        from replayground.trainer.engines.apart import ApartEngine
        from replayground.trainer.engines.swift_support import swift_libraries

        return ApartEngine(settings, seed, swift_libraries(settings))
    from replayground.trainer.engines.torch_engine import TorchEngine

    return TorchEngine(settings, seed)


def run_sft(
    run: Run,
    settings: TrainerSettings,
    trajectories: Sequence[TrajectoryAssembled],
    program_metrics: ProgramMetrics,
    stop: threading.Event,
) -> int | None:
    """One SFT phase as a program: see train_sft."""
    import torch

    from replayground.streams.log.connect import open_log

    torch.set_num_threads(settings.threads)
    log, engine = open_log(run), new_engine(settings, run.seed)
    try:
        return train_sft(run, settings, log, open_blobs(run), engine, trajectories, program_metrics, stop)
    except Fenced as error:
        raise fencing_error(log, run, error) from error
    finally:
        engine.close()
        log.close()


def train(
    run: Run,
    settings: TrainerSettings,
    log: Log,
    blobs: Blobs,
    engine: Engine,
    program_metrics: ProgramMetrics,
    stop: threading.Event,
    now: Callable[[], int] = now_microseconds,
    pauses_when_refused: bool = True,
) -> None:
    """The program over any log and engine. Returns when `stop` is set."""

    def go(loop: _TrainingLoop) -> None:
        loop.pauses_when_refused = pauses_when_refused
        loop.go()

    _repeat(go, run, settings, log, blobs, engine, program_metrics, stop, now)


def train_sft(
    run: Run,
    settings: TrainerSettings,
    log: Log,
    blobs: Blobs,
    engine: Engine,
    trajectories: Sequence[TrajectoryAssembled],
    program_metrics: ProgramMetrics,
    stop: threading.Event,
    now: Callable[[], int] = now_microseconds,
) -> int | None:
    """One SFT phase on these trajectories, of any runs: publishes the first version of the run (a copy with
    [job] weights_from) and the one after it. Returns the number of the latter, also when it exists already; None when
    `stop` is set before. Raises BadInput (LossNotFinite too) and whatever `run` raises; then nothing is published."""
    return _repeat(
        lambda loop: loop.learn_from(lambda: trajectories),
        *(run, settings, log, blobs, engine, program_metrics, stop, now),
    )


def _repeat[T](
    work: Callable[["_TrainingLoop"], T],
    run: Run,
    settings: TrainerSettings,
    log: Log,
    blobs: Blobs,
    engine: Engine,
    program_metrics: ProgramMetrics,
    stop: threading.Event,
    now: Callable[[], int],
) -> T | None:
    """Does the work; when the log is unavailable or the disk is full, it starts over from the newest version on the log.
    None = stopped."""
    job = load_job(run.job.module)
    while not stop.is_set():
        try:
            with scratch_folder("replayground-trainer-") as folder:
                publisher = Publisher(run, settings, blobs, now, folder)
                return work(_TrainingLoop(run, settings, log, publisher, engine, job, program_metrics, stop))
        except _Stopped:
            return None
        # The outcome of a transaction may be unknown, and the engine may be ahead of the log: only what is published
        # counts.
        except LogUnavailable as error:
            _logger.warning("log_unavailable", reason=str(error))
            program_metrics.detail = f"waiting for the log: {error}"
            stop.wait(_RETRY_SECONDS)
        # What was written so far went with the scratch folder, so there may be room already.
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            _logger.error("disk_full", reason=str(error))
            program_metrics.detail = f"waiting for room on the disk: {error}"
            stop.wait(_RETRY_SECONDS)
    return None


@dataclass
class _TrainingLoop:
    """Trains from the newest published version on, until `stop` is set or an error is raised."""

    run: Run
    settings: TrainerSettings
    log: Log
    publisher: Publisher
    engine: Engine
    job: Job
    program_metrics: ProgramMetrics
    stop: threading.Event
    probe_tokens: list[int] | None = None
    retention: Retention | None = None
    pauses_when_refused: bool = True
    demonstrations: Callable[[], Sequence[TrajectoryAssembled]] = list

    def go(self) -> None:
        """All phases of practice; returns only when stopped."""
        self._go_through(practice_phases(self.run.job), self._demonstrations)
        while True:
            # Not returned from: the supervisor would start the program again.
            self.program_metrics.detail = f"done: {self.run.job.steps} steps taken"
            self._pause(_POLL_SECONDS)

    def learn_from(self, demonstrations: Callable[[], Sequence[TrajectoryAssembled]]) -> int:
        """One SFT phase instead of practice. Returns the version that it made, now or before a restart."""
        return self._go_through(sft_phases(self.run.job), demonstrations)

    def _go_through(self, phases: Sequence[Phase], demonstrations: Callable[[], Sequence[TrajectoryAssembled]]) -> int:
        """Makes the versions that are left of some phases, the last of which must end. Returns the newest version."""
        self.demonstrations = demonstrations
        with self._writing() as (transactor, batches):
            version = self._load_newest()
            for phase in phases:
                if phase.is_done(version):
                    continue
                match phase.kind:
                    case "initial":
                        version = self._create(transactor, batches)
                    case "sft":
                        assert version == phase.first - 1, "phases follow each other without a gap"
                        version = self._publish("sft", version, version + 1, self._learn(), transactor, batches)
                    case "grpo":
                        assert version is not None, "practice needs weights to begin with"
                        version = self._practise(version, phase.last, transactor, batches)
        assert version is not None, "the first phase makes a version"
        return version

    @contextmanager
    def _writing(self) -> Iterator[tuple[Transactor, Reader]]:
        """What it takes to publish: a transactor, and the reader of batches whose position it commits."""
        # Before anything is read: taking the transactional id fences a trainer that is still running, so that the
        # newest version found below stays the newest.
        transactor = self.log.transactor(f"trainer-{self.run.run_id}")
        try:
            job = self.run.job
            # Every restart loads the reference again.
            kept_always = {job.first_version} if self.settings.grpo.reference_weight else set[int]()
            self.retention = Retention(self.log, self.run, job.versions_kept, self._check_stop, kept_always)
            group = f"trainer-{self.run.run_id}"
            # alone: no consumer group is joined, since the transactional id decides who may write (decision 0013).
            batches = self.log.reader(["batches"], group, alone=True, start=self.run.start, run_id=self.run.run_id)
            try:
                yield transactor, batches
            finally:
                batches.close()
        finally:
            transactor.close()
            if self.retention is not None:
                self.retention.close()

    def _load_newest(self) -> int | None:
        """Loads the newest version and returns its number; None when there is none."""
        newest = self._newest()
        if newest is None:
            return None
        self._load_or_remake(newest)
        self._report_version(newest.version)
        return newest.version

    def _load_or_remake(self, version: WeightsPublished) -> None:
        """Loads the engine. Raises BlobDamaged when files are damaged and cannot be made again."""
        try:
            self._load(version)
        except BlobDamaged as damage:
            _logger.error("version_damaged", version=version.version, reason=str(damage))
            self._remake(version, damage)

    def _remake(self, version: WeightsPublished, damage: BlobDamaged) -> None:
        """Makes a published version again, from the log and the version before it, and stores its files again. The engine
        has it loaded then. Raises BlobDamaged unless the files are the same, byte for byte."""
        before = None if version.base_version is None else weights_on_log(self.log, self.run, version.base_version)
        if version.copied_from is not None or (before is None and version.base_version is not None):
            raise BlobDamaged(
                f"version {version.version} is damaged ({damage}), and what it was made from is not on the log any more: "
                "restore its files, or begin another run with [job] weights_from"
            ) from damage
        if before is not None:
            self._load_or_remake(before)
        self.program_metrics.detail = f"making version {version.version} again, its files are damaged"
        self._make_again(version)
        saved = self.engine.save(self.publisher.weights_folder)
        checkpoint = self.engine.checkpoint(self.publisher.checkpoint_folder)
        stored = [*self.publisher.store(saved), *self.publisher.store(checkpoint)]
        if [(file.name, file.sha256) for file in stored] != [
            (file.name, file.sha256) for file in (*version.files, *version.checkpoint)
        ]:
            raise BlobDamaged(
                f"version {version.version} is damaged ({damage}), and made again it has other weights: settings, code or "
                "machine are not those that made it. Restore its files, or begin another run with [job] weights_from"
            ) from damage
        _logger.info("version_made_again", version=version.version)

    def _make_again(self, version: WeightsPublished) -> None:
        if version.base_version is None:
            self._make_base()
        elif not version.batches:
            self._learn()
        else:
            if self.settings.grpo.reference_weight:
                self._set_reference(self.run.job.first_version)
            self._take(self._batch_called(version.batches[0]))

    def _batch_called(self, batch_id: str) -> BatchCut:
        """A batch that was trained on before. Raises BlobDamaged when it is not on the log."""
        reader = self.log.reader(["batches"], start=self.run.start, run_id=self.run.run_id)
        try:
            while not reader.caught_up():
                self._check_stop()
                for delivery in reader.poll(_EVENTS_MAX, _POLL_SECONDS):
                    if isinstance(delivery.event, BatchCut) and delivery.event.meta.id == batch_id:
                        return delivery.event
        finally:
            reader.close()
        raise BlobDamaged(f"batch {batch_id} is not on the log: the version that was made from it cannot be made again")

    def _create(self, transactor: Transactor, batches: Reader) -> int:
        """Publishes the first version. Returns its number."""
        copied = self.run.job.copied_version
        if copied is not None:
            return self._copy(copied, transactor, batches)
        self.program_metrics.detail = "making the base model"
        self._make_base()
        return self._publish("initial", None, 0, StepReport(), transactor, batches)

    def _make_base(self) -> None:
        with self.program_metrics.busy():
            folder = self.publisher.new_folder()
            self.engine.load(base_model(self.settings.model, self.job, self.run.seed, folder), {})

    def _load(self, version: WeightsPublished) -> dict[str, Path]:
        """Loads the engine; returns the files of the version by name."""
        self.program_metrics.detail = f"loading version {version.version} of {version.meta.run_id}"
        files = self.publisher.fetch(version.files)
        self.engine.load(files, self.publisher.fetch(version.checkpoint))
        return files

    def _set_reference(self, version: int) -> None:
        reference = weights_on_log(self.log, self.run, version)
        if reference is None:
            raise BadInput(
                f"[trainer.grpo] reference_weight needs version {version}, with which practice began, and it was removed: "
                "set reference_weight to 0"
            )
        self.engine.set_reference(self.publisher.fetch(reference.files))

    def _copy(self, address: VersionAddress, transactor: Transactor, batches: Reader) -> int:
        """Publishes a version of another run as the first one of this run: the same files, nothing is stored again."""
        source = weights_at(self.log, address)
        if source is None:
            raise BadInput(
                f"[job] weights_from: version {address.version} of run {address.run_id} is not on the log; it was "
                "removed (versions_kept) or never existed: name another one"
            )
        # Loaded before it is published: a copy that cannot be trained on must not become a version.
        with self.program_metrics.busy():
            probe = self._probe(self._load(source))
        return self._announce("initial", self.publisher.copy_of(source, probe), StepReport(), transactor, batches)

    def _learn(self) -> StepReport:
        """The SFT phase: trains on demonstrations."""
        began = time.monotonic()
        trajectories = self.demonstrations()
        read_seconds = time.monotonic() - began
        with self.program_metrics.busy():
            report = self.engine.sft(trajectories, self._progress)
        self.program_metrics.gauge("progress", 1.0)
        report.seconds["read"] = read_seconds
        return report

    def _practise(self, version: int, last: int | None, transactor: Transactor, batches: Reader) -> int:
        """Takes steps up to the last version, without one until stopped. Returns the newest version."""
        first = self.run.job.first_version
        if self.settings.grpo.reference_weight:
            self._set_reference(first)
        while last is None or version < last:
            self.program_metrics.detail = f"waiting for batch {version - first}"
            batch = self._next_batch(version, batches)
            version = self._step_until_taken(batch, transactor, batches)
        return version

    def _step_until_taken(self, batch: BatchCut, transactor: Transactor, batches: Reader) -> int:
        """Takes the step of a batch. A step that is refused pauses the run until somebody resumes it, and is then taken
        again. Raises StepRefused where nobody would (pauses_when_refused)."""
        while True:
            try:
                with self.program_metrics.busy():
                    return self._step(batch, transactor, batches)
            except StepRefused as refusal:
                if not self.pauses_when_refused:
                    raise
                self._pause_run(batch.base_version, f"{refusal}. Mend its cause, then: replayground steer resume")

    def _pause_run(self, version: int, reason: str) -> None:
        _logger.error("step_refused", version=version, reason=reason)
        self.program_metrics.detail = f"paused: {reason}"
        pause_until_resumed(self.log, self.run, version, reason, self.publisher.now(), self._check_stop)
        newest = self._newest()
        assert newest is not None, "a batch is for a version that was published"
        # The refused step may have changed the weights.
        self._load_or_remake(newest)

    def _next_batch(self, version: int, batches: Reader) -> BatchCut:
        """Blocks until the batch for this version arrives. Raises BatchOutOfOrder, _Stopped, LogUnavailable."""
        while True:
            self._check_stop()
            # One message at a time: the transaction commits everything that was polled.
            for delivery in batches.poll(1, _POLL_SECONDS):
                batch = delivery.event
                if not isinstance(batch, BatchCut) or batch.meta.run_id != self.run.run_id:
                    continue
                self.program_metrics.count("events_read")
                if self._is_next(batch, version):
                    return batch

    def _is_next(self, batch: BatchCut, version: int) -> bool:
        expected = self.run.job.first_version + batch.index
        if batch.base_version != expected:
            raise BatchOutOfOrder(
                f"unexpected batch order: batch {batch.index} is for version {batch.base_version}, expected "
                f"{expected}; was [job] demonstrations changed during the run?"
            )
        if batch.base_version > version:
            raise BatchOutOfOrder(
                f"unexpected batch order: batch {batch.index} is for version {batch.base_version}, the newest is "
                f"{version}"
            )
        # An older batch was trained on before a restart, and its offset was not committed.
        return batch.base_version == version

    def _step(self, batch: BatchCut, transactor: Transactor, batches: Reader) -> int:
        self.program_metrics.detail = f"taking step {batch.index}"
        base, report = batch.base_version, self._take(batch)
        return self._publish("grpo", base, base + 1, report, transactor, batches, batch.meta.id)

    def _take(self, batch: BatchCut) -> StepReport:
        """Takes the step of a batch, without publishing it."""
        began = time.monotonic()
        # A batch refers to its trajectories by address, so it stays small.
        events = self.log.read_at([member.trajectory for member in batch.members])
        self.program_metrics.count("events_read", len(events))
        trains = self.run.job.trains
        trajectories = [counting_only(event, trains) for event in _named_by(batch, events)]
        read_seconds = time.monotonic() - began
        report = self.engine.grpo(
            GrpoBatch(
                base_version=batch.base_version,
                trajectories=trajectories,
                rewards=[member.reward for member in batch.members],
                advantages=[member.advantage for member in batch.members],
                passed=[member_passed(member) for member in batch.members],
                index=batch.index,
                learning_rate_share=learning_rate_share(batch.index, self.run.job.steps, self.settings.grpo),
            )
        )
        report.seconds["read"] = read_seconds
        if report.refused:
            _logger.warning("trajectories_refused", count=len(report.refused), first=report.refused[0])
        report.metrics.update(_batch_metrics(batch))
        return report

    def _publish(
        self,
        kind: StepKind,
        base_version: int | None,
        version: int,
        report: StepReport,
        transactor: Transactor,
        batches: Reader,
        batch_id: str | None = None,
    ) -> int:
        """Publishes a version: files to blobs, then all events and the consumed offset in one transaction (P5).
        Returns the version."""
        began = time.monotonic()
        saved = self.engine.save(self.publisher.weights_folder)
        probe = self._probe(saved)
        checkpoint = self.engine.checkpoint(self.publisher.checkpoint_folder)
        ready = time.monotonic()
        # Blobs before the events that name them: a version on the log is complete. A kill in between leaves blobs that
        # nothing names, which a sweep removes (decision 0011).
        files, checkpoint_files = self.publisher.store(saved), self.publisher.store(checkpoint)
        report.seconds.update({"checkpoint": ready - began, "publish": time.monotonic() - ready})
        published = self.publisher.weights_published(
            *(base_version, version, files, checkpoint_files, probe, self.engine.kind), batch_id
        )
        return self._announce(kind, published, report, transactor, batches, batch_id)

    def _probe(self, files: Mapping[str, Path]) -> Probe:
        # The same tokens for every version, tokenized once.
        if self.probe_tokens is None:
            self.probe_tokens = probe_tokens(self.job, self.run.seed, files["tokenizer.json"].read_bytes())
        return probe_of(self.engine, self.probe_tokens)

    def _announce(
        self,
        kind: StepKind,
        published: WeightsPublished,
        report: StepReport,
        transactor: Transactor,
        batches: Reader,
        batch_id: str | None = None,
    ) -> int:
        """Writes the events of a version whose files are stored. Returns the version."""
        version = published.version
        taken = self.publisher.step_taken(kind, published.base_version, version, report, batch_id)
        # While the step waits for the log it counts as lag, so that the harness notices a stall.
        self.program_metrics.gauge("lag", 1)
        self._commit(taken, published, transactor, batches)
        self.program_metrics.gauge("lag", 0)
        self.program_metrics.count("events_written", 3)
        self._report_version(version)
        _logger.info("weights_published", kind=kind, version=version, metrics=report.metrics, seconds=report.seconds)
        return version

    def _commit(self, taken: StepTaken, published: WeightsPublished, transactor: Transactor, batches: Reader) -> None:
        assert self.retention is not None
        # Tombstones of old versions are part of the transaction: an aborted one removes nothing.
        removed = self.retention.removed_by(published.version)
        state = self.retention.state(published.version, removed)
        snapshot = weights_snapshot(self.log, self.run, published, state, self.retention.positions())
        transactor.commit([taken, published, snapshot], batches, [removal_of(self.run, version) for version in removed])
        # After the commit: if that raises, the versions are still there.
        self.retention.published(state)
        if removed:
            _logger.info("versions_removed", versions=removed)

    def _newest(self) -> WeightsPublished | None:
        """The newest version of the run; None when there is none. Raises LogBroken when the version of the newest
        snapshot is not on the log."""
        # The two were written in one transaction, so a missing version means that the end of the topic was lost. Going
        # on would publish other weights under a number that was already used.
        start, expected = newest_weights_from(self.log, self.run)
        newest = self._newest_from(start)
        if expected is not None and (newest is None or newest.version < expected):
            raise LogBroken(
                f"the newest snapshot of the trainer is of version {expected}, which is not on the log: topic weights "
                "was truncated or replaced; restore it, or start another run"
            )
        return newest

    def _newest_from(self, start: Sequence[Position]) -> WeightsPublished | None:
        reader = self.log.reader(["weights"], start=start, run_id=self.run.run_id)
        newest: WeightsPublished | None = None
        try:
            while not reader.caught_up():
                self._check_stop()
                for delivery in reader.poll(_EVENTS_MAX, _POLL_SECONDS):
                    event = delivery.event
                    if isinstance(event, WeightsPublished) and event.meta.run_id == self.run.run_id:
                        newest = event if newest is None or event.version > newest.version else newest
        finally:
            reader.close()
        return newest

    def _demonstrations(self) -> list[TrajectoryAssembled]:
        """Blocks until the configured number of demonstrations has ended, including those that were given up; returns
        them in the order of their ids. Raises _Stopped, LogUnavailable."""
        wanted = self.run.job.demonstrations
        found: dict[str, TrajectoryAssembled] = {}
        reader = self.log.reader(["trajectories"], start=self.run.start, run_id=self.run.run_id)
        try:
            while len(found) < wanted:
                self._check_stop()
                self.program_metrics.detail = f"{len(found)} of {wanted} demonstrations are there"
                for delivery in reader.poll(_EVENTS_MAX, _POLL_SECONDS):
                    self.program_metrics.count("events_read")
                    event = delivery.event
                    # By trajectory: an attempt that ended by infra_error does not count, a later attempt does.
                    if isinstance(event, TrajectoryAssembled) and self._demonstrates(event):
                        found.setdefault(str(event.meta.trajectory_id), event)
        finally:
            reader.close()
        return [found[trajectory_id] for trajectory_id in sorted(found)][:wanted]

    def _demonstrates(self, event: TrajectoryAssembled) -> bool:
        meta = event.meta
        return meta.run_id == self.run.run_id and meta.purpose == "demonstrate" and event.ended_by != "infra_error"

    def _progress(self, share: float, loss: float) -> None:
        # Raises inside the cold start, which takes a minute or more.
        self._check_stop()
        self.program_metrics.gauge("progress", share)
        self.program_metrics.detail = f"learning from demonstrations: {share:.0%}, loss {loss:.3f}"

    def _report_version(self, version: int) -> None:
        self.program_metrics.gauge("version", version)
        self.program_metrics.gauge("step", max(0, version - self.run.job.first_version))

    def _pause(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self._check_stop()

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise _Stopped


def _named_by(batch: BatchCut, events: Sequence[Event]) -> Iterator[TrajectoryAssembled]:
    """The trajectories at the addresses of a batch. Raises LogBroken when another one stands there, as on a topic that
    was made anew: its tokens would be trained on with the reward of the one that is named."""
    for member, event in zip(batch.members, events, strict=True):
        if not isinstance(event, TrajectoryAssembled) or (event.meta.trajectory_id or "") != member.trajectory_id:
            found = f"trajectory {event.meta.trajectory_id}" if isinstance(event, TrajectoryAssembled) else "none"
            raise LogBroken(
                f"batch {batch.index} names trajectory {member.trajectory_id} at {member.trajectory}, and {found} stands "
                "there: topic trajectories was replaced; restore it, or start another run"
            )
        yield event


def learning_rate_share(index: int, job_steps: int, settings: GrpoSettings) -> float:
    """Linear from 1 at the first batch to the final share after the last; always 1 when the job has no last step. Below
    that during the first warmup_steps."""
    steps = job_steps if settings.schedule_steps is None else settings.schedule_steps
    taken = settings.schedule_start + index
    warm = min(1.0, (taken + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    if steps == 0:
        return warm
    return warm * (settings.final_share + (1.0 - settings.final_share) * (1.0 - min(taken, steps) / steps))


def _batch_metrics(batch: BatchCut) -> dict[str, float]:
    dropped = {f"groups_dropped_{reason}": float(count) for reason, count in sorted(batch.groups_dropped.items())}
    stale = len(batch.groups_stale) + batch.groups_stale_unnamed
    return {"groups": float(len(batch.groups)), "groups_stale": float(stale), **dropped}
