"""The fast Llama and the foreign model against transformers, and Muon against torch's."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load
from tokenizers import Tokenizer
from torch import Tensor

from replayground.trainer.base_model import WEIGHTS
from replayground.trainer.batch import Episode, MicroBatch, episodes_of, in_order, training_batch
from replayground.trainer.engines.foreign import ForeignModel
from replayground.trainer.engines.llama import Llama, llama_shape
from replayground.trainer.muon import Muon, orthogonalised
from tests.trainer.episodes import assembled, played


def sampled_logprobs(model: Llama | ForeignModel, micro: MicroBatch) -> Tensor:
    return torch.log_softmax(model.logits(micro), -1).gather(1, micro.targets[:, None]).squeeze(1)


def one_by_one(model: Any, episodes: list[Episode]) -> Tensor:
    """transformers on each sequence alone, head at all positions."""
    found: list[Tensor] = []
    for episode in in_order(episodes):
        tokens = torch.from_numpy(episode.tokens.astype("int64"))
        logprobs = torch.log_softmax(model(tokens[None]).logits[0], -1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        found.append(logprobs[torch.from_numpy(episode.sampled[1:])])
    return torch.cat(found)


@pytest.fixture(scope="module")
def episodes(tokenizer: Tokenizer) -> list[Episode]:
    size = tokenizer.get_vocab_size()
    return [
        episode
        for n, e in enumerate(played(20, seed=5))
        for episode in episodes_of(assembled(e, tokenizer, number=n), size, teacher=True)
    ]


def variant(model_files: dict[str, bytes], grouped: bool, tied: bool) -> tuple[bytes, dict[str, Tensor]]:
    """The made model, or one with shared key and value heads and a head of its own."""
    config, weights = json.loads(model_files["config.json"]), load(model_files[WEIGHTS])
    if grouped:
        config["num_key_value_heads"] = 1
        weights = {name: t[:32].clone() if "k_proj" in name or "v_proj" in name else t for name, t in weights.items()}
    if not tied:
        config["tie_word_embeddings"] = False
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).clone()
    return json.dumps(config).encode(), weights


@pytest.mark.parametrize(("grouped", "tied"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 5e-6)])
def test_logprobs_and_gradients_equal_transformers(
    model_files: dict[str, bytes],
    episodes: list[Episode],
    grouped: bool,
    tied: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config, weights = variant(model_files, grouped, tied)
    theirs = LlamaForCausalLM(LlamaConfig(**json.loads(config)))  # type: ignore[no-untyped-call]
    theirs.load_state_dict(weights, strict=False)
    theirs.tie_weights()
    theirs.to(dtype)  # type: ignore[arg-type]
    shape = llama_shape(config)
    assert shape is not None
    ours = Llama(shape, {name: tensor.clone().to(dtype) for name, tensor in weights.items()})
    (micro,) = training_batch(episodes, 10**9).micro_batches
    expected, found = one_by_one(theirs, episodes), sampled_logprobs(ours, micro)
    assert float((found - expected).detach().abs().max()) <= tolerance
    torch.autograd.backward(expected.mean())
    torch.autograd.backward(found.mean())
    for name, parameter in theirs.named_parameters():
        own = ours.parameters[name].grad
        assert own is not None
        assert parameter.grad is not None
        assert float((own - parameter.grad).abs().max()) <= tolerance, name


def test_a_foreign_model_gives_the_same_logprobs(model_files: dict[str, bytes], episodes: list[Episode]) -> None:
    shape = llama_shape(model_files["config.json"])
    assert shape is not None
    ours = Llama(shape, load(model_files[WEIGHTS]))
    foreign = ForeignModel(model_files["config.json"], load(model_files[WEIGHTS]))
    assert set(foreign.parameters) == set(ours.parameters)
    assert sorted(foreign.hidden_weights()) == sorted(ours.hidden_weights())
    for micro in training_batch(episodes, 300).micro_batches:
        torch.testing.assert_close(sampled_logprobs(foreign, micro), sampled_logprobs(ours, micro), rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Qwen2ForCausalLM"]},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_what_the_fast_llama_does_not_compute_exactly_it_leaves_to_transformers(
    model_files: dict[str, bytes], change: dict[str, object]
) -> None:
    config = json.loads(model_files["config.json"]) | change
    assert llama_shape(json.dumps(config).encode()) is None


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # of the flags below, with any value
def test_muon_goes_where_torchs_goes() -> None:
    """torch computes in bfloat16, so directions agree to its precision; the sizes of the steps agree on average."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64), (64, 64), (192, 64), (64, 192)]
    ours = [torch.randn(shape, generator=generator) for shape in shapes]
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in ours]
    starts = [tensor.clone() for tensor in ours]
    reference = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.0)
    muon = Muon(ours, momentum=0.95)
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        muon.step(0.02)
        # oneDNN multiplies bfloat16 by AMX where a processor tells of it, also on virtual machines where that is illegal
        with torch.backends.mkldnn.flags(enabled=False):
            reference.step()  # type: ignore[no-untyped-call]
    for own, other, start in zip(ours, theirs, starts, strict=True):
        moved, expected = (own - start).flatten(), (other.detach() - start).flatten()
        assert float(torch.cosine_similarity(moved, expected, dim=0)) > 0.999
        assert float(moved.norm() / expected.norm()) == pytest.approx(1.0, abs=0.01)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(5, 192, 64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_a_zero_gradient_moves_nothing() -> None:
    parameter = torch.ones(4, 4)
    muon = Muon([parameter], momentum=0.95)
    muon.step(0.1)
    assert torch.equal(parameter, torch.ones(4, 4))
