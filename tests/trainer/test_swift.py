"""The engine swift: the same losses and gradients as the engine torch, nothing silently other, and a run that goes on."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from replayground.schemas.errors import BadInput
from replayground.trainer.config import GrpoSettings, LoraSettings, SftSettings, SwiftSettings, TrainerSettings
from replayground.trainer.engines.apart import ApartEngine, EngineDied, _environment
from replayground.trainer.engines.swift_support import swift_libraries, unsupported
from replayground.trainer.loop import new_engine, train
from tests.trainer.field import SETTINGS, Field, cut, demonstrate

LIBRARIES = swift_libraries(TrainerSettings())
needs_swift = pytest.mark.skipif(LIBRARIES is None, reason="ms-swift is not installed: run `make setup`")


@pytest.fixture(scope="module")
def found(model_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("swift")
    (folder / "model").mkdir()
    for name, data in model_files.items():
        (folder / "model" / name).write_bytes(data)
    command = [sys.executable, "-m", "tests.trainer.swift_agreement", str(folder)]
    done = subprocess.run(command, env=_environment(LIBRARIES, 1), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@needs_swift
@pytest.mark.parametrize("rule", ["full", "lora", "bypass", "gspo", "cispo", "sft"])
def test_both_engines_agree(found: dict[str, dict[str, float]], rule: str) -> None:
    """Everything reported, the gradients, and the log-probabilities after four steps: to 1e-4."""
    assert found[rule]
    for name, difference in found[rule].items():
        assert difference < 1e-4, name


@needs_swift
@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ("logprobs", "BadInput: ms-swift lost the log-probabilities of a batch"),
        ("tokens", "BadInput: ms-swift has other tokens of trajectory"),
        ("demonstration", "BadInput: ms-swift has other tokens of trajectory"),
        ("temperatures", 'BadInput: engine = "swift" computes a batch at one temperature'),
    ],
)
def test_what_ms_swift_would_pass_over_in_silence_ends_the_step(
    found: dict[str, dict[str, str]], spoilt: str, said: str
) -> None:
    assert found["refusals"][spoilt].startswith(said)


SWIFT = msgspec.structs.replace(
    SETTINGS,
    engine="swift",
    lora=LoraSettings(rank=2),
    sft=SftSettings(steps=3, batch=4, warmup_steps=1),
    grpo=GrpoSettings(learning_rate=1e-3, schedule_steps=2),
)


def run_with(field: Field, settings: TrainerSettings, versions: int) -> None:
    engine, stop = new_engine(settings, field.run.seed), threading.Event()
    failures: list[BaseException] = []

    def program() -> None:
        try:
            train(field.run, settings, field.log, field.blobs, engine, field.program_metrics, stop, now=lambda: 7)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=program)
    thread.start()
    try:
        field.until(lambda: bool(failures) or len(field.weights()) > versions)
    finally:
        stop.set()
        thread.join()
        engine.close()
    assert not failures, failures


@needs_swift
def test_a_run_publishes_the_same_events_and_goes_on_bit_for_bit(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run is stopped after its first step: another process begins with the files and the checkpoint."""
    monkeypatch.setattr("tests.trainer.field.PATIENCE_SECONDS", 300.0)
    runs: list[Field] = []
    for stops in ((3,), (2, 3)):
        field = Field(tmp_path / f"{len(stops)}", steps=2)
        demonstrate(field, tokenizer)
        for index in range(2):
            cut(field, tokenizer, index, 1 + index)
        for version in stops:
            field.run = msgspec.structs.replace(
                field.run, job=msgspec.structs.replace(field.run.job, steps=version - 1)
            )
            run_with(field, SWIFT, version)
        runs.append(field)
    digests = [[[f.sha256 for f in (*w.files, *w.checkpoint)] for w in field.weights()] for field in runs]
    assert digests[0] == digests[1]
    assert [(step.kind, step.new_version) for step in runs[0].steps()] == [
        ("initial", 0),
        ("sft", 1),
        ("grpo", 2),
        ("grpo", 3),
    ]
    assert {w.kind for w in runs[0].weights()} == {"lora"}
    assert runs[0].steps()[-1].metrics["trajectories"] == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "icepop"}, "mode icepop"),
        ({"aggregation": "sequence_mean"}, "aggregation sequence_mean"),
        ({"reference_weight": 0.1}, "reference_weight"),
        ({"rejection_low": 0.5}, "rejection_low"),
    ],
)
def test_a_rule_that_ms_swift_has_not_is_refused(changes: dict[str, object], reason: str) -> None:
    rules = msgspec.structs.replace(GrpoSettings(), **changes)
    assert reason in str(unsupported(TrainerSettings(grpo=rules)))
    assert unsupported(TrainerSettings()) is None
    assert "device and precision" in str(unsupported(TrainerSettings(precision="bfloat16")))


def test_without_ms_swift_the_engine_says_what_to_do(tmp_path: Path) -> None:
    engine = ApartEngine(TrainerSettings(swift=SwiftSettings(libraries=str(tmp_path))), 0, tmp_path)
    with pytest.raises(BadInput, match=r"needs ms-swift 4\.6 .* run `make setup`"):
        engine.load({}, {})
    engine._child._process.kill()  # type: ignore[union-attr]
    with pytest.raises(EngineDied, match="ended with code -9"):
        engine.probe([1, 2])
