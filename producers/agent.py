"""An agent as data: what it is told, who speaks for it, with which tools, within which limits.

    Agent(name="solver", parts=(Part(name="role", text="You solve sums."), Part(name="tools", source="tools")), turns_max=4)

or the same in TOML (see producers/topology.py for files of them):

    [agents.solver]
    turns_max = 4
    parts = [{ name = "role", text = "You solve sums." }, { name = "tools", source = "tools" }]
"""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, structs

from producers.formats import FormatName, format_named
from sandboxes.tools.tool import Tool
from sandboxes.worlds.world import World
from schemas.events import Sampling

POLICY = "policy"
"The model that is trained, behind the worker's own servers."


class Example(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task and the turns of one who did it well."""

    task: str
    turns: tuple[str, ...]


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named part of the system prompt. A part with nothing to say is left out."""

    name: str
    text: str = ""
    "said first, whatever the source"
    source: Literal["text", "tools", "world", "examples"] = "text"
    "what follows: nothing, the tools and how to call them, what lies in the world, or the examples"
    examples: tuple[Example, ...] = ()


class Agent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent. What is left out comes from the task: its toolset, and the sampling it was submitted with."""

    name: str
    parts: tuple[Part, ...] = ()
    "the system prompt, in this order; tools that no part lists are listed by the model's chat template, if it can"
    tools: tuple[str, ...] | None = None
    "names of its tools; left out = the task's toolset"
    format: FormatName = "hermes"
    "how it writes calls"
    model: str = POLICY
    "who speaks for it: the policy that is trained, or a model named in [models]"
    teacher: str | None = None
    "a model of [models] that speaks for it when a demonstration is asked for; left out = the job's demonstrate"
    temperature: float | None = None
    top_p: float | None = None
    max_tokens_per_turn: int | None = None
    turns_max: int | None = None
    "turns it has in one rollout, however often it is spoken to"
    tokens_max: int | None = None
    "longest context it may have"
    plain_answers: bool = False
    "a turn without a call and without <answer> is its answer, instead of an error"
    shows_right_form: bool = True
    "an error about a malformed call shows how a call is written"

    def sampling(self, asked: Sampling) -> Sampling:
        """What the task asks for, with this agent's own figures in place."""
        own = {field: getattr(self, field) for field in Sampling.__struct_fields__}
        return structs.replace(asked, **{field: value for field, value in own.items() if value is not None})

    @property
    def lists_tools(self) -> bool:
        return any(part.source == "tools" for part in self.parts)


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model behind one or more servers with OpenAI's /v1/chat/completions. It can teach and play, never be trained:
    its turns come as text, without ids, log-probabilities or weight versions."""

    name: str
    servers: tuple[str, ...]
    "base addresses, such as http://127.0.0.1:8001; the least loaded one is asked, and another when it fails"
    served_name: str
    "what its servers call it"
    key_variable: str | None = None
    "environment variable that holds the key for its servers; the key itself stands in no file and no event"
    timeout_seconds: float = 120.0
    patience_seconds: float = 60.0
    "a turn that every server refuses is tried again for so long"


def only_agent(name: str, system_prompt: str) -> Agent:
    """The one agent of a job that defines none."""
    return Agent(name=name, parts=(Part(name="system", text=system_prompt),), shows_right_form=False)


def system_prompt(agent: Agent, tools: Mapping[str, Tool], world: World) -> str:
    """The parts that have something to say, in their order."""
    said = [_render_part(part, agent, tools, world) for part in agent.parts]
    return "\n\n".join(text for text in said if text)


def _render_part(part: Part, agent: Agent, tools: Mapping[str, Tool], world: World) -> str:
    lines = [part.text] if part.text else []
    match part.source:
        case "tools" if tools:
            lines.append(format_named(agent.format).describe([tool.specification() for tool in tools.values()]))
        case "world":
            lines += _world_notes(world)
        case "examples":
            lines += [_render_example(example) for example in part.examples]
    return "\n".join(lines)


def _world_notes(world: World) -> list[str]:
    """Names only: what is in files and tables is for the agent to find out."""
    tables = [f"{name} ({', '.join(table.columns)})" for name, table in world.tables.items()]
    found = {"Files": list(world.files), "Tables": tables}
    return [f"{what}: {', '.join(names)}" for what, names in found.items() if names]


def _render_example(example: Example) -> str:
    return "\n".join([f"Example: {example.task}", *example.turns])


def peer_tool(name: str, description: str, colleagues: tuple[str, ...]) -> Tool:
    """A tool by which an agent speaks to others. It is listed and called like any other, and runs in no sandbox."""
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            "agent": {"type": "string", "enum": list(colleagues), "description": "who"},
            "message": {"type": "string", "description": "all that they need to know"},
        },
        "required": ["agent", "message"],
        "additionalProperties": False,
    }
    return Tool(name=name, description=description, parameters=parameters, source="")
