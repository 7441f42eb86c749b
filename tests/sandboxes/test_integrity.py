"""Reward integrity in short: `python -m tests.sandboxes.integrity` plays 10,000 episodes."""

import msgspec
import pytest

from replayground.sandboxes.backends import lacking
from replayground.sandboxes.tools.registry import SHIPPED
from tests.sandboxes.integrity import HONEST_SQL, Episodes, called, opened

SEED = 20_000


@pytest.mark.parametrize(("isolation", "episodes"), [("bubblewrap", 25), ("gvisor", 6)])
async def test_no_program_gains_what_its_visible_actions_would_not_give(isolation: str, episodes: int) -> None:
    if reason := lacking(isolation):
        pytest.skip(reason)
    async with opened(isolation) as judge:
        for seed in range(SEED, SEED + episodes):
            await judge.judge(Episodes(seed).texts(), seed)
    assert judge.figures.violations == []
    assert judge.figures.episodes == episodes
    assert judge.figures.compared > 0
    assert judge.figures.errors["agent"] > 0


async def test_a_world_that_the_agent_can_change_is_noticed() -> None:
    """The control: the tool `sql` in the sandbox of the agent's code."""
    if reason := lacking("bubblewrap"):
        pytest.skip(reason)
    change = "import sqlite3; c = sqlite3.connect('world.sqlite'); c.execute('update items set price = 1'); c.commit()"
    look = called("sql", query=HONEST_SQL[0])
    texts = [
        called("python", code="6 * 7"),
        *[look] * 4,
        called("python", code=change),
        *[look] * 4,
        "<answer>1</answer>",
    ]
    async with opened(tools={"sql": msgspec.structs.replace(SHIPPED["sql"], apart=False)}) as judge:
        await judge.judge(texts, SEED)
    assert any("was answered '1', not '685'" in violation for violation in judge.figures.violations)
