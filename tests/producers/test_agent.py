"""Agents as data: prompts out of parts, in order, and figures of their own in place of the task's."""

from replayground.producers.agent import Agent, Example, Part, only_agent, system_prompt
from replayground.sandboxes.tools.registry import toolset
from replayground.sandboxes.worlds.world import Table, World
from replayground.schemas.events import Sampling
from replayground.schemas.formats import format_named

ROLE = Part(name="role", text="You keep the stock.")
TOOLS = Part(name="tools", source="tools")
NOTES = Part(name="notes", text="What there is:", source="world")
EXAMPLES = Part(name="examples", source="examples", examples=(Example(task="2+2?", turns=("<answer>4</answer>",)),))
WORLD = World(name="w", files={"notes.txt": "secret"}, tables={"prices": Table(("item", "price"), (("panel", 5),))})


def test_parts_are_said_in_their_order() -> None:
    tools = toolset(["python"])
    prompt = system_prompt(Agent(name="a", parts=(ROLE, NOTES, TOOLS, EXAMPLES), format="xml"), tools, WORLD)
    role, notes, listed, examples = prompt.split("\n\n")
    assert role == "You keep the stock."
    assert notes == "What there is:\nFiles: notes.txt\nTables: prices (item, price)"
    assert '"name":"python"' in listed
    assert format_named("xml").right_form in listed
    assert examples == "Example: 2+2?\n<answer>4</answer>"
    turned = system_prompt(Agent(name="a", parts=(EXAMPLES, ROLE)), tools, WORLD)
    assert turned == f"{examples}\n\n{role}"


def test_what_lies_in_files_and_tables_is_not_told() -> None:
    prompt = system_prompt(Agent(name="a", parts=(NOTES,)), {}, WORLD)
    assert "secret" not in prompt
    assert "panel" not in prompt


def test_a_part_with_nothing_to_say_is_left_out() -> None:
    empty = Part(name="world", source="world")
    assert system_prompt(Agent(name="a", parts=(empty, ROLE, TOOLS)), {}, World(name="w")) == ROLE.text


def test_the_only_agent_of_a_job_is_told_its_system_prompt_and_nothing_else() -> None:
    agent = only_agent("stockroom", "Tools: sql kv python")
    assert system_prompt(agent, toolset(["python"]), WORLD) == "Tools: sql kv python"
    assert agent.sampling(Sampling(temperature=0.3)) == Sampling(temperature=0.3)
    assert not agent.shows_right_form


def test_own_figures_take_the_place_of_the_tasks() -> None:
    asked = Sampling(temperature=0.7, turns_max=6, tokens_max=512)
    own = Agent(name="a", temperature=0.0, turns_max=2).sampling(asked)
    assert own == Sampling(temperature=0.0, turns_max=2, tokens_max=512)
