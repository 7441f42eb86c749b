"""An agent as data: its system prompt, its model, its tools and its limits.

    role = Part(name="role", text="You solve sums.")
    Agent(name="solver", parts=(role, Part(name="tools", source="tools")), turns_max=4)

or the same in TOML (producers/topology.py reads such files):

    [agents.solver]
    turns_max = 4
    parts = [{ name = "role", text = "You solve sums." }, { name = "tools", source = "tools" }]
"""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, structs

from replayground.sandboxes.tools.tool import Tool
from replayground.sandboxes.worlds.world import World
from replayground.schemas.events import Sampling
from replayground.schemas.formats import FormatName, format_named

POLICY = "policy"
"Name of the model that is being trained. It runs on the servers of [rollouts] servers."


class Example(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task and the turns of a good solution, for few-shot prompting."""

    task: str
    turns: tuple[str, ...]


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named part of the system prompt. A part that renders to an empty text is left out."""

    name: str
    text: str = ""
    "comes first, whatever the source"
    source: Literal["text", "tools", "world", "examples"] = "text"
    "what follows the text: nothing, the tools and the call format, the names in the world, or the examples"
    examples: tuple[Example, ...] = ()


class Agent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent. Fields that are None come from the task: its toolset, and the sampling it was submitted with."""

    name: str
    parts: tuple[Part, ...] = ()
    "the system prompt, in this order; if no part has source tools, the chat template lists the tools, if it can"
    tools: tuple[str, ...] | None = None
    "names of its tools; left out = the task's toolset"
    format: FormatName = "hermes"
    "tool-call format (schemas/formats.py)"
    model: str = POLICY
    "the policy that is being trained, or the name of a model in [models]"
    teacher: str | None = None
    "a model of [models] that plays this agent in demonstrations; left out = the job's demonstrate function"
    temperature: float | None = None
    top_p: float | None = None
    max_tokens_per_turn: int | None = None
    turns_max: int | None = None
    "limit on its turns in one rollout, over all messages it receives"
    tokens_max: int | None = None
    "limit on the length of its context"
    plain_answers: bool = False
    "a turn without a call and without <answer> counts as its final answer, instead of as an agent_error"
    shows_right_form: bool = True
    "an error about a malformed call includes the right form of a call"

    def sampling(self, asked: Sampling) -> Sampling:
        """The requested sampling, with this agent's own values where it sets them."""
        # Agent names these fields as Sampling does. A new field of Sampling needs one here, or this raises.
        own = {field: getattr(self, field) for field in Sampling.__struct_fields__}
        return structs.replace(asked, **{field: value for field, value in own.items() if value is not None})

    @property
    def lists_tools(self) -> bool:
        return any(part.source == "tools" for part in self.parts)


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model behind one or more servers with OpenAI's /v1/chat/completions. It can teach and play, but is never
    trained: its turns come as text, without token ids, log-probabilities or weight versions."""

    name: str
    servers: tuple[str, ...]
    "base URLs, such as http://127.0.0.1:8001; a turn goes to the least loaded one, and to another if that fails"
    served_name: str
    "the model name in requests to its servers"
    key_variable: str | None = None
    "environment variable with the API key of its servers; the key itself is in no file and no event"
    timeout_seconds: float = 120.0
    patience_seconds: float = 60.0
    "how long a turn is retried while every server fails"


def only_agent(name: str, system_prompt: str) -> Agent:
    """The agent of a job that defines no agents."""
    return Agent(name=name, parts=(Part(name="system", text=system_prompt),), shows_right_form=False)


def system_prompt(agent: Agent, tools: Mapping[str, Tool], world: World) -> str:
    """The parts that are not empty, in their order."""
    said = [_render_part(part, agent, tools, world) for part in agent.parts]
    return "\n\n".join(text for text in said if text)


def _render_part(part: Part, agent: Agent, tools: Mapping[str, Tool], world: World) -> str:
    lines = [part.text] if part.text else []
    match part.source:
        # Without tools only the text is rendered: describe([]) would still explain how to call one.
        case "tools" if tools:
            lines.append(format_named(agent.format).describe([tool.specification() for tool in tools.values()]))
        case "world":
            lines += _world_notes(world)
        case "examples":
            lines += [_render_example(example) for example in part.examples]
    return "\n".join(lines)


def _world_notes(world: World) -> list[str]:
    """Names of files, tables and columns. Their contents are left for the agent to find with its tools."""
    tables = [f"{name} ({', '.join(table.columns)})" for name, table in world.tables.items()]
    found = {"Files": list(world.files), "Tables": tables}
    return [f"{what}: {', '.join(names)}" for what, names in found.items() if names]


def _render_example(example: Example) -> str:
    return "\n".join([f"Example: {example.task}", *example.turns])


def peer_tool(name: str, description: str, colleagues: tuple[str, ...]) -> Tool:
    """A tool by which an agent asks or hands off to another. It is listed and called like any other tool, but
    producers/ensemble.py carries it out instead of a sandbox."""
    # The enum makes the schema check refuse agents that are not in this topology.
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
