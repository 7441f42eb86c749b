"""Version 0 of the weights: a new random model, or a given model folder, checked."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_safetensors
from tokenizers import Tokenizer
from torch import Tensor

from replayground.schemas.errors import BadInput, BlobDamaged
from replayground.schemas.job import Job
from replayground.trainer.config import ModelSettings
from replayground.trainer.tokenizer import END, fit_tokenizer, tokenizer_config
from replayground.trainer.weights_file import StoredTensors, write_float32

WEIGHTS = "model.safetensors"
# Files that are copied from a given model folder if they exist: vLLM and transformers read them.
_CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_NORM_EPSILON = 1e-6
_ROPE_THETA = 10000.0


def base_model(settings: ModelSettings, job: Job, seed: int, folder: Path) -> dict[str, Path]:
    """Writes version 0 into a folder; returns its files by name. Raises BadInput for a given model that cannot be
    used."""
    if settings.path is not None:
        read_model(Path(settings.path), folder)
    else:
        for name, data in make_model(settings, job, seed).items():
            (folder / name).write_bytes(data)
    return {path.name: path for path in folder.iterdir()}


def make_model(settings: ModelSettings, job: Job, seed: int) -> dict[str, bytes]:
    """A Llama with random weights and a tokenizer fitted to the job. The same seed gives the same bytes."""
    tokenizer = fit_tokenizer(job, seed, settings.vocabulary_size)
    vocabulary_size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id(END)
    weights = _initial_weights(settings, vocabulary_size, seed)
    return {
        "config.json": _json(_config(settings, vocabulary_size, end)),
        "generation_config.json": _json({"eos_token_id": end, "pad_token_id": end}),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": tokenizer_config(settings.positions_max),
        WEIGHTS: save_safetensors(weights, metadata={"format": "pt"}),
    }


def read_model(folder: Path, into: Path) -> None:
    """Copies a given model: weights as one float32 file, the other files unchanged. Raises BadInput."""
    if not folder.is_dir():
        raise BadInput(f"model folder {folder} does not exist: set [trainer.model] path to a folder with config.json")
    config = _config_of(folder)
    # Read only to fail here, at the start, and not in a server.
    _read_checked(folder / "tokenizer.json", lambda path: Tokenizer.from_file(str(path)))
    weights = _weights_of(folder)
    (into / "generation_config.json").write_bytes(_json({"eos_token_id": config.get("eos_token_id")}))
    (into / "tokenizer_config.json").write_bytes(_json({"tokenizer_class": "PreTrainedTokenizerFast"}))
    # After the two defaults above, which files of the given folder replace.
    for name in _CARRIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, into / name)
    # Both names: older releases of transformers read torch_dtype.
    (into / "config.json").write_bytes(_json({**config, "dtype": "float32", "torch_dtype": "float32"}))
    write_float32(weights, into / WEIGHTS)


def _config(settings: ModelSettings, vocabulary_size: int, end: int | None) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "head_dim": settings.hidden // settings.heads,
        "intermediate_size": settings.ffn,
        "vocab_size": vocabulary_size,
        "max_position_embeddings": settings.positions_max,
        "initializer_range": settings.initializer_range,
        "rms_norm_eps": _NORM_EPSILON,
        "rope_theta": _ROPE_THETA,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        # transformers gives the embedding of a padding token no gradient, and ours would be <|end|>.
        "pad_token_id": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _initial_weights(settings: ModelSettings, vocabulary_size: int, seed: int) -> dict[str, Tensor]:
    # A generator of its own: the global one depends on what else has drawn from it, and the same seed must give the
    # same bytes. The order of the draws below is part of that.
    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * settings.initializer_range

    hidden, ffn = settings.hidden, settings.ffn
    weights = {"model.embed_tokens.weight": drawn(vocabulary_size, hidden)}
    for layer in range(settings.layers):
        prefix = f"model.layers.{layer}"
        for part in "qkvo":
            weights[f"{prefix}.self_attn.{part}_proj.weight"] = drawn(hidden, hidden)
        weights[f"{prefix}.mlp.gate_proj.weight"] = drawn(ffn, hidden)
        weights[f"{prefix}.mlp.up_proj.weight"] = drawn(ffn, hidden)
        weights[f"{prefix}.mlp.down_proj.weight"] = drawn(hidden, ffn)
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(hidden)
    weights["model.norm.weight"] = torch.ones(hidden)
    return weights


def _config_of(folder: Path) -> dict[str, Any]:
    config = _read_checked(folder / "config.json", lambda path: json.loads(path.read_bytes()))
    if not isinstance(config, dict) or not config.get("architectures"):
        raise BadInput(f"{folder / 'config.json'} names no architectures: is {folder} a Hugging Face model folder?")
    return config


def _weights_of(folder: Path) -> StoredTensors:
    try:
        return StoredTensors(list(_shards(folder)))
    except BlobDamaged as error:
        raise BadInput(str(error)) from error


def _shards(folder: Path) -> Iterator[Path]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise BadInput(f"model folder {folder} holds no *.safetensors: convert its weights to safetensors")
    yield from paths


def _read_checked(path: Path, read: Callable[[Path], Any]) -> Any:
    if not path.is_file():
        raise BadInput(f"model folder {path.parent} has no {path.name}: give a Hugging Face model folder")
    try:
        return read(path)
    # tokenizers raises bare Exception for a file it cannot read.
    except Exception as error:
        raise BadInput(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode()
