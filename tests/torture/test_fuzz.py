"""Short form of the fuzz; `make torture` runs 200,000 mutations on every topic."""

import pytest

from tests.torture.fuzz import fuzz
from tests.torture.fuzz_programs import PROGRAMS


@pytest.mark.parametrize("seed", range(3))
def test_bad_messages_neither_block_nor_vanish(seed: int) -> None:
    fuzzed = fuzz(500, seed)
    assert fuzzed.holds, fuzzed


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_is_led_astray(program: str) -> None:
    assert PROGRAMS[program](200, 1) >= 200
