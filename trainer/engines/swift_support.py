"""What the engine `swift` can do, and where its libraries are. Imports nothing of it: configs are checked by this."""

import os
from pathlib import Path

from replayground.trainer.config import TrainerSettings

LOSSES = {"decoupled": "dapo", "bypass": "dapo", "gspo": "dapo", "cispo": "cispo"}
"modes that ms-swift computes by the same formula, and its name of the loss"
_LIBRARIES = Path(__file__).resolve().parents[2] / ".tools" / "swift-libraries"
"deploy/install.py says the same"
_VARIABLE = "REPLAYGROUND_SWIFT_LIBRARIES"


def unsupported(settings: TrainerSettings) -> str | None:
    """Why ms-swift does not compute these settings as docs/learning.md says; None when it does."""
    if settings.device != "cpu" or settings.precision != "float32":
        return "device and precision are of the engine torch alone: leave them out, and use [trainer.swift] options"
    rules = settings.grpo
    if rules.mode not in LOSSES:
        return f"mode {rules.mode} is not a part of it: choose one of {', '.join(LOSSES)}"
    if rules.aggregation != "token_mean":
        return f"aggregation {rules.aggregation} is not a part of it: choose token_mean"
    amounts = ("reference_weight", "entropy_weight", "probability_move_max", "effective_sample_size_min")
    used = [name for name in amounts if getattr(rules, name)]
    used += [name for name in ("rejection_low", "rejection_high") if getattr(rules, name) is not None]
    if used:
        return f"[trainer.grpo] {used[0]} is not a part of it: leave it out"
    if settings.sft.check_demonstrations:
        return "[trainer.sft] check_demonstrations is not a part of it: leave it out"
    return None


def swift_libraries(settings: TrainerSettings) -> Path | None:
    """The folder with ms-swift; None where there is none, and then it has to be installed beside torch."""
    named = settings.swift.libraries or os.environ.get(_VARIABLE, "")
    folder = Path(named) if named else _LIBRARIES
    return folder if folder.is_dir() else None
