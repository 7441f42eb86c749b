"""The two interfaces of training: an engine turns batches into weights, a model turns micro-batches into logits.

An engine does not know the log. The loop loads it from files, gives it trajectories and gets files back. Files are
paths by name, not bytes, so that a model need not fit into memory twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from replayground.schemas.errors import BadInput
from replayground.schemas.events import TrajectoryAssembled, WeightsKind
from replayground.trainer.batch import MicroBatch

Progress = Callable[[float, float], None]
"Called with the share done and the loss. If it raises, the work ends, and the engine must be loaded again."


class StepRefused(BadInput):
    """A step reached a loss, a gradient or a weight that is not finite. The engine must be loaded again."""


@dataclass(frozen=True)
class GrpoBatch:
    """Trajectories of one optimizer batch with their rewards and advantages, in the order of the batch."""

    base_version: int
    trajectories: Sequence[TrajectoryAssembled]
    rewards: Sequence[float]
    advantages: Sequence[float]
    passed: Sequence[bool]
    "whether each attempt passed, for the pass rate"
    index: int
    "number of the batch in its run, for messages"
    learning_rate_share: float = 1.0
    "of the configured learning rate"


@dataclass(frozen=True)
class StepReport:
    """Metrics and timings of one step, for StepTaken."""

    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    refused: Sequence[str] = ()
    "why trajectories were left out, for the program's own log"


class Engine(Protocol):
    """One model and its optimizer. Belongs to one thread; every call may take long. `load` comes first."""

    @property
    def kind(self) -> WeightsKind:
        """What the files of `save` are: whole weights, or an adapter with the weights that it belongs to."""

    def load(self, files: Mapping[str, Path], checkpoint: Mapping[str, Path]) -> None:
        """Loads the files of a weight version; an empty checkpoint means a new optimizer. The caller keeps the files
        unchanged until the next load. Raises BadInput, BlobDamaged."""

    def set_reference(self, files: Mapping[str, Path]) -> None:
        """Sets the version from which GRPO is kept near ([trainer.grpo] reference_weight). Raises like load."""

    def sft(self, demonstrations: Sequence[TrajectoryAssembled], progress: Progress) -> StepReport:
        """The cold start, or SFT on any trajectories; GRPO after it begins with a new optimizer. The order of
        demonstrations does not matter. Raises BadInput when none is usable, and LossNotFinite."""

    def grpo(self, batch: GrpoBatch) -> StepReport:
        """Trains on one batch. Trajectories that cannot be trained on are left out and counted in the report; if none
        is left, or none has a gradient, the weights stay unchanged and the report has step_refused. Raises
        TooFarOffPolicy before the weights change, and StepRefused, after which the engine must be loaded again."""

    def save(self, folder: Path) -> dict[str, Path]:
        """The files that a server needs. Changed files are written into the folder, over those of the last call; an
        unchanged file is returned by the path given to load, so that it is stored only once."""

    def checkpoint(self, folder: Path) -> dict[str, Path]:
        """The further files needed to continue as if never interrupted; written into the folder as by save."""

    def probe(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens 1 … n - 1, each given the tokens before it."""

    def close(self) -> None:
        """Frees what it has loaded. It may be loaded again."""


class Model(Protocol):
    """A causal language model with its parameters by file name."""

    parameters: dict[str, Tensor]
    vocabulary_size: int
    device: torch.device
    "where parameters are, and where micro-batches must be"

    def hidden_weights(self) -> list[str]:
        """Names of the 2-D weights of the hidden layers."""

    def logits(self, micro: MicroBatch) -> Tensor:
        """The logits from which each sampled token was drawn, [sampled, vocabulary], float32, with gradients."""
