"""Any causal language model of transformers: the slow path for model families that have no module here.

Rows are computed whole, so that shared prefixes are computed again; the head still sees sampled positions only.
"""

import json
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from replayground.schemas.errors import BadInput
from replayground.trainer.batch import MicroBatch


class ForeignModel:
    """See trainer.engines.protocol.Model. Raises BadInput when weights and config do not fit together."""

    def __init__(self, config_json: bytes, weights: Mapping[str, Tensor]) -> None:
        # Imported here: it takes seconds, and most runs never need it.
        from transformers import AutoConfig, AutoModelForCausalLM

        config = json.loads(config_json)
        model_type = config.pop("model_type", "")
        try:
            shape = AutoConfig.for_model(model_type, **config)
            self._model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)  # type: ignore[no-untyped-call]
        except (ValueError, KeyError) as error:
            raise BadInput(f"model type {model_type!r} is not known to transformers: {error}") from error
        # Not strict: a tied head has no weights of its own in the files. What is really missing is found below.
        missing = self._model.load_state_dict(dict(weights), strict=False)
        self._model.tie_weights()
        # Dropout would make the trainer's log-probabilities differ from the server's.
        self._model.eval()
        self.parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        absent = [name for name in missing.missing_keys if name in self.parameters]
        if absent or missing.unexpected_keys:
            raise BadInput(
                f"weights do not fit config.json: {(absent + missing.unexpected_keys)[0]} is missing or unknown"
            )
        self.vocabulary_size = int(self._model.config.vocab_size)

    def hidden_weights(self) -> list[str]:
        return [name for name, tensor in self.parameters.items() if ".layers." in name and tensor.dim() == 2]

    def logits(self, micro: MicroBatch) -> Tensor:
        hidden: list[Tensor] = []
        for rows in micro.rows:
            # No attention mask: padding is on the right, where causal attention does not see it.
            states = self._model.base_model(micro.tokens[rows], use_cache=False).last_hidden_state
            hidden.append(states.flatten(0, 1))
        wanted = functional.embedding(micro.first[micro.before], torch.cat(hidden))
        logits: Tensor = self._model.get_output_embeddings()(wanted)
        return logits
