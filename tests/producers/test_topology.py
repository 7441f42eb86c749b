"""Topologies as data: TOML and Python say the same, and what cannot be played is refused with a reason."""

from pathlib import Path

import pytest

from replayground.producers.agent import Agent, Example, Model, Part
from replayground.producers.topology import AgentCatalog, HandOff, Loop, Parallel, Series, Team, agent_catalog_of
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Task
from replayground.schemas.job import load_job

TOML = """
[models.big]
servers = ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
served_name = "big-model"
key_variable = "BIG_KEY"

[agents.lead]
tools = []
turns_max = 5
teacher = "big"
parts = [{ name = "role", text = "You lead." }, { name = "tools", source = "tools" }]

[agents.solver]
format = "llama"
temperature = 0.5
[[agents.solver.parts]]
name = "examples"
source = "examples"
examples = [{ task = "1+1?", turns = ["<answer>2</answer>"] }]

[agents.critic]
model = "big"
plain_answers = true

[topologies.draft]
kind = "loop"
body = "solver"
judge = "critic"
rounds_max = 2

[topologies.team]
kind = "team"
leader = "lead"
workers = ["draft"]

[topologies.row]
kind = "series"
steps = ["solver", "critic"]

[topologies.votes]
kind = "parallel"
steps = ["solver", "critic"]

[topologies.desk]
kind = "hand_off"
agents = ["lead", "critic"]
"""

ENTRIES = [
    Model(
        name="big",
        servers=("http://127.0.0.1:9001", "http://127.0.0.1:9002"),
        served_name="big-model",
        key_variable="BIG_KEY",
    ),
    Agent(
        name="lead",
        tools=(),
        turns_max=5,
        teacher="big",
        parts=(Part(name="role", text="You lead."), Part(name="tools", source="tools")),
    ),
    Agent(
        name="solver",
        format="llama",
        temperature=0.5,
        parts=(
            Part(name="examples", source="examples", examples=(Example(task="1+1?", turns=("<answer>2</answer>",)),)),
        ),
    ),
    Agent(name="critic", model="big", plain_answers=True),
    Loop(name="draft", body="solver", judge="critic", rounds_max=2),
    Team(name="team", leader="lead", workers=("draft",)),
    Series(name="row", steps=("solver", "critic")),
    Parallel(name="votes", steps=("solver", "critic")),
    HandOff(name="desk", agents=("lead", "critic")),
]


def written(folder: Path, text: str) -> Path:
    path = folder / "agents.toml"
    path.write_text(text)
    return path


def task(agent: str) -> Task:
    return Task(
        prompt="?",
        reference=None,
        agent=agent,
        toolset=["python", "kv"],
        world="{}",
        scorers=[],
        group_size=1,
        split="train",
    )


def test_toml_and_python_say_the_same(tmp_path: Path) -> None:
    assert AgentCatalog.from_toml(written(tmp_path, TOML)) == AgentCatalog.of(ENTRIES)


def test_who_begins_who_takes_part_and_what_they_can_do() -> None:
    agent_catalog = AgentCatalog.of(ENTRIES)
    assert [agent_catalog.entry(name) for name in ("critic", "team", "draft", "votes", "desk")] == [
        "critic",
        "lead",
        "solver",
        "solver",
        "lead",
    ]
    assert agent_catalog.members("team") == ["lead", "solver", "critic"]
    assert agent_catalog.tools_of(task("team")) == ("python", "kv")
    assert agent_catalog.tools_of(task("lead")) == ()
    assert agent_catalog.tools_of(task("nobody of the cast")) == ("python", "kv")
    (ask,) = agent_catalog.peer_tools("team", "lead").values()
    assert (ask.name, ask.parameters["properties"]["agent"]["enum"]) == ("ask", ["draft"])
    assert agent_catalog.peer_tools("team", "solver") == {}
    assert agent_catalog.peer_tools("lead", "lead") == {}
    (over,) = agent_catalog.peer_tools("desk", "critic").values()
    assert (over.name, over.parameters["properties"]["agent"]["enum"]) == ("hand_off", ["lead"])


A, B, C = (Agent(name=name) for name in "abc")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ((A, A), "two entries called 'a'"),
        ((A, "b"), "holds str"),
        ((A, Series(name="a", steps=("a",))), "two entries"),
        ((A, Series(name="s", steps=())), "no members"),
        ((A, Series(name="s", steps=("a", "x"))), "names 'x', which is none of a, s"),
        ((A, Series(name="s", steps=("t",)), Series(name="t", steps=("a", "s"))), "cycle: s > t > s"),
        ((A, B, Series(name="s", steps=("a",)), Parallel(name="p", steps=("a", "s"))), "two branches at once"),
        ((A, B, Loop(name="l", body="a", judge="b", rounds_max=0)), "at least 1"),
        ((A, B, Series(name="s", steps=("a",)), HandOff(name="h", agents=("b", "s"))), "agents only"),
        ((A, B, Series(name="s", steps=("a",)), Team(name="t", leader="s", workers=("b",))), "must be an agent"),
        ((A, Team(name="t", leader="a", workers=())), "no workers"),
        ((A, B, Series(name="s", steps=("b", "a")), Team(name="t", leader="a", workers=("s",))), "wait for itself"),
        ((Agent(name="a", model="big"),), "names the model 'big', which is none of policy"),
        ((Agent(name="a", teacher="big"),), "names the model 'big'"),
        ((Model(name="m", servers=(), served_name="m"),), "no servers"),
    ],
)
def test_a_cast_that_cannot_play_is_refused(entries: tuple[object, ...], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        AgentCatalog.of(entries)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[agents\n", r"agents\.toml: .*line 1"),
        ("[agents.a]\nturn_max = 3", r"unknown field `turn_max` - at `\$\.agents"),
        ("[agents.a]\nturns_max = 'three'", "Expected `int"),
        ("[topologies.t]\nkind = 'circus'", "circus"),
        ("[people.a]", "unknown field `people`"),
        ("agents = 3", "Expected `object`"),
        ("[agents]\na = 3", "Expected `object`"),
        ("[topologies.t]\nkind = 'team'\nleader = 'a'\nworkers = ['b']", r"agents\.toml: topology 't' names 'a'"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        AgentCatalog.from_toml(written(tmp_path, text))


def test_a_file_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        AgentCatalog.from_toml(tmp_path / "none.toml")


def test_the_cast_of_a_run_is_of_the_file_or_of_the_job(tmp_path: Path) -> None:
    job = load_job("replayground.producers.stockroom")
    assert agent_catalog_of(job, None) == AgentCatalog()
    assert agent_catalog_of(job, str(written(tmp_path, TOML))) == AgentCatalog.of(ENTRIES)
    with pytest.raises(BadInput, match="agent 'a': there is no tool 'telepathy'"):
        agent_catalog_of(job, str(written(tmp_path, "[agents.a]\ntools = ['telepathy']")))
