"""The comparison of trainers: that its batches are what it says, and that trainers which compute something else are noticed.
The comparison itself starts them: `python -m bench trainer --quick`."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from bench.trainer import _figures, _Trainer
from bench.trainer_batches import STOCKROOM, drawn_batch
from bench.trainer_steps import Taken, _collected, read_batch, write_batch
from replayground.schemas.packed import unpack_tokens
from replayground.trainer.batch import episodes_of

SHAPE = replace(STOCKROOM, groups=3)


def test_a_batch_is_the_same_each_time_and_every_group_teaches(tmp_path: Path) -> None:
    batch = drawn_batch(SHAPE, 457, 4)
    assert batch == drawn_batch(SHAPE, 457, 4)
    assert batch.trajectories != drawn_batch(SHAPE, 457, 5).trajectories
    write_batch(tmp_path, 4, batch)
    assert msgspec.to_builtins(read_batch(tmp_path, 4)) == msgspec.to_builtins(batch)
    for start in range(0, 24, 8):
        group = batch.advantages[start : start + 8]
        assert sum(group) == pytest.approx(0.0)
        assert max(group) - min(group) == 1.0


def test_members_share_their_prompt_and_nothing_after_it() -> None:
    batch = drawn_batch(SHAPE, 457, 0)
    prompt = SHAPE.system_tokens + SHAPE.prompt_tokens
    sequences = [unpack_tokens(event.tokens) for event in batch.trajectories]
    assert len({tuple(sequence[: SHAPE.system_tokens]) for sequence in sequences}) == 1
    assert len({tuple(sequence[:prompt]) for sequence in sequences}) == SHAPE.groups
    assert all(left[prompt:] != right[prompt:] for left, right in pairwise(sequences))
    for event in batch.trajectories:
        (episode,) = episodes_of(event, 457)
        assert not episode.sampled[:prompt].any()
        assert episode.sampled[prompt]


def test_a_peer_gets_the_same_tokens() -> None:
    batch = drawn_batch(SHAPE, 457, 0)
    rows = _collected(batch)
    for number, event in enumerate(batch.trajectories):
        assert rows["prompt_ids"][number] + rows["completion_ids"][number] == list(unpack_tokens(event.tokens))
        assert sum(rows["env_mask"][number]) == event.tokens_sampled
    assert rows["rewarded"] == batch.rewards


def trainer(name: str, seconds: float, loss: float = 0.5, norm: float = 2.0) -> _Trainer:
    nothing = cast("Any", None)
    made = _Trainer(name, Path(), nothing, nothing, Taken(0, resident_bytes=100))
    made.taken = [Taken(step, seconds, seconds / 2, loss, norm, 100 + int(100 * seconds)) for step in range(1, 5)]
    return made


def test_ratios_are_of_the_same_batches_and_of_the_peaks() -> None:
    found = _figures([trainer("ours", 1.0), trainer("trl", 3.0, loss=0.5 + 5e-7)], [10, 20])
    assert {name: figure.median for name, figure in found.items()} == {
        "grpo_step_to_trl": 3.0,
        "grpo_step_to_trl_processor": 3.0,
        "grpo_memory_to_trl": 0.5,
        "grpo_memory_of_steps_to_trl": pytest.approx(1 / 3),
        "grpo_tokens_per_second": 15.0,
        "grpo_loss_gap": pytest.approx(5e-7),
    }


@pytest.mark.parametrize(("loss", "norm"), [(0.5 + 2e-6, 2.0), (0.5, 2.01)])
def test_a_trainer_that_computes_something_else_is_noticed(loss: float, norm: float) -> None:
    with pytest.raises(AssertionError, match=r"^trl has a? ?(loss|gradient)"):
        _figures([trainer("ours", 1.0), trainer("trl", 3.0, loss, norm)], [10, 20])
