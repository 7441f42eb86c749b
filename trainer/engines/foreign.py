"""Any causal language model of transformers: the slow path for model families that have no module here.

Micro-batches are not packed: rows of similar length are computed whole, so that shared prefixes are computed again, and
padding too. The head still sees sampled positions only.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from replayground.schemas.errors import BadInput
from replayground.trainer.batch import MicroBatch
from replayground.trainer.config import Precision
from replayground.trainer.engines.lora import Adapters

_HOST = torch.device("cpu")


class ForeignModel:
    """See trainer.engines.protocol.Model. Raises BadInput when weights and config do not fit together."""

    def __init__(
        self,
        config_json: bytes,
        weights: Mapping[str, Tensor],
        adapters: Adapters | None = None,
        device: torch.device = _HOST,
        precision: Precision = "float32",
    ) -> None:
        self.device = device
        self._is_half = precision == "bfloat16"
        # Imported here: it takes seconds, and most runs never need it.
        from transformers import AutoConfig, AutoModelForCausalLM

        config = json.loads(config_json)
        model_type = config.pop("model_type", "")
        try:
            shape = AutoConfig.for_model(model_type, **config)
            self._model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)  # type: ignore[no-untyped-call]
        except (ValueError, KeyError) as error:
            raise BadInput(f"model type {model_type!r} is not known to transformers: {error}") from error
        own = self._model.state_dict()
        absent, unknown = own.keys() - weights.keys() - _tied(self._model), weights.keys() - own.keys()
        if absent or unknown:
            raise BadInput(f"weights do not fit config.json: {min(absent | unknown)} is missing or unknown")
        with torch.no_grad():
            # One after another: weights may be a file that is read tensor by tensor.
            for name in weights:
                if own[name].shape != (given := weights[name]).shape:
                    raise BadInput(f"weights do not fit config.json: {name} has shape {tuple(given.shape)}")
                own[name].copy_(given)
        self._model.tie_weights()
        self._model.to(device)
        # Dropout would make the trainer's log-probabilities differ from the server's.
        self._model.eval()
        self.parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        if adapters is not None:
            self._adapt(adapters)
        self.vocabulary_size = int(self._model.config.vocab_size)

    def _adapt(self, adapters: Adapters) -> None:
        self._model.requires_grad_(False)
        self.parameters = adapters.parameters
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.Linear) and f"{name}.lora_A.weight" in adapters.parameters:

                def add(_: Any, inputs: tuple[Tensor, ...], output: Tensor, weight: str = f"{name}.weight") -> Tensor:
                    added = adapters.added(inputs[0], weight)
                    return output if added is None else output + added

                module.register_forward_hook(add)

    def hidden_weights(self) -> list[str]:
        if any(".lora_A." in name for name in self.parameters):
            return []
        return [name for name, tensor in self.parameters.items() if ".layers." in name and tensor.dim() == 2]

    def logits(self, micro: MicroBatch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._is_half):
            logits = self._logits(micro)
        return logits.float() if self._is_half else logits

    def _logits(self, micro: MicroBatch) -> Tensor:
        hidden: list[Tensor] = []
        for rows in micro.rows:
            # No attention mask: padding is on the right, where causal attention does not see it.
            states = self._model.base_model(micro.tokens[rows], use_cache=False).last_hidden_state
            hidden.append(states.flatten(0, 1))
        wanted = functional.embedding(micro.first[micro.before], torch.cat(hidden))
        logits: Tensor = self._model.get_output_embeddings()(wanted)
        return logits


def _tied(model: Any) -> set[str]:
    """Weights that are another one's: files may leave them out."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and getattr(model.config, "tie_word_embeddings", False)
    names = {id(module): name for name, module in model.named_modules()}
    return {f"{names[id(head)]}.weight"} if is_tied and head is not embedding else set()
