"""Extends vLLM's worker: reloads weights whose output head is tied to the embedding.

vLLM 0.32 on CPU packs the weights of the output head for its matrix kernels when it loads a model. `reload_weights`
loads the shared embedding but leaves the packed copy of a tied head as it was: the server would go on with the old head
and the new body (seen: log-probabilities off by 2). Loaded by `--worker-extension-cls`; imported inside vLLM only.
"""

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

RELOAD_METHOD = "reload_weights_and_tied_head"


class ReloadingWorker:
    """Mixed into vLLM's worker; POST /collective_rpc calls its methods by name."""

    model_runner: Any

    def reload_weights_and_tied_head(self, weights_path: str) -> None:
        self.model_runner.reload_weights(weights_path=weights_path)
        model = self.model_runner.get_model()
        # Only the packed copy of a tied head is out of date now.
        if not getattr(model.config, "tie_word_embeddings", False):
            return
        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
