"""A field for tests of the trainer: a log in memory, blobs, a run, and the program in a thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import (
    Address,
    BatchCut,
    BatchMember,
    Event,
    Meta,
    StepTaken,
    TrajectoryAssembled,
    WeightsPublished,
)
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.streams.log.memory import MemoryLog
from replayground.trainer.config import GrpoSettings, ModelSettings, SftSettings, TrainerSettings
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.loop import train
from tests.trainer.episodes import assembled, played

DEMONSTRATIONS = 12
SETTINGS = TrainerSettings(
    model=ModelSettings(hidden=32, layers=2, heads=2, ffn=48),
    sft=SftSettings(steps=4, batch=4, warmup_steps=1),
    grpo=GrpoSettings(micro_batch_tokens_max=256),
)
PATIENCE_SECONDS = 60.0


class Field:
    """A log, blobs and a run to train on."""

    def __init__(
        self, folder: Path, log: MemoryLog | None = None, steps: int = 3, demonstrations: int = DEMONSTRATIONS
    ) -> None:
        self.blobs = Blobs(f"file://{folder}/blobs")
        self.log = log or MemoryLog(Codec(MemoryRegistry(), self.blobs))
        self.run = Run(
            run_id="run",
            seed=0,
            job=JobSettings(steps=steps, demonstrations=demonstrations),
            log=LogSettings(),
            blobs_url=self.blobs.url,
            worker="trainer-0",
        )
        self.program_metrics = ProgramMetrics()
        self.failure: BaseException | None = None

    def all(self, topic: str) -> list[Event]:
        reader = self.log.reader([topic])
        return [d.event for d in reader.poll(10**6, 0) if d.event is not None]

    def weights(self) -> list[WeightsPublished]:
        return [event for event in self.all("weights") if isinstance(event, WeightsPublished)]

    def steps(self) -> list[StepTaken]:
        return [event for event in self.all("steps") if isinstance(event, StepTaken)]

    def digests(self) -> list[tuple[int, str]]:
        return [(w.version, next(f.sha256 for f in w.files if f.name == "model.safetensors")) for w in self.weights()]

    @contextmanager
    def training(self, settings: TrainerSettings = SETTINGS) -> Iterator[threading.Event]:
        """The program in a thread, until the block ends."""
        stop = threading.Event()

        def program() -> None:
            try:
                engine = TorchEngine(settings, self.run.seed)
                train(self.run, settings, self.log, self.blobs, engine, self.program_metrics, stop, now=lambda: 7)
            except BaseException as failure:
                self.failure = failure

        thread = threading.Thread(target=program)
        thread.start()
        try:
            yield stop
        finally:
            stop.set()
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert self.failure is None, repr(self.failure)
            assert time.monotonic() < deadline, self.program_metrics.detail
            time.sleep(0.01)

    def until_version(self, version: int) -> None:
        self.until(lambda: len(self.weights()) > version)


def demonstrate(field: Field, tokenizer: Tokenizer) -> None:
    """Enough demonstrations, with what does not count among them."""
    (stray,) = played(1, seed=5)
    field.log.append(assembled(stray, tokenizer, number=3, ended_by="infra_error"))
    field.log.append(assembled(stray, tokenizer, number=1, run_id="another"))
    field.log.append(assembled(stray, tokenizer, number=1, purpose="eval"))
    for number, episode in enumerate(played(DEMONSTRATIONS - 1, seed=6)):
        field.log.append(assembled(episode, tokenizer, number=number))
    field.log.append(assembled(stray, tokenizer, number=99, ended_by="cancelled"))
    field.log.append(assembled(stray, tokenizer, number=0))  # a second attempt that ended: the first one counts


def cut(field: Field, tokenizer: Tokenizer, index: int, base_version: int, run_id: str = "run") -> BatchCut:
    """Appends four trajectories and the batch of them."""
    members: list[BatchMember] = []
    for number, episode in enumerate(played(4, seed=20 + index)):
        event = assembled(
            episode, tokenizer, number=100 * index + number, run_id=run_id, purpose="train", versions=(base_version,)
        )
        places: list[Address] = []
        field.log.append(event, places.append)
        members.append(_member(event, places[0], float(number % 2)))
    meta = Meta(
        id=f"batch-{run_id}-{index}", run_id=run_id, category="batch", topic="batches", sender="cut", timestamp=1
    )
    batch = BatchCut(
        meta=meta,
        index=index,
        base_version=base_version,
        members=members,
        groups=["a", "b"],
        tokens_sampled=1,
        policy_floor=base_version,
        groups_stale=["old"],
        groups_dropped={"zero_variance": 3},
        positions=[],
    )
    field.log.append(batch)
    return batch


def _member(event: TrajectoryAssembled, place: Address, reward: float) -> BatchMember:
    return BatchMember(
        trajectory_id=str(event.meta.trajectory_id),
        group_id=str(event.meta.group_id),
        trajectory=place,
        reward=reward,
        advantage=2 * reward - 1,
    )


def everything(field: Field, tokenizer: Tokenizer) -> None:
    demonstrate(field, tokenizer)
    for index in range(3):
        cut(field, tokenizer, index, 1 + index)
