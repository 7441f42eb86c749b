"""The reloader: loads the target weights into every server, verifies them, and reports the result on the log.

    Targets       (pure) fold of weights, control and serving: which version should be served; bounded, in snapshots
    TargetReader  follows the log and keeps the newest targets
    ServerSync    one thread for each server: asks what it serves, loads the target version, retries with back-off

One load: unpack → pause → reload → reset the prefix cache → probe → label → report → resume, every response checked.
The version label is set only after the probe agreed, and the server is resumed only after that: a server that is not
paused and says "5" serves version 5, whatever process died in between (P10).
"""

import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from replayground.consumers.config import ReloaderSettings
from replayground.consumers.vllm_admin import ServerRefused, ServerUnreachable, VllmAdmin
from replayground.consumers.weights_files import WeightsFolder, digest_of
from replayground.schemas.blobs import open_blobs
from replayground.schemas.errors import BlobDamaged, LogUnavailable, ReplaygroundError
from replayground.schemas.events import (
    ControlIssued,
    Event,
    Meta,
    Position,
    SnapshotTaken,
    WeightsLoaded,
    WeightsPublished,
)
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.packed import unpack_logprobs, unpack_tokens
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log
from replayground.streams.log.snapshots import newest_snapshot, snapshot
from replayground.streams.log.weights import weights_on_log
from replayground.streams.rules.holds import Hold, held_after

PROGRAM = "reloader"
# The default of `advance`; `follow` computes it from its settings. Enough for the wanted version and all skipped ones.
VERSIONS_KEPT = ReloaderSettings().skipped_versions_max + 2
STATE_VERSION = "targets-1"
"format of Targets in snapshots; change it with the class, since a snapshot of another version is not read"
_SNAPSHOT_EVENTS = 1000
"a snapshot is taken after so many events; a restart reads about as many at most"
_POLL_SECONDS = 0.5
_CATCH_UP_POLL_SECONDS = 0.05
UNVERIFIED = "unverified"
"label of a server whose weights are being changed; no version has it"

_log = structlog.get_logger(__name__)


class Targets(Struct, frozen=True):
    """What the servers of one run should serve: a fold over topics weights, control and serving."""

    published: dict[int, WeightsPublished] = {}
    "the newest versions, and those that are held"
    holds: tuple[Hold, ...] = ()
    tried: frozenset[tuple[str, int]] = frozenset()
    "server and version of every load, successful or refused"

    def wanted(self) -> WeightsPublished | None:
        """The version of the oldest hold whose version exists, else the newest version."""
        # A hold may name a version that is not trained yet. Servers go on with the newest one meanwhile, because its
        # rollouts are what the held version is trained on.
        held = next((self.published[hold.version] for hold in self.holds if hold.version in self.published), None)
        return held or (self.published[max(self.published)] if self.published else None)

    def skipped(self, server: str, count_max: int) -> list[WeightsPublished]:
        """The newest versions before the wanted one that this server never tried, at most count_max, oldest first."""
        wanted = self.wanted()
        if wanted is None or count_max < 1:
            return []
        versions = [v for v in sorted(self.published) if v < wanted.version and (server, v) not in self.tried]
        return [self.published[version] for version in versions[-count_max:]]

    def missing(self) -> list[int]:
        """Held versions that were trimmed before they were held: they have to be looked up on the log."""
        newest = max(self.published, default=-1)
        return [hold.version for hold in self.holds if hold.version < newest and hold.version not in self.published]


def advance(targets: Targets, event: Event, versions_kept: int = VERSIONS_KEPT) -> Targets:
    """The targets after an event. Events of other kinds change nothing."""
    return _trim(_apply(targets, event), versions_kept)


def _trim(targets: Targets, versions_kept: int) -> Targets:
    """Drops versions that are neither among the newest nor held, and what was tried of them: an endless run must not
    grow this state."""
    if len(targets.published) <= versions_kept and len(targets.tried) <= versions_kept:
        return targets
    newest = sorted(targets.published)[-versions_kept:]
    kept = {*newest, *(hold.version for hold in targets.holds)}
    return Targets(
        {version: published for version, published in targets.published.items() if version in kept},
        targets.holds,
        frozenset((server, version) for server, version in targets.tried if version >= newest[0] or version in kept)
        if newest
        else targets.tried,
    )


def _apply(targets: Targets, event: Event) -> Targets:
    match event:
        case WeightsPublished():
            published = {**targets.published, event.version: event}
            return Targets(published, targets.holds, targets.tried)
        case WeightsLoaded():
            return Targets(targets.published, targets.holds, targets.tried | {(event.server, event.version)})
        case ControlIssued():
            return Targets(targets.published, held_after(targets.holds, event), targets.tried)
    return targets


class LatestTargets:
    """Hands the newest targets from the thread that reads the log to the sync threads. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._targets = Targets()
        self._closed = False

    def put(self, targets: Targets) -> None:
        with self._changed:
            self._targets = targets
            self._changed.notify_all()

    def get(self) -> Targets:
        with self._changed:
            return self._targets

    def close(self) -> None:
        """Wakes every waiter; later waits return at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, known: WeightsPublished | None, seconds: float) -> None:
        """Blocks until another version than the known one is wanted, until closed, or for these seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._targets.wanted() is not known, seconds)


def run(run: Run, settings: ReloaderSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Keeps the servers at the target until `stop` is set. Raises RuntimeError when a sync thread failed,
    LogUnavailable."""
    log = open_log(run)
    try:
        serve(log, run, settings, program_metrics, stop)
    finally:
        log.close()


def serve(
    log: Log, run: Run, settings: ReloaderSettings, program_metrics: ProgramMetrics, stop: threading.Event
) -> None:
    """The program over any log. Sets `stop` before it returns or raises."""
    reporter = Reporter(log, run, program_metrics)
    latest_targets = LatestTargets()
    with tempfile.TemporaryDirectory(prefix="replayground-weights-") as temporary:
        root = Path(settings.folder or temporary)
        sync_threads = [
            threading.Thread(
                target=ServerSync(server, settings, _folder(root, server, run), latest_targets, reporter).run,
                args=(stop,),
            )
            for server in settings.servers
        ]
        try:
            follow(log, run, settings, latest_targets, sync_threads, reporter, stop)
        finally:
            # Sync threads are not daemons: left running after an error, they would keep the process alive.
            stop.set()
            latest_targets.close()
            for sync_thread in sync_threads:
                # Those that were never started cannot be joined.
                if sync_thread.ident is not None:
                    sync_thread.join()


def _folder(root: Path, server: str, run: Run) -> WeightsFolder:
    # An address such as http://127.0.0.1:8100 is no folder name.
    name = "".join(character if character.isalnum() else "-" for character in server)
    return WeightsFolder(root / name, open_blobs(run))


def follow(
    log: Log,
    run: Run,
    settings: ReloaderSettings,
    latest_targets: LatestTargets,
    sync_threads: list[threading.Thread],
    reporter: "Reporter",
    stop: threading.Event,
) -> None:
    """Folds the log into the targets until `stop` is set. Raises RuntimeError when a sync thread ended."""
    following = TargetReader(log, run, settings.skipped_versions_max + 2)
    try:
        while not stop.is_set():
            is_started = not sync_threads or sync_threads[0].ident is not None
            # A long poll delays the start of the sync threads when no event arrives, so it is short before that.
            seconds = _POLL_SECONDS if is_started else _CATCH_UP_POLL_SECONDS
            reporter.program_metrics.count("events_read", following.read(seconds))
            if following.targets is not latest_targets.get():
                latest_targets.put(following.targets)
            if following.unsaved >= _SNAPSHOT_EVENTS:
                reporter.append(following.snapshot())
            # Not before the reader is caught up: the servers would load an old version first.
            if not is_started and following.is_caught_up():
                for sync_thread in sync_threads:
                    sync_thread.start()
            ended = [
                sync_thread
                for sync_thread in sync_threads
                if sync_thread.ident is not None and not sync_thread.is_alive()
            ]
            if ended and not stop.is_set():
                raise RuntimeError("a sync thread ended by an error; see sync_thread_failed in the log")
    finally:
        following.close()


class TargetReader:
    """Folds the log into targets, from the newest snapshot on or else from the start of the run."""

    def __init__(self, log: Log, run: Run, versions_kept: int) -> None:
        self._log = log
        self._run = msgspec.structs.replace(run, program=PROGRAM)
        self._versions_kept = versions_kept
        taken = newest_snapshot(log, self._run, STATE_VERSION)
        start: Sequence[Position] = run.start if taken is None else taken.positions
        self.targets = Targets() if taken is None else msgspec.msgpack.decode(taken.state, type=Targets)
        self.unsaved = 0
        "events read since the last snapshot"
        self._positions = {(position.topic, position.partition): position for position in start}
        self._reader = log.reader(["weights", "control", "serving"], start=start, run_id=run.run_id)

    def read(self, timeout_seconds: float = _POLL_SECONDS) -> int:
        """Folds what arrives within the timeout; returns the number of deliveries. Raises LogUnavailable."""
        deliveries = self._reader.poll(1000, timeout_seconds)
        for delivery in deliveries:
            # The reader's filter goes by the first bytes of a message and may let events of other runs through.
            if delivery.event is not None and delivery.event.meta.run_id == self._run.run_id:
                self.targets = advance(self.targets, delivery.event, self._versions_kept)
        for version in self.targets.missing():
            self._look_up(version)
        self.unsaved += len(deliveries)
        return len(deliveries)

    def is_caught_up(self) -> bool:
        return self._reader.caught_up()

    def snapshot(self) -> SnapshotTaken:
        """A snapshot of the targets, for the caller to append."""
        # The targets hold only what was read from the log, so a snapshot is never ahead of it.
        self.unsaved = 0
        # The reader names only partitions that it has polled from; the others keep the position they started at.
        self._positions |= {(position.topic, position.partition): position for position in self._reader.positions()}
        state = msgspec.msgpack.encode(self.targets)
        return snapshot(self._run, STATE_VERSION, list(self._positions.values()), state, now_microseconds())

    def close(self) -> None:
        self._reader.close()

    def _look_up(self, version: int) -> None:
        """Adds a held version that was trimmed. If it is no longer on the log, drops its holds and logs an error."""
        published = weights_on_log(self._log, self._run, version)
        if published is not None:
            self.targets = advance(self.targets, published, self._versions_kept)
            return
        _log.error(
            "held_version_is_gone",
            version=version,
            held_by=[hold.session_id for hold in self.targets.holds if hold.version == version],
            consequence="it cannot be served: servers stay on the newest version, and sessions that hold it never end",
            remedy="set a larger [job] versions_kept, or 0",
        )
        # A hold that stayed would be looked up again at every poll.
        holds = tuple(hold for hold in self.targets.holds if hold.version != version)
        self.targets = Targets(self.targets.published, holds, self.targets.tried)


class Reporter:
    """Appends WeightsLoaded events and snapshots; shared by the sync threads and the thread that reads the log."""

    def __init__(self, log: Log, run: Run, program_metrics: ProgramMetrics) -> None:
        self._log = log
        self._run = run
        self.program_metrics = program_metrics
        self._one_at_a_time = threading.Lock()

    def report_loaded(
        self, server: str, published: WeightsPublished, gap: float | None, seconds: float, refusal: str | None
    ) -> None:
        """Appends a WeightsLoaded; blocks until the log has it. Raises LogUnavailable."""
        event = WeightsLoaded(
            meta=Meta(
                id=new_id(),
                run_id=self._run.run_id,
                category="serving",
                topic="serving",
                sender=self._run.worker,
                receiver=server,
                timestamp=now_microseconds(),
                causation_id=published.meta.id,
                policy_version=published.version,
            ),
            server=server,
            version=published.version,
            digest=digest_of(published.files),
            probe_gap=gap,
            seconds=seconds,
            refusal=refusal,
        )
        self.append(event)
        if refusal is None:
            self.program_metrics.gauge("version", published.version)

    def append(self, event: Event) -> None:
        """Appends an event; blocks until the log has it. Raises LogUnavailable."""
        # One thread at a time: flush waits for everything appended, and would raise for the event of another thread.
        with self._one_at_a_time:
            self._log.append(event)
            self._log.flush()
            self.program_metrics.count("events_written")


class ServerSync:
    """Keeps one server at the target, in a thread of its own."""

    def __init__(
        self,
        server: str,
        settings: ReloaderSettings,
        folder: WeightsFolder,
        latest_targets: LatestTargets,
        reporter: Reporter,
    ) -> None:
        self._admin = VllmAdmin(server, settings.request_seconds_max)
        self._server = server
        self._settings = settings
        self._folder = folder
        self._latest_targets = latest_targets
        self._reporter = reporter
        self._failures = 0
        self._log = _log.bind(server=server)

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set: asks what the server serves, loads the target, waits for a new one."""
        try:
            while not stop.is_set():
                targets = self._latest_targets.get()
                self._latest_targets.wait(targets.wanted(), self._sync_once(targets))
        except Exception:
            self._log.exception("sync_thread_failed")
            raise
        finally:
            self._admin.close()

    def _sync_once(self, targets: Targets) -> float:
        """Checks the server once and loads the target if needed. Returns the seconds to wait until the next check."""
        wanted = targets.wanted()
        if wanted is None:
            return self._settings.poll_seconds
        try:
            if not self._serves(wanted.version):
                self._load_versions(targets.skipped(self._server, self._settings.skipped_versions_max), wanted)
        except ServerUnreachable as error:
            # A server that is starting has refused nothing: no failure, and no back-off.
            self._log.info("server_unreachable", reason=str(error))
            return self._settings.poll_seconds
        except (ServerRefused, BlobDamaged, LogUnavailable, OSError) as error:
            self._failures += 1
            self._log.error("weights_refused", version=wanted.version, failures=self._failures, reason=str(error))
            return float(
                min(self._settings.retry_seconds * 2 ** (self._failures - 1), self._settings.retry_seconds_max)
            )
        self._failures = 0
        return self._settings.poll_seconds

    def _serves(self, version: int) -> bool:
        """Whether the server serves this version. It is labelled only after verification, so the label proves the
        weights, unless the server is paused."""
        return self._admin.weight_version() == str(version) and not self._admin.is_paused()

    def _load_versions(self, skipped: Sequence[WeightsPublished], wanted: WeightsPublished) -> None:
        """Loads the skipped versions and then the wanted one within one pause. Resumes only after the wanted one is
        verified. Raises ServerUnreachable, ServerRefused, BlobDamaged, LogUnavailable, OSError."""
        # Before the pause, in which sampling stands still.
        folders = [(published, self._unpack(published)) for published in (*skipped, wanted)]
        folder = folders[-1][1]
        # Also before the pause: the server goes on with the old version.
        if folder is None:
            raise BlobDamaged(f"version {wanted.version} cannot be unpacked")
        began = time.monotonic()
        self._report_refusal(wanted, began, self._pause)
        for published, skipped_folder in folders[:-1]:
            if skipped_folder is not None:
                self._try_skipped(published, skipped_folder)
        gap = self._report_refusal(wanted, began, lambda: self._load(wanted, folder))
        self._report_refusal(wanted, began, lambda: self._admin.set_weight_version(str(wanted.version)))
        seconds = time.monotonic() - began
        # Reported before the resume: if the append fails, the server stays paused and the load is repeated. The other
        # order could serve weights that the log does not know of.
        self._reporter.report_loaded(self._server, wanted, gap, seconds, None)
        self._report_refusal(wanted, began, self._admin.resume)
        self._log.info("weights_loaded", version=wanted.version, probe_gap=gap, seconds=round(seconds, 3))
        self._folder.keep_newest(self._settings.folders_kept)

    def _unpack(self, published: WeightsPublished) -> Path | None:
        """The folder of a version. A damaged version is reported as a refusal and gives None."""
        try:
            return self._folder.unpack(published)
        except BlobDamaged as error:
            self._reporter.report_loaded(self._server, published, None, 0.0, str(error))
            return None

    def _pause(self) -> None:
        self._admin.pause(self._settings.pause_mode, self._settings.pause_seconds_max)
        # After the pause, so that turns that end during it keep the version that sampled them. Before the reload: if
        # this process dies in between, the old label must not stand for partly loaded weights.
        self._admin.set_weight_version(UNVERIFIED)

    def _try_skipped(self, published: WeightsPublished, folder: Path) -> None:
        """Loads and verifies a version that nobody will sample from, and reports the result. A refusal does not stop
        the load of the wanted version. Raises ServerUnreachable, LogUnavailable."""
        began = time.monotonic()
        try:
            gap = self._load(published, folder)
        except ServerRefused as error:
            self._reporter.report_loaded(self._server, published, None, time.monotonic() - began, str(error))
        else:
            self._reporter.report_loaded(self._server, published, gap, time.monotonic() - began, None)

    def _load(self, published: WeightsPublished, folder: Path) -> float:
        """Loads weights into the paused server and verifies them by its own log-probabilities. Returns the gap. Raises
        ServerRefused, ServerUnreachable."""
        self._admin.reload_weights(str(folder.resolve()))
        # Before the probe: cached prefixes were computed with the old weights.
        self._admin.reset_prefix_cache(is_mid_turn=self._settings.pause_mode == "keep")
        tokens = unpack_tokens(published.probe.tokens)
        expected = unpack_logprobs(published.probe.logprobs)
        gap = _gap(self._admin.prompt_logprobs(tokens), expected)
        if gap > self._settings.probe_tolerance:
            raise ServerRefused(
                f"the server's log-probabilities of the probe differ from the trainer's by {gap:.3g}, "
                f"more than {self._settings.probe_tolerance:g}"
            )
        return gap

    def _report_refusal[Result](self, wanted: WeightsPublished, began: float, action: Callable[[], Result]) -> Result:
        """Runs the action. An error is reported as a refusal and raised again; a paused server stays paused."""
        try:
            return action()
        except ReplaygroundError as error:
            self._reporter.report_loaded(self._server, wanted, None, time.monotonic() - began, str(error))
            raise


def _gap(found: Sequence[float], expected: Sequence[float]) -> float:
    """The greatest difference; infinite when one of them is not finite. Raises ServerRefused for another length."""
    # max() of a list with NaN depends on the order and could be small.
    if len(found) != len(expected):
        raise ServerRefused(f"the probe has {len(expected)} log-probabilities and the server gave {len(found)}")
    differences = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.inf
