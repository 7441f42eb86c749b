"""Short form of the fuzz; `make torture` runs 200,000 mutations on every topic."""

from pathlib import Path

import pytest

from replayground.schemas.run import Run
from tests.torture.fuzz import fuzz
from tests.torture.fuzz_broker import fuzz_on_broker
from tests.torture.fuzz_programs import PROGRAMS
from tests.torture.own_broker import own_broker


@pytest.mark.parametrize("seed", range(3))
def test_bad_messages_neither_block_nor_vanish(seed: int) -> None:
    fuzzed = fuzz(500, seed)
    assert fuzzed.holds, fuzzed


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_is_led_astray(program: str) -> None:
    assert PROGRAMS[program](200, 1) >= 200


def test_programs_on_a_broker_read_on_between_rubbish(kafka_run: Run, tmp_path: Path) -> None:
    with own_broker(tmp_path / "broker", kafka_run) as (_, run):
        fuzzed = fuzz_on_broker(run, tmp_path, mutated_per_topic=1000, seed=1)
    assert fuzzed.holds, fuzzed
