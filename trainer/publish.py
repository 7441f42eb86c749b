"""Publishes a weight version: its files as blobs, its events, and the probe that a server has to agree with."""

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from replayground.schemas.blobs import Blobs
from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
    Meta,
    Probe,
    StepKind,
    StepTaken,
    VersionAddress,
    WeightsFile,
    WeightsKind,
    WeightsPublished,
)
from replayground.schemas.ids import derived_id
from replayground.schemas.job import Job
from replayground.schemas.packed import pack_logprobs, pack_tokens
from replayground.schemas.run import Run
from replayground.trainer.config import TrainerSettings
from replayground.trainer.engines.protocol import Engine, StepReport

# Enough to tell two versions apart, and computed in milliseconds while a server is paused.
_PROBE_TOKENS_MAX = 32


class Publisher:
    """Stores files as blobs and makes the events of one run. Files that do not change are stored only once."""

    def __init__(self, run: Run, settings: TrainerSettings, blobs: Blobs, now: Callable[[], int], folder: Path) -> None:
        """`folder` holds the files of the loaded version and of the next one."""
        self._run = run
        self._blobs = blobs
        self.now = now
        self._code_hash = code_hash()
        self._config_hash = hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()
        self._folder = folder
        # Where the engine writes the next version. Files elsewhere never change, so they are stored once (_store_one).
        self._saved = folder / "saved"
        self.weights_folder, self.checkpoint_folder = self._saved / "weights", self._saved / "checkpoint"
        for made in (self.weights_folder, self.checkpoint_folder):
            made.mkdir(parents=True)
        self._known: dict[Path, WeightsFile] = {}

    def new_folder(self) -> Path:
        """A new, empty folder for files that will not change."""
        return Path(tempfile.mkdtemp(dir=self._folder))

    def fetch(self, files: list[WeightsFile]) -> dict[str, Path]:
        """Downloads files of a published version; returns their paths by name. Blocks. Raises BlobDamaged,
        BlobsUnavailable."""
        folder = self.new_folder()
        fetched: dict[str, Path] = {}
        for number, file in enumerate(files):
            # Numbered: names come from the log, and `../x` would be written outside of the folder.
            path = folder / str(number)
            self._blobs.get_to_file(file.uri, file.sha256, path)
            self._known[path] = file
            fetched[file.name] = path
        return fetched

    def store(self, files: Mapping[str, Path]) -> list[WeightsFile]:
        """Writes files to blobs, durably. An unchanged file is neither written nor hashed again. Blocks. Raises
        BlobsUnavailable."""
        return [self._store_one(name, path) for name, path in sorted(files.items())]

    def step_taken(
        self,
        kind: StepKind,
        base_version: int | None,
        new_version: int,
        report: StepReport,
        batch_id: str | None = None,
    ) -> StepTaken:
        return StepTaken(
            meta=self._meta("StepTaken", "step", "steps", base_version, new_version, batch_id),
            kind=kind,
            batch_id=batch_id,
            base_version=base_version,
            new_version=new_version,
            metrics=report.metrics,
            seconds=report.seconds,
            code_hash=self._code_hash,
            config_hash=self._config_hash,
        )

    def weights_published(
        self,
        base_version: int | None,
        new_version: int,
        files: list[WeightsFile],
        checkpoint: list[WeightsFile],
        probe: Probe,
        kind: WeightsKind,
        batch_id: str | None = None,
    ) -> WeightsPublished:
        return WeightsPublished(
            meta=self._meta("WeightsPublished", "weights", "weights", base_version, new_version, batch_id),
            version=new_version,
            base_version=base_version,
            kind=kind,
            files=files,
            checkpoint=checkpoint,
            batches=[] if batch_id is None else [batch_id],
            probe=probe,
        )

    def copy_of(self, source: WeightsPublished, probe: Probe) -> WeightsPublished:
        """A version of another run as a version of this one, with the same number and files."""
        made = self.weights_published(None, source.version, source.files, source.checkpoint, probe, source.kind)
        address = VersionAddress(run_id=source.meta.run_id, version=source.version)
        return msgspec.structs.replace(made, copied_from=address)

    def _meta(
        self, kind: str, category: str, topic: str, base_version: int | None, new_version: int, batch_id: str | None
    ) -> Meta:
        return Meta(
            # Derived: a step that is repeated after a restart has the same id, and readers know it by that.
            id=derived_id(kind, self._run.run_id, batch_id, base_version, new_version),
            run_id=self._run.run_id,
            category=category,
            topic=topic,
            sender=self._run.worker,
            timestamp=self.now(),
            causation_id=batch_id,
            policy_version=new_version,
        )

    def _store_one(self, name: str, path: Path) -> WeightsFile:
        if path in self._known:
            return self._known[path]
        put = self._blobs.put_file(path)
        file = WeightsFile(name=name, uri=put.uri, sha256=put.sha256, size_bytes=put.size_bytes)
        # The engine overwrites files there at every step.
        if not path.is_relative_to(self._saved):
            self._known[path] = file
        return file


def probe_tokens(job: Job, seed: int, tokenizer_json: bytes) -> list[int]:
    """Token ids of one fixed prompt of the job. Raises BadInput when the job has no task."""
    task = next(iter(job.tasks("train", seed)), None)
    if task is None:
        raise BadInput(f"job {job.name} has no task: tasks(split, seed) must give at least one")
    text = f"<|system|>{job.system_prompt}<|end|><|user|>{task.prompt}<|end|><|assistant|>"
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    return list(tokenizer.encode(text, add_special_tokens=False).ids[:_PROBE_TOKENS_MAX])


def probe_of(engine: Engine, tokens: list[int]) -> Probe:
    return Probe(tokens=pack_tokens(tokens), logprobs=pack_logprobs(engine.probe(tokens)))


def code_hash() -> str:
    """SHA-256 of the trainer's source files, comments included."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
