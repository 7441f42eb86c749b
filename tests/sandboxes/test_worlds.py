"""Worlds as data, and the weather around calls."""

import asyncio
import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayground.sandboxes.backends.scripted import ScriptedBackend
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import Arguments
from replayground.sandboxes.tools.registry import toolset
from replayground.sandboxes.workbench import Observation, Workbench
from replayground.sandboxes.worlds.pattern_process import PatternProcess
from replayground.sandboxes.worlds.perturbations import (
    BUSY_CONTENT,
    Rule,
    change,
    draw_perturbation,
    patterns_for,
    searched_text,
    stale,
    uniform,
)
from replayground.sandboxes.worlds.world import Table, World, world_from_json

STOCKROOM_RULES = (
    Rule(kind="busy", tools=("sql", "kv"), probability=0.15),
    Rule(kind="stale", tools=("kv",), probability=0.8, match=r"\.price"),
    Rule(kind="stale", tools=("sql",), probability=0.8, match=r"\bstock\b"),
)
WORLD = World(
    name="stockroom",
    tables={"items": Table(("name", "price", "orders"), (("panel", 685, None),))},
    keys={"panel.stock": 41},
    perturbations=STOCKROOM_RULES,
)


def test_world_survives_json() -> None:
    again = world_from_json(WORLD.to_json())
    assert again == WORLD
    assert again.world_hash == WORLD.world_hash
    assert msgspec.structs.replace(WORLD, name="other").world_hash != WORLD.world_hash


def test_plain_json_is_a_world() -> None:
    text = """{"name": "w", "tables": {"items": {"columns": ["name", "orders"], "rows": [["panel", null]]}},
    "keys": {"panel.stock": "41"}, "perturbations": [{"kind": "busy", "tools": ["sql", "kv"], "probability": 0.15}]}"""
    assert world_from_json(text).perturbations == (STOCKROOM_RULES[0],)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "w", "keys": {"../x": 1}}',
        '{"name": "w", "files": {"../x": "y"}}',
        '{"name": "w", "tables": {"t": {"columns": ["a"], "rows": [[1, 2]]}}}',
        '{"name": "w", "perturbations": [{"kind": "flood", "tools": []}]}',
        '{"name": "w", "perturbations": [{"kind": "busy", "tools": [], "probability": 2}]}',
        '{"name": "w", "perturbations": [{"kind": "stale", "tools": [], "match": "("}]}',
        '{"name": "w", "perturbations": [{"kind": "pagination", "tools": [], "lines_per_page": 0}]}',
        '{"name": "w", "perturbations": [{"kind": "truncate", "tools": [], "characters_max": -1}]}',
        '{"name": "w", "perturbations": [{"kind": "latency", "tools": [], "milliseconds_max": 1e12}]}',
        '{"name": "w", "perturbations": [{"kind": "partial", "tools": [], "lines_lost_share": -0.1}]}',
    ],
)
def test_impossible_worlds_are_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        world_from_json(text)


@given(st.text(alphabet="0123456789 .|x-", max_size=60), st.integers(0, 2**63))
def test_stale_changes_every_integer_and_no_length(content: str, seed: int) -> None:
    import re

    changed = stale(content, seed, 0, 0)
    assert len(changed) == len(content)
    assert changed == stale(content, seed, 0, 0)
    for old, new in zip(re.findall("[0-9]+", content), re.findall("[0-9]+", changed), strict=True):
        assert old != new
        assert len(old) == len(new)


def test_a_number_that_python_would_not_read_becomes_another_of_its_length() -> None:
    changed = stale("9" * 5000, 1, 0, 0)
    assert changed != "9" * 5000
    assert len(changed) == 5000
    assert changed.isdecimal()


def test_rates_are_as_asked_and_draws_are_independent() -> None:
    calls = 4000
    drawn = [draw_perturbation(STOCKROOM_RULES, seed, 0, "kv", {r"\.price"}) for seed in range(calls)]
    busy = sum(trouble.is_busy for trouble in drawn) / calls
    stale_share = sum(any(index == 1 for index, _ in trouble.applying) for trouble in drawn) / calls
    both = sum(len(trouble.applying) == 2 for trouble in drawn) / calls
    assert abs(busy - 0.15) < 0.025
    assert abs(stale_share - 0.8) < 0.03
    assert abs(both - 0.12) < 0.025


def test_match_and_tools_choose() -> None:
    always = (Rule(kind="stale", tools=("sql",), match=r"\bstock\b"),)
    assert patterns_for(always, "sql") == [r"\bstock\b"]
    assert patterns_for(always, "kv") == []
    assert draw_perturbation(always, 1, 0, "sql", {r"\bstock\b"}).applying
    assert not draw_perturbation(always, 1, 0, "sql", set()).applying
    assert not draw_perturbation(always, 1, 0, "kv", {r"\bstock\b"}).applying


async def test_patterns_are_searched_in_the_arguments() -> None:
    process = PatternProcess()
    try:
        assert await process.found([r"\bstock\b"], searched_text({"query": "select stock from items"}))
        assert not await process.found([r"\bstock\b"], searched_text({"query": "select stocks from items"}))
        # Half a surrogate pair is refused before; a zero byte and a line end are not.
        assert await process.found(["é.*b"], searched_text({"query": "é\0\n ab"}))
    finally:
        await process.close()


async def test_arguments_keep_no_worker_busy_and_avoid_no_fault() -> None:
    """`a.*b` is quadratic: in 400,000 a's it took a minute on the event loop, and hours in as many as arguments may have."""
    rule = Rule(kind="busy", tools=("kv",), match="a.*b")
    world = World(name="w", keys={"x": "1"}, perturbations=(rule,))
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.01)

    backend = ScriptedBackend({"kv": lambda arguments: "1", "set_up_world": lambda arguments: ""})
    async with Pool(backend, size=1) as pool, Workbench(pool, toolset(["kv"]), world, seed=1, owner="o") as bench:
        beating = asyncio.create_task(beat())
        observation = await bench.call("kv", {"key": "a" * 400_000})
        beating.cancel()
        assert observation.content == BUSY_CONTENT
        # The loop went on meanwhile, which a search in it would not have let it.
        assert beats > 3
        # The process was ended; the next call has another.
        assert (await bench.call("kv", {"key": "x"})).content == "1"


def test_other_rules_do_not_move_a_draw() -> None:
    one = (Rule(kind="busy", tools=("sql",), probability=0.5),)
    two = (*one, Rule(kind="stale", tools=("sql",), probability=0.5))
    for seed in range(50):
        alone = draw_perturbation(one, seed, 3, "sql").is_busy
        assert draw_perturbation(two, seed, 3, "sql").is_busy == alone


def test_truncate_pagination_partial() -> None:
    lines = "\n".join(f"row {n}" for n in range(5))
    truncate = draw_perturbation((Rule(kind="truncate", tools=("sql",), characters_max=7),), 1, 0, "sql")
    assert change(truncate, lines, 0).content == "row 0\nr"
    pages = draw_perturbation((Rule(kind="pagination", tools=("sql",), lines_per_page=2),), 1, 0, "sql")
    assert change(pages, lines, 0).content == "row 0\nrow 1\n[page 1 of 3; call again for the next]"
    assert change(pages, lines, 2).content == "row 4\n[page 3 of 3; call again for the next]"
    assert change(pages, lines, 3).content.startswith("row 0")
    partial = draw_perturbation((Rule(kind="partial", tools=("sql",)),), 1, 0, "sql")
    kept = change(partial, lines, 0).content.split("\n")
    assert set(kept) < set(lines.split("\n"))


async def observe(seed: int, rules: tuple[Rule, ...], calls: int, answer: str = "685") -> list[Observation]:
    def look_up(arguments: Arguments) -> str:
        return answer

    backend = ScriptedBackend({"kv": look_up, "set_up_world": lambda arguments: ""})
    world = msgspec.structs.replace(WORLD, perturbations=rules)
    async with (
        Pool(backend, size=1) as pool,
        Workbench(pool, toolset(["kv"]), world, seed=seed, owner="test") as bench,
    ):
        made = [await bench.call("kv", {"key": "panel.price"}) for _ in range(calls)]
        return [msgspec.structs.replace(observation, milliseconds=0.0) for observation in made]


async def test_same_seed_same_weather() -> None:
    assert await observe(7, STOCKROOM_RULES, 20) == await observe(7, STOCKROOM_RULES, 20)
    assert await observe(7, STOCKROOM_RULES, 20) != await observe(8, STOCKROOM_RULES, 20)


async def test_perturbation_is_recorded_with_its_original() -> None:
    (busy,) = await observe(1, (Rule(kind="busy", tools=("kv",)),), 1)
    assert (busy.content, busy.is_error, busy.error_kind) == ("error: busy", True, "tool")
    assert busy.perturbation == {"applied": [{"rule": 0, "kind": "busy"}], "original": None}
    (changed,) = await observe(1, (Rule(kind="stale", tools=("kv",)),), 1)
    assert changed.content != "685"
    assert (changed.is_error, changed.error_kind) == (False, None)
    assert changed.perturbation == {"applied": [{"rule": 0, "kind": "stale"}], "original": "685"}
    (calm,) = await observe(1, (), 1)
    assert (calm.content, calm.perturbation) == ("685", None)


LINES = "\n".join(f"row {number}" for number in range(8))


@pytest.mark.parametrize(
    ("rule", "shown"),
    [
        (Rule(kind="truncate", tools=("kv",), characters_max=7), "row 0\nr"),
        (
            Rule(kind="pagination", tools=("kv",), lines_per_page=2),
            "row 0\nrow 1\n[page 1 of 4; call again for the next]",
        ),
        (Rule(kind="partial", tools=("kv",), lines_lost_share=1.0), ""),
    ],
)
async def test_what_was_cut_away_is_recorded_with_its_rule_and_original(rule: Rule, shown: str) -> None:
    calm = Rule(kind="stale", tools=("sql",))
    (observation,) = await observe(1, (calm, rule), 1, LINES)
    assert (observation.content, observation.is_error) == (shown, False)
    assert observation.perturbation == {"applied": [{"rule": 1, "kind": rule.kind}], "original": LINES}


async def test_a_rule_that_changed_nothing_is_not_recorded() -> None:
    rules = (Rule(kind="truncate", tools=("kv",), characters_max=7), Rule(kind="pagination", tools=("kv",)))
    (observation,) = await observe(1, rules, 1, "one")
    assert (observation.content, observation.perturbation) == ("one", None)


async def test_rules_apply_in_order_and_all_are_recorded() -> None:
    rules = (
        Rule(kind="stale", tools=("kv",)),
        Rule(kind="latency", tools=("kv",), milliseconds_max=1.0),
        Rule(kind="truncate", tools=("kv",), characters_max=5),
    )
    (observation,) = await observe(1, rules, 1, LINES)
    assert observation.content == stale(LINES, 1, 0, 0)[:5]
    assert observation.perturbation is not None
    kinds = [entry.get("kind") for entry in observation.perturbation["applied"]]
    assert kinds == ["stale", "latency", "truncate", None], "the last entry tells the wait"
    assert observation.perturbation["original"] == LINES


async def test_latency_is_drawn_and_recorded() -> None:
    (slow,) = await observe(1, (Rule(kind="latency", tools=("kv",), milliseconds_max=2.0),), 1)
    assert slow.content == "685"
    assert slow.perturbation is not None
    assert slow.perturbation["applied"][0] == {"rule": 0, "kind": "latency"}
    assert 0 < slow.perturbation["applied"][1]["waited_milliseconds"] <= 2.0


async def test_sandbox_opens_at_the_first_call_that_runs() -> None:
    backend = ScriptedBackend({"kv": lambda arguments: "1", "set_up_world": lambda arguments: ""})
    async with (
        Pool(backend, size=1, warm=0) as pool,
        Workbench(pool, toolset(["kv"]), WORLD, seed=1, owner="test") as bench,
    ):
        await bench.call("nope", {})
        assert (bench.sandbox_id, backend.opened) == (None, [])
        while bench.sandbox_id is None:
            await bench.call("kv", {"key": "panel.stock"})
        assert bench.sandbox_id == backend.opened[0].sandbox_id
        assert bench.isolation == "scripted"


def test_a_draw_is_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest hash, which a float rounds up: a rule of probability 1 must apply to it, too."""

    class Highest:
        def __init__(self, text: bytes) -> None:
            pass

        def digest(self, bytes_count: int) -> bytes:
            return b"\xff" * bytes_count

    monkeypatch.setattr(hashlib, "shake_128", Highest)
    assert uniform(0, 0, 0, "any") < 1.0
    assert draw_perturbation([Rule(kind="busy", tools=("sql",))], 0, 0, "sql", {}).is_busy
