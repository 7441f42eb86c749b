"""A weight version as facts: its files as blobs, the step that made it, and the probe a server has to agree with."""

import hashlib
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
from trainer.engines.protocol import Engine, Report

_PROBE_TOKENS_MAX = 32


class Publisher:
    """Stores files and words the events of one run. Remembers files that did not change, so that they cost nothing."""

    def __init__(self, run: Run, settings: TrainerSettings, blobs: Blobs, now: Callable[[], int]) -> None:
        self._run = run
        self._blobs = blobs
        self._now = now
        self._code_hash = code_hash()
        self._config_hash = hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()
        self._known: dict[str, tuple[bytes, WeightsFile]] = {}

    def fetch(self, files: list[WeightsFile]) -> dict[str, bytes]:
        """Reads files of a published version. Raises BlobDamaged."""
        fetched = {file.name: self._blobs.get(file.uri, file.sha256) for file in files}
        for file in files:
            self._remember(file, fetched[file.name])
        return fetched

    def store(self, files: Mapping[str, bytes]) -> list[WeightsFile]:
        """Writes files durably. A file that is the very object of last time is not even hashed."""
        return [self._store_one(name, data) for name, data in sorted(files.items())]

    def step_taken(
        self, kind: StepKind, base_version: int | None, new_version: int, report: Report, batch_id: str | None = None
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

    def _store_one(self, name: str, data: bytes) -> WeightsFile:
        known = self._known.get(name)
        if known is not None and known[0] is data:
            return known[1]
        uri, sha256 = self._blobs.put(data)
        file = WeightsFile(name=name, uri=uri, sha256=sha256, size_bytes=len(data))
        self._remember(file, data)
        return file

    def _remember(self, file: WeightsFile, data: bytes) -> None:
        if not file.name.endswith(
            ".safetensors"
        ):  # weights differ every time, and holding them would double the memory
            self._known[file.name] = data, file


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
