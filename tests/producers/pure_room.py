"""The Stockroom without a sandbox: tools as pure functions under the real rules of perturbation, to play by brute force."""

import re
from collections.abc import Callable
from typing import Any

from replayground.sandboxes.worlds import perturbations
from replayground.sandboxes.worlds.world import World, world_from_json
from replayground.schemas.events import Task
from replayground.schemas.formats import FinalAnswer, ToolCall, parse

TURNS_MAX = 6
type Player = Callable[[Task, list[tuple[str, str]], int], str]

_QUERY = re.compile(r"select (\w+) from items where name = '(\w+)'")


def play(task: Task, player: Player, seed: int) -> float:
    """The reward of one rollout of a player that says (task, (said, observed) so far, seed) -> next turn."""
    room = world_from_json(task.world)
    turns: list[tuple[str, str]] = []
    while len(turns) < TURNS_MAX:
        text = player(task, turns, seed)
        said = parse(text)
        if isinstance(said, FinalAnswer):
            return float(said.text == task.reference)
        assert isinstance(said, ToolCall), text
        turns.append((text, observed(room, said, seed, len(turns))))
    return 0.0


def observed(room: World, call: ToolCall, seed: int, index: int) -> str:
    trouble = perturbations.draw_perturbation(room.perturbations, seed, index, call.tool, call.arguments)
    if trouble.is_busy:
        return perturbations.BUSY_CONTENT
    content = _answer(room, call.tool, call.arguments)
    return content if content.startswith("error") else perturbations.change(trouble, content, 0).content


def _answer(room: World, tool: str, arguments: dict[str, Any]) -> str:
    if tool == "python":
        assert re.fullmatch(r"[\d*+-]+", arguments["code"])
        return str(eval(arguments["code"]))  # nothing but digits and signs, as asserted
    if tool == "kv":
        return str(room.keys.get(arguments["key"], "error: not found"))
    found = _QUERY.fullmatch(arguments["query"])
    assert found is not None
    table = room.tables["items"]
    column = table.columns.index(found.group(1))
    values = [row[column] for row in table.rows if row[0] == found.group(2)]
    return "error: not found" if values in ([], [None]) else str(values[0])
