"""Settings of the trainer: one struct for each TOML section, a sentence under each field. No heavy imports here."""

from typing import Literal

from msgspec import Struct, field

LossMode = Literal["decoupled", "bypass", "probability", "gspo", "cispo", "icepop", "m2po"]
EngineName = Literal["torch", "swift"]
Precision = Literal["float32", "bfloat16"]
Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the first weights come from. TOML section [trainer.model]."""

    path: str | None = None
    "folder of an existing model (config.json, tokenizer.json, *.safetensors); without it one is made from nothing"
    hidden: int = 64
    "width of the residual stream of a model made from nothing"
    layers: int = 3
    "transformer blocks"
    heads: int = 2
    "attention heads; hidden / heads is the head size, which the server must support (32 works on CPU)"
    ffn: int = 192
    "width of the feed-forward layers"
    vocabulary_size: int = 500
    "upper bound of the tokenizer: 256 bytes, role headers, tags, scaffold, and merges for the rest"
    initializer_range: float = 0.08
    "standard deviation of the initial weights"
    positions_max: int = 1024
    "longest sequence the model is declared for"

    def __post_init__(self) -> None:
        _require(self.hidden % self.heads == 0, "hidden must be a multiple of heads")
        _require((self.hidden // self.heads) % 2 == 0, "hidden / heads must be even: positions are rotations of pairs")
        _require(self.vocabulary_size >= 300, "vocabulary_size must be at least 300: bytes, headers and tags need it")


class SftSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cold start on a teacher's trajectories. TOML section [trainer.sft]."""

    steps: int = 1400
    "optimizer steps"
    batch: int = 32
    "trajectories an optimizer step"
    muon_learning_rate: float = 0.007
    "for the 2-D weights of the hidden layers"
    muon_momentum: float = 0.95
    "Nesterov momentum of Muon"
    adamw_learning_rate: float = 3e-3
    "for embeddings, head and norms"
    warmup_steps: int = 50
    "learning rates rise linearly over these steps"
    final_share: float = 0.0
    "share of the learning rates that the cosine ends at"
    gradient_clip: float = 1.0
    "greatest norm of a gradient"
    check_demonstrations: int = 0
    "trajectories that are not trained on, to check whether what was read is copied exactly; 0 = no check"
    check_accuracy_min: float = 0.95
    "share of turns with copied text that must be exact; below it, more steps follow"
    check_rounds_max: int = 3
    "how often more steps follow at most; after that, practice begins all the same"
    check_steps: int = 300
    "steps of such a round, with a warm-up and a cosine of its own"

    def __post_init__(self) -> None:
        _require(0 <= self.check_accuracy_min <= 1, "check_accuracy_min is a share: 0 to 1")
        for name in ("check_demonstrations", "check_rounds_max"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative")
        _require(self.check_steps >= 1, "check_steps must be at least 1")


class GrpoSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The learning rule (docs/learning.md). TOML section [trainer.grpo]."""

    learning_rate: float = 4e-4
    "of AdamW, at the first step"
    final_share: float = 0.05
    "share of the learning rate that a straight line over the job's steps ends at; 1 = constant"
    schedule_steps: int | None = None
    "steps that this line is drawn over, 0 = constant; left out = [job] steps. For a run that repeats a part of another"
    schedule_start: int = 0
    "steps of the line that lie before the first batch of this run"
    warmup_steps: int = 0
    "the learning rate rises linearly over the first so many steps of the line"
    beta1: float = 0.9
    "decay of AdamW's mean of gradients"
    beta2: float = 0.95
    "decay of AdamW's mean of squared gradients"
    weight_decay: float = 0.0
    "decoupled weight decay of AdamW"
    inner_steps: int = 2
    "optimizer steps on the whole batch"
    mode: LossMode = "decoupled"
    "which ratio is clipped and how staleness is corrected: see docs/learning.md"
    clip_low: float = 0.2
    "a ratio below 1 - clip_low has no gradient when the advantage is negative"
    clip_high: float = 0.28
    "a ratio above 1 + clip_high has no gradient when the advantage is positive"
    dual_clip: float = 3.0
    "bound of the loss of a token with negative advantage, in advantages"
    importance_weight_max: float = 2.0
    "truncation of the weight that corrects for stale sampling"
    icepop_low: float = 0.5
    "icepop: a token whose importance weight is below this has no gradient"
    gspo_clip_low: float = 3e-4
    "gspo: clip_low of the ratio of a whole context"
    gspo_clip_high: float = 4e-4
    "gspo: clip_high of the ratio of a whole context"
    second_moment_max: float = 0.04
    "m2po: bound of the mean squared log-ratio of the tokens that it keeps"
    probability_drop: float = 0.2
    "probability: a token whose probability has moved this far in the wanted direction has no policy gradient"
    square_weight: float = 1e-3
    "probability: weight of the squared difference of log-probabilities"
    rejection_low: float | None = None
    "a context whose geometric mean of importance ratios is below it is removed from the loss; null = never"
    rejection_high: float | None = None
    "the same above"
    reference_weight: float = 0.0
    "of the KL divergence (k3) from the version that practice began with, for each token; 0 = none"
    reference_steps: int = 0
    "batches over which this weight falls to 0 in a straight line; 0 = it stays"
    entropy_weight: float = 0.0
    "of the entropy that is added to the objective, for each token; 0 = none"
    entropy_floor: float | None = None
    "only a token whose entropy is below this (in nats) is rewarded for more; left out = every token"
    probability_move_max: float = 0.0
    """the update of a batch is halved until it moves no sampled token's probability by more than this; 0 = no bound. Costs a
    forward pass and a copy of the weights"""
    aggregation: Aggregation = "token_mean"
    "over the whole step: mean over tokens, mean of trajectory means, or sum / (trajectories x length_constant)"
    length_constant: int = 512
    "constant_length: tokens a trajectory counts as"
    effective_sample_size_min: float = 0.0
    "a batch whose effective sample size is below it before its first step ends the run; 0 = never, 0.1 for older data"
    gradient_clip: float = 1.0
    "greatest norm of a gradient"
    micro_batch_tokens_max: int = 2048
    "distinct tokens in one forward pass; a longer trajectory has a pass of its own"

    def __post_init__(self) -> None:
        _require(self.inner_steps >= 1, "inner_steps must be at least 1")
        _require(self.second_moment_max > 0, "second_moment_max must be above 0")
        _require(0 <= self.effective_sample_size_min <= 1, "effective_sample_size_min is a share: 0 to 1")
        _require(0 <= self.probability_move_max <= 1, "probability_move_max is a difference of probabilities: 0 to 1")
        for name in ("reference_weight", "entropy_weight", "reference_steps", "warmup_steps"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative")
        _require(
            self.mode != "probability" or self.inner_steps == 1,
            "mode probability takes one step a batch: set inner_steps to 1",
        )


class LoraSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters instead of full weights, in the file format of PEFT. TOML section [trainer.lora]."""

    rank: int = 0
    "of the two factors of each update; 0 = all weights are trained"
    alpha: float = 16.0
    "updates are scaled by alpha / rank"
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    "last names of the linear layers that get an adapter"

    def __post_init__(self) -> None:
        _require(self.rank >= 0, "rank must not be negative")
        _require(self.rank == 0 or bool(self.targets), "targets must name a layer")


class SwiftSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine swift: ms-swift 4.6 in a process of its own. TOML section [trainer.swift]."""

    libraries: str = ""
    "folder with ms-swift and what it needs besides the packages of this project; empty = where `make setup` puts them"
    options: dict[str, str | int | float | bool] = {}
    "further options of `swift rlhf`, such as deepspeed, by name; they win over those that are made from [trainer]"


class TrainerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer program. TOML section [trainer]."""

    engine: EngineName = "torch"
    "what computes the steps: torch, or swift (ms-swift)"
    model: ModelSettings = field(default_factory=ModelSettings)
    "where the first weights come from"
    sft: SftSettings = field(default_factory=SftSettings)
    "the cold start"
    grpo: GrpoSettings = field(default_factory=GrpoSettings)
    "the learning rule"
    lora: LoraSettings = field(default_factory=LoraSettings)
    "adapters instead of full weights"
    swift: SwiftSettings = field(default_factory=SwiftSettings)
    "the second engine"
    device: str = "cpu"
    "where the engine torch computes: cpu, cuda, cuda:1 …"
    precision: Precision = "float32"
    """of the engine torch's matrix products. bfloat16 is for devices that are good at it; weights, the optimizer and
    log-probabilities are float32 all the same"""
    gradient_checkpointing: bool = False
    "layers of a Llama are computed again for the gradient instead of being kept: less memory, about a third more time"
    threads: int = 1
    "threads of torch; two on busy cores were 6 to 50 times slower than one"


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
