"""The default job: balanced, reproducible, and as hard as docs/default_job.md says, which is measured by playing it."""

import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import islice, product
from statistics import mean
from typing import Literal

import pytest

from replayground.producers import stockroom
from replayground.producers.stockroom import ATTRIBUTES, ITEMS, RIGHT_SOURCE, held_out, tasks
from replayground.sandboxes.worlds.world import world_from_json
from replayground.schemas.events import Task
from replayground.schemas.formats import FinalAnswer, ToolCall, parse
from replayground.schemas.job import load_job
from tests.producers.pure_room import TURNS_MAX, Player, play

ROLLOUTS = 4500
BUSY, STALE = (Fraction(str(share)) for share in (stockroom.BUSY_SHARE, stockroom.STALE_SHARE))


@cache
def sample(split: str) -> list[Task]:
    return list(islice(tasks(split, 0), ROLLOUTS))


def reward(player: Player, split: str = "heldout") -> float:
    return mean(play(task, player, seed) for seed, task in enumerate(sample(split)))


def agent_that(
    *, calculates: bool = True, looks: bool = True, knows: bool = True, retries: bool = True, switches: bool = True
) -> Player:
    """The best play there is with these abilities."""

    def player(task: Task, turns: list[tuple[str, str]], seed: int) -> str:
        said, observed = turns[-1] if turns else ("", "")
        if task.tags["kind"] == "calc":
            expression = stockroom._expression(task.prompt)
            return f"<answer>{observed}</answer>" if turns or not calculates else stockroom._python(expression)
        if not looks:
            return f"<answer>{random.Random(seed).randint(100, 999)}</answer>"
        if not turns or observed.startswith("error"):
            return _look(task, turns, seed)
        if '"python"' in said or task.tags["kind"] == "look":
            return f"<answer>{observed}</answer>"
        times, plus = stockroom._found(stockroom._TIMES_PATTERN, task.prompt)
        return stockroom._python(f"{observed}*{times}+{plus}") if calculates else "<answer>0</answer>"

    def _look(task: Task, turns: list[tuple[str, str]], seed: int) -> str:
        item, attribute = task.tags["item"], task.tags["attribute"]
        observed = turns[-1][1] if turns else ""
        if (observed == "error: busy" and not retries) or (observed == "error: not found" and not switches):
            return "<answer>unknown</answer>"
        source = RIGHT_SOURCE[attribute] if knows else random.Random(seed).choice(("sql", "kv"))
        missing = sum(1 for _, seen in turns if seen == "error: not found")
        if missing and not knows:
            source = {"sql": "kv", "kv": "sql"}[source]
        return stockroom._sql(item, attribute) if source == "sql" else stockroom._kv(item, attribute)

    return player


@pytest.mark.parametrize(
    ("player", "ceiling"),
    [
        (agent_that(), 0.9998),
        (agent_that(knows=False), 0.865),
        (agent_that(retries=False), 0.90),
        (agent_that(knows=False, switches=False), 0.70),
        (agent_that(looks=False), 0.333),
        (agent_that(calculates=False), 0.333),
    ],
)
def test_ceilings_are_those_of_the_recipe(player: Player, ceiling: float) -> None:
    assert reward(player) == pytest.approx(ceiling, abs=0.012)


def test_no_play_without_knowing_the_sources_is_better_than_the_stated_ceiling() -> None:
    """Every look-up and every answer there is, weighed exactly: six turns, of which lookcalc needs one for python."""
    pairs = [best_of(stale, looks) for stale in (True, False) for looks in (TURNS_MAX - 1, TURNS_MAX - 2)]
    assert float(1 + sum(pairs) / 2) / 3 == pytest.approx(0.8654, abs=5e-5)
    assert f"{float(1 + sum(pairs) / 2) / 3:.3f}" == "0.865"


type Sight = int | Literal["not found", "unseen"]
type Seen = tuple[Sight, Sight]


def best_of(stale: bool, looks: int) -> Fraction:
    """Probability that the best play answers right, for an attribute of which both sources have a value (`stale`) or
    one has. It knows everything but which source is right."""
    # What sql and kv say, and which of them is right. Two numbers suffice: the agent can only tell whether they differ.
    shares: dict[tuple[Seen, int], Fraction] = {}
    for right, value, same in product((0, 1), (0, 1), (False, True)):
        other: Sight = (value if same else 1 - value) if stale else "not found"
        said = (value, other) if right == 0 else (other, value)
        share = Fraction(1, 4) * (1 - STALE if same else STALE)
        shares[said, right] = shares.get((said, right), Fraction(0)) + share

    def left(seen: Seen) -> dict[tuple[Seen, int], Fraction]:
        fits = {w: s for w, s in shares.items() if all(a in ("unseen", b) for a, b in zip(seen, w[0], strict=True))}
        return {world: share / sum(fits.values()) for world, share in fits.items()}

    @cache
    def best(looks: int, seen: Seen) -> Fraction:
        worlds = left(seen)
        answers = [
            sum((share for (said, right), share in worlds.items() if said[right] == value), Fraction(0))
            for value in seen
            if isinstance(value, int)
        ]
        asked = [ask(looks, seen, source) for source in (0, 1)] if looks else []
        return max([*answers, *asked, Fraction(0)])

    def ask(looks: int, seen: Seen, source: int) -> Fraction:
        found = Fraction(0)
        for (said, _), share in left(seen).items():
            after = (said[0], seen[1]) if source == 0 else (seen[0], said[1])
            found += share * best(looks - 1, after)
        return BUSY * best(looks - 1, seen) + (1 - BUSY) * found

    return best(looks, ("unseen", "unseen"))


def test_stale_values_are_in_the_world_so_no_way_of_asking_finds_the_right_one() -> None:
    """`select *`, another spelling, or asking twice would get around a rule that matches the words of a query."""
    stale: Counter[str] = Counter()
    seen = 0
    for task in islice(tasks("train", 5), ROLLOUTS):
        if task.tags["kind"] == "calc":
            continue
        world = world_from_json(task.world)
        assert [rule.kind for rule in world.perturbations] == ["busy"]
        for name, *cells in world.tables["items"].rows:
            row = dict(zip(ATTRIBUTES, cells, strict=True))
            assert row["orders"] is None
            assert f"{name}.weight" not in world.keys
            assert all(100 <= int(str(value)) <= 999 for value in (row["stock"], world.keys[f"{name}.price"]))
            stale["price"] += row["price"] != world.keys[f"{name}.price"]
            stale["stock"] += row["stock"] != world.keys[f"{name}.stock"]
            seen += 1
    assert stale["price"] / seen == pytest.approx(stockroom.STALE_SHARE, abs=0.01)
    assert stale["stock"] / seen == pytest.approx(stockroom.STALE_SHARE, abs=0.01)


def test_the_teacher_is_weak() -> None:
    assert reward(stockroom.demonstrate, "train") == pytest.approx(0.41, abs=0.02)


def test_the_teacher_takes_the_right_source_more_often_for_every_attribute() -> None:
    """Else the choice cannot be learned per attribute and practice plateaus (docs/default_job.md)."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for seed, task in enumerate(islice(tasks("train", 1), ROLLOUTS)):
        if task.tags["kind"] != "calc":
            said = parse(stockroom.demonstrate(task, [], seed))
            assert isinstance(said, ToolCall)
            asked[task.tags["attribute"]] += 1
            right[task.tags["attribute"]] += said.tool == RIGHT_SOURCE[task.tags["attribute"]]
    for attribute in ATTRIBUTES:
        assert right[attribute] / asked[attribute] == pytest.approx(0.6, abs=0.05)


def test_the_teacher_says_the_same_twice() -> None:
    for seed, task in enumerate(islice(tasks("train", 2), 50)):
        assert stockroom.demonstrate(task, [], seed) == stockroom.demonstrate(task, [], seed)
        assert isinstance(parse(stockroom.demonstrate(task, [], seed)), ToolCall | FinalAnswer)


def test_kinds_and_sources_are_balanced() -> None:
    balanced = list(islice(tasks("train", 0), 1200))
    assert Counter(task.tags["kind"] for task in balanced) == {"calc": 400, "look": 400, "lookcalc": 400}
    assert set(Counter(task.tags.get("attribute") for task in balanced).values()) == {200, 400}
    assert sum(RIGHT_SOURCE[attribute] == "sql" for attribute in ATTRIBUTES) == 2


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_held_out_pairs_are_never_trained_on(split: str) -> None:
    for task in islice(tasks(split, 3), 600):
        if task.tags["kind"] != "calc":
            pair = ITEMS.index(task.tags["item"]), ATTRIBUTES.index(task.tags["attribute"])
            assert held_out(*pair) == (split == "heldout")
    assert len(set(ITEMS)) == 24
    assert sum(held_out(i, j) for i in range(24) for j in range(4)) == 24


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    first, again, other = (list(islice(tasks("train", seed), 30)) for seed in (7, 7, 8))
    assert first == again
    assert all(one.prompt != two.prompt or one.world != two.world for one, two in zip(first, other, strict=True))


def test_the_truth_is_nowhere_the_policy_reads() -> None:
    for task in islice(tasks("train", 4), 300):
        assert task.reference is not None
        assert task.reference not in task.prompt
        assert task.reference not in stockroom.SYSTEM_PROMPT
        world = world_from_json(task.world)
        assert not world.files
        if task.tags["kind"] == "calc":
            assert not world.tables
            assert not world.keys
        assert len(task.world) < 1300, "worlds are most of the topic of tasks"


def test_it_loads_as_a_job_and_its_texts_end() -> None:
    job = load_job("replayground.producers.stockroom")
    assert job.demonstrate is not None
    assert job.texts is not None
    texts = list(job.texts(0))
    assert all(any(piece in text for text in texts) for piece in stockroom.SCAFFOLD)


@pytest.mark.parametrize("start", [0, 1, 5, 8190, 8192, 8200, 8445, 8448, 9000])
def test_a_start_gives_the_same_tasks_as_counting_up_to_it(start: int) -> None:
    assert list(islice(stockroom.tasks("train", 3, start), 5)) == list(
        islice(stockroom.tasks("train", 3), start, start + 5)
    )


def test_a_far_start_does_not_draw_what_is_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    block = stockroom._block

    def counted(split: str, seed: int, number: int) -> Iterator[Task]:
        drawn.append(number)
        return block(split, seed, number)

    monkeypatch.setattr(stockroom, "_block", counted)
    next(stockroom.tasks("train", 0, 10**9))
    assert drawn == [1 + (10**9 - 8192) // 256]
