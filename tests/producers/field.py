"""What the tests of the producers share: a run, a log in memory, a tokenizer made on the spot, and tasks."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from replayground.producers import stockroom
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Event, Meta, Probe, Sampling, Task, TaskSubmitted, WeightsFile, WeightsPublished
from replayground.schemas.ids import derived_id
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.streams.log.memory import MemoryLog

RUN_ID = "run-1"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")


@cache
def tokenizer_json() -> bytes:
    """BPE over bytes, one token a digit, role tokens special, tags and scaffold as added tokens (docs/default_job.md)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(stockroom.texts(0), trainer)
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in (*TAGS, *stockroom.SCAFFOLD)])
    return tokenizer.to_str().encode()


def a_run(folder: Path, **job: object) -> Run:
    return Run(
        run_id=RUN_ID,
        seed=0,
        job=JobSettings(**job),  # type: ignore[arg-type]
        log=LogSettings(),
        blobs_url=f"file://{folder}/blobs",
        worker="worker-1",
    )


def a_log(folder: Path) -> tuple[MemoryLog, Blobs]:
    blobs = Blobs(f"file://{folder}/blobs")
    return MemoryLog(Codec(MemoryRegistry(), blobs)), blobs


def published(version: int, blobs: Blobs | None = None) -> WeightsPublished:
    """Weights of a version; with a tokenizer when there are blobs to put it into."""
    files: list[WeightsFile] = []
    if blobs is not None:
        uri, sha256 = blobs.put(tokenizer_json())
        files.append(WeightsFile(name="tokenizer.json", uri=uri, sha256=sha256, size_bytes=len(tokenizer_json())))
    return WeightsPublished(
        meta=Meta(id=f"weights-{version}", run_id=RUN_ID, category="weights", topic="weights", sender="t", timestamp=0),
        version=version,
        base_version=None,
        kind="full",
        files=files,
        checkpoint=[],
        batches=[],
        probe=Probe(tokens=b"", logprobs=b""),
    )


def submitted(task: Task, number: int, purpose: str = "train", required_version: int | None = None) -> TaskSubmitted:
    task_id = derived_id("task", RUN_ID, purpose, number)
    return TaskSubmitted(
        meta=Meta(
            id=derived_id("TaskSubmitted", task_id),
            run_id=RUN_ID,
            session_id=purpose,
            task_id=task_id,
            category="task",
            topic="tasks",
            sender="feeder",
            timestamp=0,
            purpose=purpose,  # type: ignore[arg-type]
        ),
        task=task,
        sampling=Sampling(),
        required_version=required_version,
    )


def events_on(log: MemoryLog, topic: str) -> list[Event]:
    """Everything on a topic, by partition."""
    return [delivery.event for delivery in log.reader([topic]).poll(1_000_000, 0.0) if delivery.event is not None]


async def no_blobs(data: bytes) -> str:
    """Keeps nothing."""
    return ""
