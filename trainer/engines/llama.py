"""A Llama that computes micro-batches with shared prefixes: the fast path for models of that family.

Parameters have the names of the Hugging Face files. A test compares it with transformers' LlamaForCausalLM. In small
models the time goes into many small operations, so norm, rotation and gate are single autograd functions.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from replayground.trainer.batch import MicroBatch
from replayground.trainer.config import Precision
from replayground.trainer.engines.lora import Adapters

_HOST = torch.device("cpu")


class LlamaShape(Struct, frozen=True, kw_only=True):
    """The shape of a Llama, from its config.json."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary_size: int
    norm_epsilon: float
    rope_theta: float
    tied: bool


def llama_shape(config_json: bytes) -> LlamaShape | None:
    """The shape, if config.json describes a Llama that this module computes exactly; else None."""
    config = json.loads(config_json)
    # The name of this section changed between releases of transformers.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = (
        config.get("architectures") == ["LlamaForCausalLM"]
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and not config.get("attention_bias")
        and not config.get("mlp_bias")
        and config.get("hidden_act", "silu") == "silu"
    )
    if not plain:
        return None
    return LlamaShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocabulary_size=config["vocab_size"],
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta", 10000.0)),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


class Llama:
    """See trainer.engines.protocol.Model."""

    def __init__(
        self,
        shape: LlamaShape,
        parameters: Mapping[str, Tensor],
        adapters: Adapters | None = None,
        computes_again: bool = False,
        device: torch.device = _HOST,
        precision: Precision = "float32",
    ) -> None:
        """With adapters, those are what is trained. `computes_again`: layers are not kept for the gradient."""
        self.device = device
        self._is_half = precision == "bfloat16"
        self.shape = shape
        self.vocabulary_size = shape.vocabulary_size
        # Sorted copies make runs repeatable. safetensors returns names in any order, and the norm of all gradients
        # depends on the order of addition. It returns memory of any alignment, and results of products may depend on
        # that.
        self._weights = {
            name: parameters[name].clone().to(device).requires_grad_(adapters is None) for name in sorted(parameters)
        }
        self.parameters = self._weights if adapters is None else adapters.parameters
        self._adapters = adapters
        self._computes_again = computes_again
        self._frequencies = shape.rope_theta ** -(
            torch.arange(0, shape.head_size, 2, dtype=torch.float32, device=device) / shape.head_size
        )

    def hidden_weights(self) -> list[str]:
        """Names of the 2-D weights of the hidden layers."""
        # Not those of adapters: orthogonal updates are for whole matrices.
        if self._adapters is not None:
            return []
        return [name for name, tensor in self.parameters.items() if ".layers." in name and tensor.dim() == 2]

    def logits(self, micro: MicroBatch) -> Tensor:
        """The logits from which each sampled token was drawn, [sampled, vocabulary]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._is_half):
            logits = self._logits(micro)
        # Sums over a vocabulary need more digits.
        return logits.float() if self._is_half else logits

    def _logits(self, micro: MicroBatch) -> Tensor:
        embeddings = self._weights["model.embed_tokens.weight"]
        stream = functional.embedding(micro.tokens, embeddings)
        angles = micro.positions[:, None].to(torch.float32) * self._frequencies
        cosine, sine = angles.cos()[:, None].to(stream.dtype), angles.sin()[:, None].to(stream.dtype)
        for layer in range(self.shape.layers):
            last = layer == self.shape.layers - 1
            # After the attention of the last layer, only positions that predict a sampled token are still needed.
            kept = micro.before if last else None
            if self._computes_again and torch.is_grad_enabled():
                stream = checkpoint(self._block, layer, stream, micro, cosine, sine, kept, use_reentrant=False)
            else:
                stream = self._block(layer, stream, micro, cosine, sine, kept)
        stream = _norm(stream, self._weights["model.norm.weight"], self.shape.norm_epsilon)
        return functional.linear(stream, embeddings if self.shape.tied else self._weights["lm_head.weight"])

    def _block(
        self, layer: int, stream: Tensor, micro: MicroBatch, cosine: Tensor, sine: Tensor, kept: Tensor | None
    ) -> Tensor:
        normed = _norm(stream, self._weight(layer, "input_layernorm"), self.shape.norm_epsilon)
        attended = self._attention(layer, normed, micro, cosine, sine, kept)
        if kept is not None:
            stream = functional.embedding(kept, stream)
        stream = stream + self._product(attended, layer, ("self_attn.o_proj",))
        normed = _norm(stream, self._weight(layer, "post_attention_layernorm"), self.shape.norm_epsilon)
        gated = _gate(self._product(normed, layer, ("mlp.gate_proj", "mlp.up_proj")))
        return stream + self._product(gated, layer, ("mlp.down_proj",))

    def _attention(
        self, layer: int, normed: Tensor, micro: MicroBatch, cosine: Tensor, sine: Tensor, kept: Tensor | None
    ) -> Tensor:
        heads, shared = self.shape.heads, self.shape.key_value_heads
        # Projected and rotated once for each distinct token, then gathered into rows for attention.
        projected = self._product(normed, layer, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        # functional.embedding is a gather whose backward pass is many times faster on CPU than that of indexing.
        mixed = _rotate(projected.to(cosine.dtype), cosine, sine, heads + shared)
        outputs: list[Tensor] = []
        for rows in micro.rows:
            gathered = functional.embedding(rows, mixed).view(*rows.shape, -1, self.shape.head_size).transpose(1, 2)
            queries, keys, values = torch.split(gathered, [heads, shared, shared], dim=1)
            # The causal mask hides the padding, which is on the right. It attends to others and is never picked below.
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=heads != shared
            )
            outputs.append(attended.transpose(1, 2).reshape(rows.numel(), heads * self.shape.head_size))
        # Back from rows to distinct tokens.
        places = micro.first if kept is None else micro.first[kept]
        return functional.embedding(places, torch.cat(outputs) if len(outputs) > 1 else outputs[0])

    def _product(self, inputs: Tensor, layer: int, names: tuple[str, ...]) -> Tensor:
        """The outputs of some linear layers with the same inputs, side by side."""
        weights = [self._weight(layer, name) for name in names]
        # One product for all: several small ones take longer.
        product = functional.linear(inputs, weights[0] if len(weights) == 1 else torch.cat(weights))
        if self._adapters is None:
            return product
        added = [self._adapters.added(inputs, _full_name(layer, name)) for name in names]
        parts = torch.split(product, [len(weight) for weight in weights], dim=-1)
        sums = [part if more is None else part + more for part, more in zip(parts, added, strict=True)]
        return torch.cat(sums, -1)

    def _weight(self, layer: int, name: str) -> Tensor:
        return self._weights[_full_name(layer, name)]


def _full_name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}.weight"


def _norm(stream: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    normed: Tensor = _Norm.apply(stream, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


def _rotate(mixed: Tensor, cosine: Tensor, sine: Tensor, heads: int) -> Tensor:
    rotated: Tensor = _Rotate.apply(mixed, cosine, sine, heads)  # type: ignore[no-untyped-call]
    return rotated


def _gate(gate_up: Tensor) -> Tensor:
    gated: Tensor = _Gate.apply(gate_up)  # type: ignore[no-untyped-call]
    return gated


class _Norm(torch.autograd.Function):
    """RMS norm: x / sqrt(mean x² + epsilon) times a weight."""

    @staticmethod
    def forward(context: Any, stream: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = stream.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        normed = stream * scale
        context.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = context.saved_tensors
        of_weight = gradient * normed
        of_normed = gradient * weight
        # dx = scale · (g·w - normed · mean(g·w·normed))
        along = (of_weight @ weight / normed.shape[-1]).unsqueeze(-1)
        return of_normed.addcmul_(normed, along, value=-1).mul_(scale), of_weight.sum(0), None


class _Rotate(torch.autograd.Function):
    """Rotary embedding: rotates the halves of the first heads (queries and keys) by position; values are unchanged."""

    @staticmethod
    def forward(context: Any, mixed: Tensor, cosine: Tensor, sine: Tensor, heads: int) -> Tensor:
        context.save_for_backward(cosine, sine)
        context.heads = heads
        return _rotated(mixed, cosine, sine, heads, 1.0)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # The transpose of a rotation is the rotation by the negative angle.
        cosine, sine = context.saved_tensors
        return _rotated(gradient, cosine, sine, context.heads, -1.0), None, None, None


def _rotated(mixed: Tensor, cosine: Tensor, sine: Tensor, heads: int, direction: float) -> Tensor:
    half = cosine.shape[-1]
    source = mixed.view(len(mixed), -1, 2, half)[:, :heads]
    # A copy: each half is computed from both old halves, and values stay as they are.
    result = mixed.clone()
    target = result.view(len(mixed), -1, 2, half)[:, :heads]
    target.mul_(cosine[:, None].transpose(1, 2))
    target[:, :, 0].addcmul_(source[:, :, 1], sine, value=-direction)
    target[:, :, 1].addcmul_(source[:, :, 0], sine, value=direction)
    return result


class _Gate(torch.autograd.Function):
    """silu(gate) * up; gate and up are the two halves of one product."""

    @staticmethod
    def forward(context: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        silu = functional.silu(gate)
        context.save_for_backward(gate_up, silu)
        return silu * up

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        gate_up, silu = context.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        # Both gradients are written into the halves of one tensor, which saves a concatenation.
        result = torch.empty_like(gate_up)
        of_gate, of_up = result.chunk(2, -1)
        torch.mul(gradient, silu, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return result
