"""Every tool on real data, through a workbench and a real sandbox where it needs one."""

from collections.abc import AsyncIterator
from typing import Literal

import msgspec
import pytest

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.limits import Limits
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import SandboxUnavailable
from replayground.sandboxes.tools.python import python
from replayground.sandboxes.tools.registry import SHIPPED, toolset
from replayground.sandboxes.tools.schema import complaint
from replayground.sandboxes.tools.sql import sql
from replayground.sandboxes.tools.tool import Tool, ToolError, tool
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.world import WORLD_TOOLS, Table, World
from tests.sandboxes.conftest import Run

WORLD = World(
    name="small",
    files={"notes/readme.txt": "north is up\n"},
    tables={"items": Table(("name", "price", "orders"), (("panel", 685, None), ("valve", 12, None)))},
    keys={"panel.stock": 41, "panel.note": "a b"},
)


@tool
def repeat(
    text: str,
    times: int = 2,
    upper: bool = False,
    tags: list[str] | None = None,
    voice: Literal["soft", "harsh"] | None = None,
) -> str:
    """Say a text several times.

    text: what to say
    voice: how it sounds,
        on a good day
    """
    import json

    if times < 1:
        raise ToolError("times must be at least 1")
    if times > 100:
        raise RuntimeError("a bug of the tool")
    return json.dumps([text.upper() if upper else text] * times + (tags or []))


@pytest.fixture(scope="module")
async def pool() -> AsyncIterator[Pool]:
    backend = BubblewrapBackend(SHIPPED | WORLD_TOOLS | {repeat.name: repeat}, Limits(), first_uid=301_000)
    async with Pool(backend, size=1) as pool:
        yield pool


@pytest.fixture
async def bench(pool: Pool) -> AsyncIterator[Workbench]:
    async with Workbench(
        pool, toolset(["sql", "kv", "python", "repeat"], [repeat]), WORLD, seed=1, owner="test"
    ) as made:
        yield made


@pytest.mark.parametrize(
    ("code", "content"),
    [
        ("503*9+17", "4544"),
        ("print('a'); print('b')", "a\nb\n"),
        ("print('a', end='')\n'b'", "a\n'b'"),
        ("x = 3", ""),
        ("None", ""),
        ("", ""),
        ("# nothing", ""),
        ("import sys; print('oops', file=sys.stderr)", "oops\n"),
        ("import subprocess; subprocess.run(['echo', 'hi']).returncode", "hi\n0"),
        ("'é' + chr(0xD800)", "'é\\ud800'"),
        ("1/0", "error: ZeroDivisionError: division by zero"),
        ("print('before'); 1/0", "before\nerror: ZeroDivisionError: division by zero"),
        ("exit(3)", "error: SystemExit: 3"),
        ("raise KeyboardInterrupt", "error: KeyboardInterrupt"),
        ("open('missing')", "error: FileNotFoundError: [Errno 2] No such file or directory: 'missing'"),
        ("2 +", "error: SyntaxError: invalid syntax\n  line 1: 2 +"),
        ("x = 1\n1/0", "error: ZeroDivisionError: division by zero\n  line 2: 1/0"),
        ("total = 1\ntotl", "error: NameError: name 'totl' is not defined; did you mean 'total'?\n  line 2: totl"),
        (
            "import json\njson.loads('')",
            "error: JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n  line 2: json.loads('')",
        ),
        (
            "class E(Exception):\n  def __str__(self): return 1\nraise E",
            "error: E: (its text cannot be shown)\n  line 3: raise E",
        ),
    ],
)
async def test_python(run: Run, code: str, content: str) -> None:
    assert await run(code) == content


async def test_python_remembers_names_and_functions(run: Run) -> None:
    await run("x = 20\ndef twice(n):\n    return n * 2 + x")
    assert await run("twice(11)") == "42"


async def test_python_error_names_the_lines_of_earlier_cells(run: Run) -> None:
    await run("def twice(n):\n    return n * 2 / 0")
    assert await run("twice(11)") == (
        "error: ZeroDivisionError: division by zero\n  line 1: twice(11)\n  line 2 of cell 1, in twice: return n * 2 / 0"
    )


async def test_python_error_of_a_deep_recursion_stays_short(run: Run) -> None:
    said = await run("def down(n):\n    return down(n + 1)\ndown(0)")
    assert said.startswith("error: RecursionError: maximum recursion depth exceeded\n  line 3: down(0)\n")
    assert len(said.splitlines()) == 8
    assert " more\n" in said


async def test_python_long_error_text_is_cut(run: Run) -> None:
    assert len(await run("raise ValueError('x' * 100_000)")) < 2_100


async def test_python_cells_have_no_future_of_the_tool(run: Run) -> None:
    assert await run("class P:\n    x: int\nP.__annotations__") == "{'x': <class 'int'>}"


async def test_python_error_is_the_agents(sandbox: RunnerSandbox) -> None:
    result = await sandbox.call("python", {"code": "1/0"}, "k")
    assert (result.is_error, result.error_kind) == (True, "agent")


NOT_AUTHORIZED = (
    "error: not authorized: only SELECT is possible, on the tables of the world and with the usual functions"
)


@pytest.mark.parametrize(
    ("query", "content"),
    [
        ("select price from items where name='panel'", "685"),
        ("select name, price from items order by price", "valve|12\npanel|685"),
        ("select name, orders from items where name='valve'", "valve|NULL"),
        ("select orders from items where name='panel'", "error: not found"),
        ("select price from items where name='pane'", "error: not found"),
        ("select cost from items", "error: no such column: cost; the tables are items(name, price, orders)"),
        ("select price from item", "error: no such table: item; the tables are items(name, price, orders)"),
        ("selec price", 'error: near "selec": syntax error'),
        ("select 1; select 2", "error: You can only execute one statement at a time."),
        ("insert into items values ('x', 1, 1)", NOT_AUTHORIZED),
        ("attach '/work/other.db' as other", NOT_AUTHORIZED),
    ],
)
async def test_sql(bench: Workbench, query: str, content: str) -> None:
    assert (await bench.call("sql", {"query": query})).content == content


async def test_sql_says_that_there_are_more_rows(bench: Workbench) -> None:
    query = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 1500) select i from n"
    lines = (await bench.call("sql", {"query": query})).content.splitlines()
    assert lines[999:] == ["1000", "[the first 1000 rows are shown: use WHERE, LIMIT or an aggregate]"]


async def test_sql_that_takes_too_long_ends_without_the_session() -> None:
    hasty = msgspec.structs.replace(sql, source=sql.source.replace("SECONDS_MAX = 8.0", "SECONDS_MAX = 0.2"))
    backend = BubblewrapBackend({"sql": hasty, "python": python} | WORLD_TOOLS, first_uid=302_100)
    async with (
        Pool(backend, size=1) as pool,
        Workbench(pool, toolset(["sql", "python"]), WORLD, seed=1, owner="test") as bench,
    ):
        await bench.call("python", {"code": "kept = 1"})
        query = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
        observation = await bench.call("sql", {"query": query})
        assert observation.content == "error: the query took more than 0.2 s: ask for less, or join on fewer rows"
        assert (await bench.call("python", {"code": "kept"})).content == "1"


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("panel.stock", "41"),
        ("panel.note", "a b"),
        ("panel.colour", "error: not found"),
        ("../notes/readme.txt", "error: a key is a plain name without '/'"),
        ("..", "error: a key is a plain name without '/'"),
        ("", "error: a key is a plain name without '/'"),
    ],
)
async def test_kv(bench: Workbench, key: str, content: str) -> None:
    assert (await bench.call("kv", {"key": key})).content == content


async def test_kv_follows_no_link() -> None:
    beside = msgspec.structs.replace(SHIPPED["kv"], apart=False)
    sandbox = await BubblewrapBackend({"kv": beside, "python": python}, first_uid=302_200).open(0)
    await sandbox.call("python", {"code": "import os; os.mkdir('kv'); os.symlink('/runner.pyc', 'kv/link')"}, "link")
    assert (await sandbox.call("kv", {"key": "link"}, "look up")).content == "error: not found"
    await sandbox.close()


async def test_files_of_the_world_are_there_for_python(bench: Workbench) -> None:
    assert (await bench.call("python", {"code": "open('notes/readme.txt').read()"})).content == "'north is up\\n'"


async def test_world_that_the_agent_spoilt_is_the_agents_error(pool: Pool) -> None:
    async with Workbench(pool, toolset(["files", "terminal"]), WORLD, seed=1, owner="test") as bench:
        await bench.call("write_file", {"path": "world.sqlite", "content": "no database"})
        observation = await bench.call("terminal", {"command": "true"})
    assert observation.error_kind == "agent"
    assert "could not be set up" in observation.content


async def test_own_tool(bench: Workbench) -> None:
    assert (await bench.call("repeat", {"text": "a", "upper": True, "tags": ["z"]})).content == '["A", "A", "z"]'
    refused = await bench.call("repeat", {"text": "a", "times": 0})
    assert (refused.content, refused.error_kind) == ("error: times must be at least 1", "agent")
    broken = await bench.call("repeat", {"text": "a", "times": 101})
    assert (broken.content, broken.error_kind) == ("error: RuntimeError: a bug of the tool", "tool")


def test_schema_comes_from_signature_and_docstring() -> None:
    assert repeat.description == "Say a text several times."
    assert repeat.parameters == {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "what to say"},
            "times": {"type": "integer"},
            "upper": {"type": "boolean"},
            "tags": {"type": ["array", "null"], "items": {"type": "string"}},
            "voice": {
                "type": ["string", "null"],
                "enum": ["soft", "harsh", None],
                "description": "how it sounds, on a good day",
            },
        },
        "required": ["text"],
        "additionalProperties": False,
    }


def test_untyped_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="the argument text has no type"):

        @tool
        def bad(text) -> str:  # type: ignore[no-untyped-def]
            return str(text)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def newer(:\n", "invalid syntax"),
        ("def older(): pass\n", "its source defines no function newer"),
        ("def newer(text: Undefined): pass\n", "name 'Undefined' is not defined"),
    ],
)
async def test_tool_that_cannot_be_defined_inside_is_named(source: str, says: str) -> None:
    newer = Tool(name="newer", description="", parameters={}, source=source)
    with pytest.raises(SandboxUnavailable, match=f"tool newer cannot be defined: .*{says}"):
        await BubblewrapBackend({"newer": newer}, first_uid=302_000).open(0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "missing argument 'text'; repeat takes text (string), times (integer, optional)"),
        ({"text": 5}, "argument 'text' must be string, not integer"),
        ({"text": "a", "times": True}, "argument 'times' must be integer, not boolean"),
        ({"text": "a", "tags": [1]}, "argument 'tags' must be array or null"),
        ({"text": "a", "colour": "red"}, "unknown argument 'colour'; repeat takes"),
        ({"text": "a", "tag": []}, "unknown argument 'tag', did you mean 'tags'?; repeat takes"),
        (
            {"text": "a", "voice": "loud"},
            "argument 'voice' must be \"soft\" or \"harsh\" or null, not 'loud'; repeat takes",
        ),
        ("text", "arguments must be a JSON object"),
    ],
)
def test_complaints_help(arguments: object, says: str) -> None:
    said = complaint("repeat", repeat.parameters, arguments)
    assert said is not None
    assert says in said


def test_fitting_arguments_give_no_complaint() -> None:
    assert complaint("repeat", repeat.parameters, {"text": "a", "times": 3, "tags": None}) is None


async def test_unknown_tool_is_the_agents_error(bench: Workbench) -> None:
    observation = await bench.call("search", {})
    assert observation.content == "error: there is no tool 'search'; the tools are sql, kv, python, repeat"
    assert (observation.error_kind, bench.sandbox_id) == ("agent", None)


@pytest.mark.parametrize("code", ["\ud800", 2**70])
async def test_arguments_that_json_cannot_say_are_the_agents_error(bench: Workbench, code: object) -> None:
    assert (await bench.call("python", {"code": code})).error_kind == "agent"


async def test_hidden_tools_stay_hidden(bench: Workbench) -> None:
    assert (await bench.call("set_up_world", {})).error_kind == "agent"


def test_toolset_names_what_it_knows() -> None:
    assert list(toolset(["kv", "sql"])) == ["kv", "sql"]
    with pytest.raises(
        ValueError, match=r"there is no tool 'abacus'; known tools: audio, audio_info, .*, sql, terminal"
    ):
        toolset(["abacus"])


def test_a_family_stands_for_its_tools() -> None:
    assert list(toolset(["python", "files"])) == [
        *("python", "read_file", "write_file", "edit_file", "patch_file", "list_files", "search_files")
    ]


def test_every_argument_of_every_shipped_tool_is_described() -> None:
    for shipped in SHIPPED.values():
        assert shipped.description, shipped.name
        for name, schema in shipped.parameters["properties"].items():
            assert schema.get("description"), f"{shipped.name}.{name}"
