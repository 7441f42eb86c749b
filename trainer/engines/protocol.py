"""The two seams of training: an engine turns batches into weights, a model turns micro-batches into logits.

An engine knows nothing of the log. The loop loads it with files, gives it trajectories and takes files back. Files are
paths by name, never bytes: a model need not fit into memory twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from schemas.events import TrajectoryAssembled
from trainer.batch import MicroBatch

Progress = Callable[[float, float], None]
"Called with the share done and the loss; whatever it raises ends the work, which leaves the engine to be loaded again."


@dataclass(frozen=True)
class GrpoBatch:
    """What one batch of practice teaches: trajectories with their rewards and advantages, in the order of the batch."""

    base_version: int
    trajectories: Sequence[TrajectoryAssembled]
    rewards: Sequence[float]
    advantages: Sequence[float]
    learning_rate_share: float = 1.0
    "of the configured learning rate"


@dataclass(frozen=True)
class StepReport:
    """Figures of one step, as StepTaken carries them."""

    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """Holds one model and its optimizer. Belongs to one thread; every call may take long."""

    def load(self, files: Mapping[str, Path], checkpoint: Mapping[str, Path]) -> None:
        """Takes the files of a weight version; an empty checkpoint means a fresh optimizer. The files stay where they are,
        unchanged, until the next load. Raises BadInput."""

    def sft(self, demonstrations: Sequence[TrajectoryAssembled], progress: Progress) -> StepReport:
        """The cold start. Their order does not matter. Raises BadInput when none can be learned from."""

    def grpo(self, batch: GrpoBatch) -> StepReport:
        """One batch of practice. Trajectories that cannot be trained on are left out and counted in the report; when
        none is left the weights stay as they are and the report says step_refused."""

    def save(self, folder: Path) -> dict[str, Path]:
        """What a server needs. Changed files are written into the folder, over those of the last time; a file that did
        not change is at the very path given to load."""

    def checkpoint(self, folder: Path) -> dict[str, Path]:
        """What is needed besides, to go on as if never interrupted; written into the folder as by save."""

    def probe(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens 1 … n - 1, each given those before."""


class Model(Protocol):
    """A causal language model with its parameters by file name."""

    parameters: dict[str, Tensor]
    vocabulary_size: int

    def hidden_weights(self) -> list[str]:
        """Names of the 2-D weights of the hidden layers."""

    def logits(self, micro: MicroBatch) -> Tensor:
        """Logits that each sampled token was drawn from, [sampled, vocabulary], with gradients."""
