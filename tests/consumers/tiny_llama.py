"""A random Llama of 0.1 M parameters: its files, and its own log-probabilities of a probe, as a trainer would publish."""

import random
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replayground.schemas.blobs import Blobs
from replayground.schemas.events import Meta, Probe, WeightsFile, WeightsPublished
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.packed import pack_logprobs, pack_tokens

VOCABULARY = 128


def published(run_id: str, version: int, blobs: Blobs) -> WeightsPublished:
    """Random weights drawn from the version as seed, written as blobs."""
    model = _model(version)
    tokens = [random.Random(version).randrange(VOCABULARY) for _ in range(24)]
    return WeightsPublished(
        meta=Meta(
            id=new_id(), run_id=run_id, category="weights", topic="weights", sender="test", timestamp=now_microseconds()
        ),
        version=version,
        base_version=None,
        kind="full",
        files=_files(model, blobs),
        checkpoint=[],
        batches=[],
        probe=Probe(tokens=pack_tokens(tokens), logprobs=pack_logprobs(_logprobs(model, tokens))),
    )


def logprobs_of(version: int, tokens: list[int]) -> list[float]:
    """What the weights of this version give tokens 1 … n - 1."""
    return _logprobs(_model(version), tokens)


def _model(version: int) -> LlamaForCausalLM:
    torch.manual_seed(version)
    model: LlamaForCausalLM = LlamaForCausalLM(_config()).float().eval()  # type: ignore[no-untyped-call]
    return model


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,  # what the packed head of vLLM on CPU stumbles over: see consumers/vllm_worker.py
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )


def _files(model: LlamaForCausalLM, blobs: Blobs) -> list[WeightsFile]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return [_file(path, blobs) for path in sorted(Path(folder).iterdir())]


def _file(path: Path, blobs: Blobs) -> WeightsFile:
    data = path.read_bytes()
    uri, sha256 = blobs.put(data)
    return WeightsFile(name=path.name, uri=uri, sha256=sha256, size_bytes=len(data))


def _logprobs(model: LlamaForCausalLM, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
    return [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]
