"""The default job, Stockroom: arithmetic and look-ups in a store room with unreliable sources, fresh values per task.

Three kinds of equal share: calc (arithmetic), look (one look-up) and lookcalc (a look-up, then arithmetic). The policy
has to learn that price and weight are right in sql, stock and orders in kv. The other source is stale four times in
five (price, stock) or has no value (weight, orders), and any look-up may fail as busy. Stale values are part of the
world of a task: all its attempts, and all queries of an attempt, find the same.

Held out: a quarter of the (item, attribute) pairs, never seen in training; for calc, new numbers. docs/default_job.md
has the figures.
"""

import json
import random
import re
from collections.abc import Iterator
from itertools import count, islice

from replayground.sandboxes.worlds.perturbations import Rule
from replayground.sandboxes.worlds.world import Table, World
from replayground.schemas.events import Task

SYSTEM_PROMPT = "Tools: sql kv python"

SCAFFOLD = (
    '{"name": "sql", "arguments": {"query": "select ',
    " from items where name = '",
    "'\"}}",
    '{"name": "kv", "arguments": {"key": "',
    '{"name": "python", "arguments": {"code": "',
    '"}}',
)
"Pieces of JSON that every call repeats. A tokenizer made for this job has one token for each, so that calls are short."

ITEMS = (
    "panel", "valve", "bolt", "cable", "motor", "pump", "filter", "hinge", "lamp", "gear", "spring", "screw",
    "washer", "pipe", "drill", "sensor", "switch", "fuse", "relay", "bracket", "nozzle", "gasket", "clamp", "rotor",
)  # fmt: skip
ATTRIBUTES = ("price", "stock", "weight", "orders")
RIGHT_SOURCE = {"price": "sql", "stock": "kv", "weight": "sql", "orders": "kv"}

# With these shares a policy that does not know the sources scores 0.865 at best (docs/default_job.md).
BUSY_SHARE = 0.15
STALE_SHARE = 0.8
PERTURBATIONS = (Rule(kind="busy", tools=("sql", "kv"), probability=BUSY_SHARE),)

_FIRST_BLOCK_TASKS = 8192
"drawn by one generator, as all tasks were before there were blocks: runs within it keep the tasks they always had"
# `start` draws and drops less than one block, so a restarted feeder need not draw all tasks again (decision 0018).
_BLOCK_TASKS = 256
_EMPTY_ROOM = World(name="empty")
_KINDS = ("calc", "look", "lookcalc")
_CALC_PHRASINGS = ("What is {}?", "Compute {}.", "How much is {}?")
_LOOK_PHRASING = "What is the {attribute} of {item}?"
_LOOKCALC_PHRASING = "Take the {attribute} of {item}, times {times} plus {plus}."
# Of the 24 items, so that worlds stay small: a million tasks are a gigabyte of worlds.
_WORLD_ITEMS = 8
_TEXTS = 2000

_CALC_PATTERN = re.compile(r"\d+[*+]\d+[*+-]\d+")
_TIMES_PATTERN = re.compile(r"times (\d+) plus (\d+)")


def held_out(item: int, attribute: int) -> bool:
    """True for the quarter of the pairs that training never sees: six items of every attribute."""
    return (item + attribute) % 4 == 0


def tasks(split: str, seed: int, start: int = 0) -> Iterator[Task]:
    """Endless, from number `start` on. Kinds and attributes alternate, so that any stretch is balanced. The same seed
    gives the same tasks."""
    for block in count(max(0, 1 + (start - _FIRST_BLOCK_TASKS) // _BLOCK_TASKS)):
        yield from islice(_block(split, seed, block), max(0, start - _numbers(block).start), None)


def _numbers(block: int) -> range:
    if block == 0:
        return range(_FIRST_BLOCK_TASKS)
    first = _FIRST_BLOCK_TASKS + (block - 1) * _BLOCK_TASKS
    return range(first, first + _BLOCK_TASKS)


def _block(split: str, seed: int, block: int) -> Iterator[Task]:
    """The tasks of one block, drawn by a generator of their own, so that no other block has to be drawn before."""
    # Block 0 has the name that the only generator had before there were blocks.
    name = f"stockroom:{split}:{seed}" if block == 0 else f"stockroom:{split}:{seed}:{block}"
    draw = random.Random(name)
    # Of its own: what is asked, and every right value, stay as they were before stale values were part of the world.
    draw_stale = random.Random(f"{name}:stale")
    for number in _numbers(block):
        kind = _KINDS[number % 3]
        # Shifted by kind, so that look and lookcalc go through the attributes at different times.
        attribute = (number // 3 + number % 3) % len(ATTRIBUTES)
        if kind == "calc":
            yield _calc_task(split, draw)
        else:
            yield _look_task(kind, split, attribute, draw, draw_stale)


def demonstrate(task: Task, turns: list[tuple[str, str]], seed: int) -> str:
    """The next turn of a weak teacher: it calculates, retries and picks the right source only some of the time."""
    # Drawn from seed and turn, so that a second attempt at the same request makes the same choices.
    draw = random.Random(f"demonstrate:{seed}:{len(turns)}")
    said, observed = turns[-1] if turns else ("", "")
    if _fails(observed) and draw.random() >= 0.4:
        return _answer("unknown")
    if task.tags["kind"] == "calc":
        return _calculated_or_guessed(task, _expression(task.prompt), observed, draw)
    if not turns or _fails(observed):
        return _look_up(task, draw)
    if '"python"' in said or task.tags["kind"] == "look":
        return _answer(observed)
    times, plus = _found(_TIMES_PATTERN, task.prompt)
    return _calculated_or_guessed(task, f"{observed}*{times}+{plus}", "", draw)


def texts(seed: int) -> Iterator[str]:
    """Texts to fit a tokenizer for this job to: prompts, calls, observations and answers, with random numbers."""
    draw = random.Random(f"texts:{seed}")
    for _, task in zip(range(_TEXTS), tasks("train", seed + 1), strict=False):
        number = str(draw.randint(100, 999))
        parts = [SYSTEM_PROMPT, task.prompt, f"<tool_response>{number}</tool_response>", _answer(number)]
        if task.tags["kind"] == "calc":
            parts.append(_python(_expression(task.prompt)))
        else:
            item, attribute = task.tags["item"], task.tags["attribute"]
            parts += [_sql(item, attribute), _kv(item, attribute), _python(f"{number}*7+12")]
            parts += [_answer("unknown"), "<tool_response>error: busy</tool_response>"]
            parts += ["<tool_response>error: not found</tool_response>"]
        yield from parts


def _calc_task(split: str, draw: random.Random) -> Task:
    a, b, c = draw.randint(2, 999), draw.randint(2, 99), draw.randint(1, 99)
    # No negative results and no 0: they would be another skill to learn.
    if a * b <= c:
        c = draw.randint(1, a * b - 1)
    expression, value = draw.choice(
        ((f"{a}*{b}+{c}", a * b + c), (f"{a}*{b}-{c}", a * b - c), (f"{a}+{b}*{c}", a + b * c))
    )
    prompt = draw.choice(_CALC_PHRASINGS).format(expression)
    return _task(prompt, value, split, _EMPTY_ROOM, {"kind": "calc"})


def _look_task(kind: str, split: str, attribute: int, draw: random.Random, draw_stale: random.Random) -> Task:
    wanted = split == "heldout"
    item = draw.choice([i for i in range(len(ITEMS)) if held_out(i, attribute) == wanted])
    shelf = draw.sample([name for name in ITEMS if name != ITEMS[item]], _WORLD_ITEMS - 1)
    # At a random place: the asked item must not always be the last one.
    shelf.insert(draw.randrange(_WORLD_ITEMS), ITEMS[item])
    values = {name: [draw.randint(100, 999) for _ in ATTRIBUTES] for name in shelf}
    value = values[ITEMS[item]][attribute]
    words = {"item": ITEMS[item], "attribute": ATTRIBUTES[attribute]}
    if kind == "look":
        prompt = _LOOK_PHRASING.format(**words)
    else:
        times, plus = draw.randint(2, 9), draw.randint(1, 99)
        prompt = _LOOKCALC_PHRASING.format(**words, times=times, plus=plus)
        value = value * times + plus
    return _task(prompt, value, split, _world(values, draw_stale), {"kind": kind, **words})


def _world(values: dict[str, list[int]], draw_stale: random.Random) -> World:
    """Both sources hold the same, except that sql has no orders and a stale stock, kv no weight and a stale price."""
    # In the data and not as a perturbation of calls: whatever a query says (`select *`, STOCK, twice the same), it finds
    # the same stale value, so there is no play that finds the right one without knowing the source.
    keys: dict[str, str | int | float] = {}
    rows: list[tuple[str | int | None, ...]] = []
    for name, (price, stock, weight, orders) in values.items():
        rows.append((name, price, _perhaps_stale(stock, draw_stale), weight, None))
        keys |= {f"{name}.price": _perhaps_stale(price, draw_stale), f"{name}.stock": stock, f"{name}.orders": orders}
    tables = {"items": Table(("name", *ATTRIBUTES), tuple(rows))}
    return World(name="stockroom", tables=tables, keys=keys, perturbations=PERTURBATIONS)


def _perhaps_stale(value: int, draw: random.Random) -> int:
    # Any other number of three digits, so that a stale value never is the right one.
    other = draw.randint(100, 998)
    return value if draw.random() >= STALE_SHARE else other + (other >= value)


def _task(prompt: str, value: int, split: str, world: World, tags: dict[str, str]) -> Task:
    return Task(
        prompt=prompt,
        reference=str(value),
        agent="stockroom",
        toolset=["sql", "kv", "python"],
        world=world.to_json(),
        scorers=["exact_match"],
        group_size=1,
        split=split,
        tags=tags,
    )


def _calculated_or_guessed(task: Task, expression: str, result: str, draw: random.Random) -> str:
    if result:
        return _answer(result)
    if draw.random() < 0.4:
        return _python(expression)
    digits = len(task.reference or "0")
    return _answer(str(draw.randint(10 ** (digits - 1), 10**digits - 1)))


def _look_up(task: Task, draw: random.Random) -> str:
    item, attribute = task.tags["item"], task.tags["attribute"]
    right = draw.random() < 0.6
    source = RIGHT_SOURCE[attribute] if right else {"sql": "kv", "kv": "sql"}[RIGHT_SOURCE[attribute]]
    return _sql(item, attribute) if source == "sql" else _kv(item, attribute)


def _fails(observed: str) -> bool:
    return observed.startswith("error")


def _expression(prompt: str) -> str:
    found = _CALC_PATTERN.search(prompt)
    assert found is not None, f"no arithmetic in {prompt!r}"
    return found.group()


def _found(pattern: re.Pattern[str], prompt: str) -> tuple[str, ...]:
    found = pattern.search(prompt)
    assert found is not None, f"nothing of {pattern.pattern} in {prompt!r}"
    return found.groups()


def _call(tool: str, argument: str, value: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': {argument: value}})}</tool_call>"


def _sql(item: str, attribute: str) -> str:
    return _call("sql", "query", f"select {attribute} from items where name = '{item}'")


def _kv(item: str, attribute: str) -> str:
    return _call("kv", "key", f"{item}.{attribute}")


def _python(expression: str) -> str:
    return _call("python", "code", expression)


def _answer(text: str) -> str:
    return f"<answer>{text}</answer>"
