"""A weight version as facts: its files as blobs, the step that made it, and the probe a server has to agree with."""

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from schemas.blobs import Blobs
from schemas.errors import BadInput
from schemas.events import Meta, Probe, StepKind, StepTaken, WeightsFile, WeightsPublished
from schemas.ids import derived_id
from schemas.job import Job
from schemas.packed import pack_logprobs, pack_tokens
from schemas.run import Run
from trainer.config import TrainerSettings
from trainer.engines.protocol import Engine, StepReport

_PROBE_TOKENS_MAX = 32


class Publisher:
    """Stores files and words the events of one run. Remembers files that did not change, so that they cost nothing."""

    def __init__(self, run: Run, settings: TrainerSettings, blobs: Blobs, now: Callable[[], int], folder: Path) -> None:
        """The folder is for the files of the newest version and for those of the next one."""
        self._run = run
        self._blobs = blobs
        self._now = now
        self._code_hash = code_hash()
        self._config_hash = hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()
        self._folder = folder
        # where an engine writes the next version: the only files that change
        self._saved = folder / "saved"
        self.weights_folder, self.checkpoint_folder = self._saved / "weights", self._saved / "checkpoint"
        for made in (self.weights_folder, self.checkpoint_folder):
            made.mkdir(parents=True)
        self._known: dict[Path, WeightsFile] = {}

    def new_folder(self) -> Path:
        """An empty folder whose files will not change."""
        return Path(tempfile.mkdtemp(dir=self._folder))

    def fetch(self, files: list[WeightsFile]) -> dict[str, Path]:
        """Files of a published version. Raises BlobDamaged."""
        folder = self.new_folder()
        fetched: dict[str, Path] = {}
        for number, file in enumerate(files):
            path = folder / str(number)  # a name on the log must not lead out of the folder
            self._blobs.get_to_file(file.uri, file.sha256, path)
            self._known[path] = file
            fetched[file.name] = path
        return fetched

    def store(self, files: Mapping[str, Path]) -> list[WeightsFile]:
        """Writes files durably. A file that is where it was the last time is not even hashed, unless it was saved anew."""
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
        batch_id: str | None = None,
    ) -> WeightsPublished:
        return WeightsPublished(
            meta=self._meta("WeightsPublished", "weights", "weights", base_version, new_version, batch_id),
            version=new_version,
            base_version=base_version,
            kind="full",
            files=files,
            checkpoint=checkpoint,
            batches=[] if batch_id is None else [batch_id],
            probe=probe,
        )

    def _meta(
        self, kind: str, category: str, topic: str, base_version: int | None, new_version: int, batch_id: str | None
    ) -> Meta:
        return Meta(
            id=derived_id(kind, self._run.run_id, batch_id, base_version, new_version),
            run_id=self._run.run_id,
            category=category,
            topic=topic,
            sender=self._run.worker,
            timestamp=self._now(),
            causation_id=batch_id,
            policy_version=new_version,
        )

    def _store_one(self, name: str, path: Path) -> WeightsFile:
        if path in self._known:
            return self._known[path]
        put = self._blobs.put_file(path)
        file = WeightsFile(name=name, uri=put.uri, sha256=put.sha256, size_bytes=put.size_bytes)
        if not path.is_relative_to(self._saved):
            self._known[path] = file
        return file


def probe_tokens(job: Job, seed: int, tokenizer_json: bytes) -> list[int]:
    """One fixed prompt of the job as ids. Raises BadInput when the job has no task."""
    task = next(iter(job.tasks("train", seed)), None)
    if task is None:
        raise BadInput(f"job {job.name} has no task: tasks(split, seed) must give at least one")
    text = f"<|system|>{job.system_prompt}<|end|><|user|>{task.prompt}<|end|><|assistant|>"
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    return list(tokenizer.encode(text, add_special_tokens=False).ids[:_PROBE_TOKENS_MAX])


def probe_of(engine: Engine, tokens: list[int]) -> Probe:
    return Probe(tokens=pack_tokens(tokens), logprobs=pack_logprobs(engine.probe(tokens)))


def code_hash() -> str:
    """Digest of the trainer's own source files."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
