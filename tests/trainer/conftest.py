"""What the trainer's tests share: a model made from nothing for the Stockroom, and its tokenizer."""

import pytest
import torch
from tokenizers import Tokenizer

from replayground.trainer.base_model import make_model
from replayground.trainer.config import ModelSettings
from tests.trainer.episodes import stockroom
from tests.trainer.field import Field, everything

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_files() -> dict[str, bytes]:
    return make_model(ModelSettings(), stockroom(), seed=0)


@pytest.fixture(scope="session")
def tokenizer(model_files: dict[str, bytes]) -> Tokenizer:
    return Tokenizer.from_str(model_files["tokenizer.json"].decode())


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Digests of a run of tests.trainer.field without any trouble."""
    field = Field(tmp_path_factory.mktemp("uninterrupted"))
    everything(field, tokenizer)
    with field.training():
        field.until_version(4)
    return field.digests()
