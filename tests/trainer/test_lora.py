"""Adapters: new ones change nothing, training changes nothing else, the merged weights are what the trainer computes, and a
run with them goes on bit for bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from replayground.consumers.adapters import merge
from replayground.consumers.weights_files import WeightsFolder
from replayground.schemas.errors import BadInput, BlobDamaged
from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.packed import unpack_logprobs, unpack_tokens
from replayground.trainer.base_model import WEIGHTS, read_model
from replayground.trainer.config import GrpoSettings, LoraSettings, SftSettings, TrainerSettings
from replayground.trainer.engines.lora import ADAPTER, ADAPTER_CONFIG
from replayground.trainer.engines.protocol import GrpoBatch
from replayground.trainer.engines.torch_engine import TorchEngine
from tests.trainer.episodes import assembled, played
from tests.trainer.field import SETTINGS, Field, everything

LORA = LoraSettings(rank=4, alpha=8.0)
RULES = GrpoSettings(learning_rate=1e-2)
FAMILIES = ("llama", "smollm2", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(
    request: pytest.FixtureRequest, model_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny random model of a family, as a Hugging Face folder."""
    into: Path = tmp_path_factory.mktemp(request.param)
    for name, data in model_files.items():
        (into / name).write_bytes(data)
    if request.param != "llama":
        _write_random(request.param, json.loads(model_files["config.json"]), into)
    return into


def _write_random(family: str, llama: dict[str, Any], into: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    shape = {name: llama[name] for name in (*kept, "vocab_size", "head_dim", "tie_word_embeddings", "eos_token_id")}
    if family == "smollm2":
        # A Llama with shared keys and values and another base of its rotations.
        family, shape = "llama", shape | {"num_key_value_heads": 1, "rope_theta": 100000.0, "rms_norm_eps": 1e-5}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, initializer_range=0.2))  # type: ignore[no-untyped-call]
    model.save_pretrained(into)


def files_of(folder: Path, into: Path) -> dict[str, Path]:
    into.mkdir()
    read_model(folder, into)
    return {path.name: path for path in into.iterdir()}


def batch_of(tokenizer: Tokenizer) -> GrpoBatch:
    trajectories: list[TrajectoryAssembled] = [
        assembled(episode, tokenizer, number=number, purpose="train", versions=(0,))
        for number, episode in enumerate(played(6, seed=8))
    ]
    rewards = [float(number % 2) for number in range(6)]
    return GrpoBatch(0, trajectories, rewards, [2 * r - 1 for r in rewards], [r == 1 for r in rewards], index=0)


def test_an_adapter_is_trained_saved_and_merged_for_any_family(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    files = files_of(folder, tmp_path / "base")
    full, engine = TorchEngine(TrainerSettings(), 0), TorchEngine(TrainerSettings(lora=LORA, grpo=RULES), 0)
    full.load(files, {})
    engine.load(files, {})
    assert (full.kind, engine.kind) == ("full", "lora")
    batch = batch_of(tokenizer)
    tokens = unpack_tokens(batch.trajectories[0].tokens)
    assert engine.probe(tokens) == pytest.approx(full.probe(tokens), abs=1e-6), "a new adapter changes nothing"
    engine.grpo(batch)
    moved = engine.probe(tokens)
    assert max(abs(a - b) for a, b in zip(moved, full.probe(tokens), strict=True)) > 1e-2
    (tmp_path / "saved").mkdir()
    saved = engine.save(tmp_path / "saved")
    assert saved[WEIGHTS] == files[WEIGHTS], "the base is the file that was given: it is stored once"
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {ADAPTER, ADAPTER_CONFIG}
    merge(saved[WEIGHTS], saved[ADAPTER], saved[ADAPTER_CONFIG], tmp_path / "merged")
    full.load({**files, WEIGHTS: tmp_path / "merged"}, {})
    assert full.probe(tokens) == pytest.approx(moved, abs=1e-5)
    again = TorchEngine(TrainerSettings(lora=LORA, grpo=RULES), 1)
    again.load(saved, engine.checkpoint(tmp_path / "saved"))
    assert again.probe(tokens) == moved
    engine.grpo(batch)
    again.grpo(batch)
    assert again.probe(tokens) == engine.probe(tokens), "the state of the optimizer belongs to the adapter"


def test_a_folder_has_the_logprobs_of_transformers_and_says_when_it_is_not_packed(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    engine = TorchEngine(TrainerSettings(), 0)
    with capture_logs() as told:
        engine.load(files_of(folder, tmp_path / "base"), {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = [line["event"] for line in told if line["event"] == "model_not_packed"]
    assert said == ([] if model.config.model_type == "llama" else ["model_not_packed"])
    tokens = list(unpack_tokens(batch_of(tokenizer).trajectories[5].tokens))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
    expected = logprobs.gather(1, torch.tensor(tokens)[1:, None]).squeeze(1).tolist()
    assert engine.probe(tokens) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("lora", [LoraSettings(), LORA])
def test_bfloat16_is_for_products_alone(folder: Path, tokenizer: Tokenizer, tmp_path: Path, lora: LoraSettings) -> None:
    """Log-probabilities and the step are those of float32 to the precision of bfloat16, and everything kept is float32."""
    files, batch = files_of(folder, tmp_path / "base"), batch_of(tokenizer)
    tokens = unpack_tokens(batch.trajectories[0].tokens)
    taken: dict[str, dict[str, float]] = {}
    probes: dict[str, list[float]] = {}
    for precision in ("float32", "bfloat16"):
        engine = TorchEngine(
            TrainerSettings(lora=lora, grpo=GrpoSettings(learning_rate=1e-4), precision=precision),
            0,
        )
        engine.load(files, {})
        probes[precision] = engine.probe(tokens)
        taken[precision] = engine.grpo(batch).metrics
        (into := tmp_path / precision).mkdir()
        kept = {**engine.save(into), **engine.checkpoint(into)}
        stored = [load_file(path) for name, path in kept.items() if name.endswith(".safetensors")]
        assert {tensor.dtype for tensors in stored for tensor in tensors.values()} == {torch.float32}
    assert probes["bfloat16"] != probes["float32"]
    assert probes["bfloat16"] == pytest.approx(probes["float32"], rel=0.02, abs=0.1)
    for figure in ("loss", "gradient_norm", "entropy"):
        assert taken["bfloat16"][figure] == pytest.approx(taken["float32"][figure], rel=0.05, abs=0.02), figure


@pytest.mark.parametrize("device", ["cuda:7", "nonsense"])
def test_a_device_that_is_not_there_is_refused_in_one_line(device: str) -> None:
    with pytest.raises(
        BadInput, match=rf"^\[trainer\] device: torch cannot compute on '{device}' here .*; set it to cpu$"
    ):
        TorchEngine(TrainerSettings(device=device), 0)


def test_peft_has_the_same_names_for_its_files(model_files: dict[str, bytes], tmp_path: Path) -> None:
    engine = _engine(model_files, tmp_path, LORA)
    saved = engine.save(tmp_path)
    tensors = load_file(saved[ADAPTER])
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert tensors[first].shape == (4, 64)
    assert len(tensors) == 2 * 7 * 3
    assert not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)
    config = json.loads(saved[ADAPTER_CONFIG].read_bytes())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)


def _engine(model_files: dict[str, bytes], tmp_path: Path, lora: LoraSettings) -> TorchEngine:
    for name, data in model_files.items():
        (tmp_path / name).write_bytes(data)
    engine = TorchEngine(TrainerSettings(lora=lora), 0)
    engine.load({name: tmp_path / name for name in model_files}, {})
    return engine


def test_an_adapter_that_does_not_fit_is_refused(model_files: dict[str, bytes], tmp_path: Path) -> None:
    saved = _engine(model_files, tmp_path, LORA).save(tmp_path)
    for other in (
        LoraSettings(rank=2),
        msgspec.structs.replace(LORA, alpha=1.0),
        LoraSettings(rank=4, targets=("q_proj",)),
    ):
        with pytest.raises(BadInput, match=r"does not fit the version to begin with, which has rank 4, alpha 8\.0"):
            TorchEngine(TrainerSettings(lora=other), 0).load(saved, {})
    with pytest.raises(BadInput, match=r"set \[trainer.lora\] rank"):
        TorchEngine(TrainerSettings(), 0).load(saved, {})
    with pytest.raises(BadInput, match="no linear layer called c_attn"):
        _engine(model_files, tmp_path, LoraSettings(rank=4, targets=("c_attn",)))


# schedule_steps: the first half of an interrupted run is on the learning rates of the whole.
LORA_RUN = msgspec.structs.replace(
    SETTINGS, lora=LORA, grpo=GrpoSettings(micro_batch_tokens_max=256, learning_rate=1e-2, schedule_steps=3)
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Field:
    """A run with an adapter, without any trouble."""
    field = Field(tmp_path_factory.mktemp("straight"))
    everything(field, tokenizer)
    with field.training(LORA_RUN):
        field.until_version(4)
    return field


def digests(field: Field) -> list[tuple[int, str]]:
    return [(w.version, next(f.sha256 for f in w.files if f.name == ADAPTER)) for w in field.weights()]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_run_with_an_adapter_goes_on_bit_for_bit(
    tmp_path: Path, tokenizer: Tokenizer, straight: Field, version: int
) -> None:
    restarted = Field(tmp_path)
    everything(restarted, tokenizer)
    steps = restarted.run.job.steps
    restarted.run = _with_steps(restarted, max(1, version - 1))
    with restarted.training(LORA_RUN):
        restarted.until_version(version)
    restarted.run = _with_steps(restarted, steps)
    with restarted.training(LORA_RUN):
        restarted.until_version(4)
    assert digests(restarted) == digests(straight)
    assert len({digest for _, digest in digests(straight)}) == 5


def test_versions_of_a_run_with_an_adapter_are_merged_for_servers(tmp_path: Path, straight: Field) -> None:
    published = straight.weights()[-1]
    assert published.kind == "lora"
    bases = {next(f.sha256 for f in w.files if f.name == WEIGHTS) for w in straight.weights()}
    assert len(bases) == 1, "the base is stored once"
    root = WeightsFolder(tmp_path, straight.blobs)
    for weights in straight.weights()[-2:]:
        served = root.unpack(weights)
        assert not (served / ADAPTER).exists(), "a server would take it for weights"
    assert len(list(tmp_path.glob("base-*"))) == 1
    whole = TorchEngine(SETTINGS, 0)
    whole.load({path.name: path for path in served.iterdir()}, {})
    found = whole.probe(unpack_tokens(published.probe.tokens))
    assert found == pytest.approx(unpack_logprobs(published.probe.logprobs), abs=1e-5)


def _with_steps(field: Field, steps: int) -> Any:
    return msgspec.structs.replace(field.run, job=msgspec.structs.replace(field.run.job, steps=steps))


def test_an_adapter_that_belongs_to_another_base_is_not_served(model_files: dict[str, bytes], tmp_path: Path) -> None:
    saved = _engine(model_files, tmp_path, LORA).save(tmp_path)
    base = load(model_files[WEIGHTS])
    save_file({name: t for name, t in base.items() if ".layers.2." not in name}, tmp_path / "smaller")
    with pytest.raises(BlobDamaged, match=r"which .*smaller does not have"):
        merge(tmp_path / "smaller", saved[ADAPTER], saved[ADAPTER_CONFIG], tmp_path / "merged")


def test_layers_that_are_computed_again_give_the_same_step(
    model_files: dict[str, bytes], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for name, data in model_files.items():
        (tmp_path / name).write_bytes(data)
    metrics: list[dict[str, float]] = []
    for again in (False, True):
        engine = TorchEngine(TrainerSettings(gradient_checkpointing=again), 0)
        engine.load({name: tmp_path / name for name in model_files}, {})
        metrics.append(engine.grpo(batch_of(tokenizer)).metrics)
    for name in ("loss", "gradient_norm", "entropy"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-6)


def test_the_cold_start_of_an_adapter_learns(
    model_files: dict[str, bytes], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for name, data in model_files.items():
        (tmp_path / name).write_bytes(data)
    settings = TrainerSettings(
        lora=LoraSettings(rank=16, alpha=32.0), sft=SftSettings(steps=30, batch=6, warmup_steps=5)
    )
    engine = TorchEngine(settings, 0)
    engine.load({name: tmp_path / name for name in model_files}, {})
    demonstrations = [assembled(e, tokenizer, number=n) for n, e in enumerate(played(30, seed=2))]
    metrics = engine.sft(demonstrations, lambda share, loss: None).metrics
    assert metrics["loss"] < 0.9 * metrics["loss_first"]


MEASURE = """
import resource, sys
from pathlib import Path
from replayground.trainer.base_model import read_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_model(Path(sys.argv[1]), Path(sys.argv[2]))
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def test_a_given_model_passes_through_memory_one_tensor_at_a_time(
    model_files: dict[str, bytes], tmp_path: Path
) -> None:
    given, into = tmp_path / "given", tmp_path / "into"
    for made in (given, into):
        made.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (given / name).write_bytes(model_files[name])
    tensor = torch.ones(2048, 2048, dtype=torch.bfloat16)  # 8 MiB; 16 MiB as float32
    for shard in range(2):
        tensors = {f"{shard}.{number}": tensor.clone() for number in range(8)}
        save_file(tensors, given / f"model-{shard}.safetensors")
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(given), str(into)], capture_output=True, text=True, check=True
    ).stdout
    size = (into / WEIGHTS).stat().st_size
    assert size > 256 * 2**20
    assert int(output) < size / 4
