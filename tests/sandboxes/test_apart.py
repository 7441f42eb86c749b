"""What a tool keeps apart can be had by that tool alone, and is answered as the world has it, whatever the agent does."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from replayground.sandboxes.backends import lacking, open_backend
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.scripted import ScriptedBackend
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import SandboxFailed
from replayground.sandboxes.tools.registry import SHIPPED, toolset
from replayground.sandboxes.tools.tool import tool
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.world import WORLD_TOOLS, Table, World
from tests.sandboxes.conftest import LIMITS

WORLD = World(
    name="stockroom",
    files={"readme.txt": "the stock is counted at night"},
    tables={"items": Table(("name", "price"), (("panel", "price-68519243"),))},
    keys={"panel.stock": "stock-41730992"},
)
SECRETS = ("price-68519243", "stock-41730992")
LOOK_AROUND = f"""
import os, re
found = re.compile(rb"{"|".join(f"{secret[:5]}[-]{secret[6:]}" for secret in SECRETS)}").search  # not itself in memory
places = []
for top in ("/work", "/tmp", "/opt"):
    for folder, _, names in os.walk(top):
        for name in names:
            try:
                if found(open(os.path.join(folder, name), "rb").read(1 << 20)): places.append(os.path.join(folder, name))
            except OSError: pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        regions = [line.split()[0] for line in open(f"/proc/{{pid}}/maps") if " rw-p " in line]
        memory = open(f"/proc/{{pid}}/mem", "rb")
    except OSError: continue
    for start, end in (map(lambda text: int(text, 16), region.split("-")) for region in regions):
        try:
            memory.seek(start)
            if found(memory.read(end - start)): places.append(f"memory of {{pid}}")
        except (OSError, OverflowError, ValueError): pass
places
"""
UPSET = """
import os, shutil, signal
shutil.rmtree("/work", ignore_errors=True)
os.makedirs("/work/kv", exist_ok=True)
for name in ("world.sqlite", "kv/panel.stock"): open("/work/" + name, "w").write("1")
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) not in (1, os.getpid()): os.kill(int(pid), signal.SIGKILL)
"""


@pytest.fixture(scope="module", params=["bubblewrap", "gvisor"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    if reason := lacking(request.param):
        pytest.skip(reason)
    async with Pool(open_backend(request.param, SHIPPED | WORLD_TOOLS, LIMITS, first_uid=331_000), size=1) as pool:
        yield pool


@pytest.fixture
async def bench(pool: Pool) -> AsyncIterator[Workbench]:
    async with Workbench(pool, toolset(["sql", "kv", "python"]), WORLD, seed=1, owner="test") as bench:
        yield bench


async def answers(bench: Workbench) -> tuple[str, str]:
    price = await bench.call("sql", {"query": "select price from items"})
    stock = await bench.call("kv", {"key": "panel.stock"})
    return price.content, stock.content


async def test_the_agents_code_finds_nothing_of_it(bench: Workbench) -> None:
    assert await answers(bench) == SECRETS
    assert (await bench.call("python", {"code": LOOK_AROUND})).content == "[]"


async def test_what_is_not_apart_is_found(pool: Pool) -> None:
    async with Workbench(pool, toolset(["terminal", "python"]), WORLD, seed=1, owner="test") as bench:
        await bench.call("terminal", {"command": "true"})
        found = (await bench.call("python", {"code": LOOK_AROUND})).content
    assert "/work/world.sqlite" in found
    assert "/work/kv/panel.stock" in found


async def test_the_agents_code_changes_no_answer(bench: Workbench) -> None:
    await bench.call("python", {"code": UPSET})
    assert await answers(bench) == SECRETS
    await bench.call("python", {"code": UPSET})
    assert await answers(bench) == SECRETS


async def test_a_session_that_ends_takes_nothing_of_it_along(bench: Workbench) -> None:
    await answers(bench)
    assert (await bench.call("python", {"code": "import os; os._exit(1)"})).error_kind == "agent"
    assert await answers(bench) == SECRETS


async def test_the_next_rollout_finds_nothing_of_it_either(pool: Pool) -> None:
    async with Workbench(pool, toolset(["sql", "kv", "python"]), WORLD, seed=1, owner="first") as bench:
        await answers(bench)
    async with Workbench(pool, toolset(["sql", "kv", "python"]), seed=1, owner="second") as bench:
        assert await answers(bench) == ("error: there is no database in this world", "error: not found")
        assert (await bench.call("python", {"code": LOOK_AROUND})).content == "[]"


async def test_files_of_the_world_are_not_apart(bench: Workbench) -> None:
    assert (
        await bench.call("python", {"code": "open('readme.txt').read()"})
    ).content == f"{WORLD.files['readme.txt']!r}"


def test_a_tool_that_could_not_reach_its_part_is_refused() -> None:
    @tool(needs=frozenset({"tables"}))
    def restock(item: str) -> str:
        """Order more."""
        return item

    assert set(toolset(["restock", "python"], [restock])) == {"restock", "python"}
    with pytest.raises(ValueError, match=r"restock needs the tables of the world, which sql keeps apart"):
        toolset(["restock", "sql"], [restock])


async def test_rollouts_never_wait_for_each_others_second_sandbox() -> None:
    backend = ScriptedBackend({name: lambda arguments: "7" for name in ("sql", "python", "set_up_world")})
    both_began = asyncio.Barrier(2)

    async def rollout(pool: Pool, first: str, second: str) -> None:
        async with Workbench(pool, toolset(["sql", "python"]), WORLD, seed=1, owner=first) as bench:
            await bench.call(first, CALLS[first])
            await both_began.wait()
            await bench.call(second, CALLS[second])

    async with Pool(backend, size=2) as pool:
        await asyncio.gather(rollout(pool, "sql", "python"), rollout(pool, "python", "sql"))
    assert len(backend.opened) == 4


CALLS = {"sql": {"query": "select 1"}, "python": {"code": "1"}}


async def test_nothing_opens_apart_once_the_lease_ran_out() -> None:
    backend = ScriptedBackend({})
    async with Pool(backend, size=1) as pool, pool.reserve(owner="slow", seconds=0.0) as place:
        await asyncio.sleep(0.01)
        with pytest.raises(SandboxFailed, match="run out"):
            await place.sandbox(apart=True)


@pytest.mark.parametrize(
    "query",
    [
        "create temp table items as select 'panel' as name, 'forged' as price",
        "create temp view items as select 'panel' as name, 'forged' as price",
        "pragma hard_heap_limit = 1",
        "select * from pragma_hard_heap_limit(1)",
        "select count(*) from pragma_hard_heap_limit(1)",
        "pragma writable_schema = 1",
        "select fts3_tokenizer('simple', x'4141414141414141')",
        "select hex(fts3_tokenizer('simple'))",
        "select * from fts3tokenize where input = 'a'",
        "select count(*) from dbstat",
        "select load_extension('/work/x.so')",
        "attach ':memory:' as other",
        "vacuum into '/work/other.sqlite'",
        "select sqlite_compileoption_get(1)",
        "select randomblob(100000000)",
        "begin",
    ],
)
async def test_sql_does_nothing_but_select(bench: Workbench, query: str) -> None:
    refused = await bench.call("sql", {"query": query})
    assert (refused.error_kind, "only SELECT is possible" in refused.content) == ("agent", True)
    assert await answers(bench) == SECRETS


@pytest.mark.parametrize(
    ("query", "content"),
    [
        ("select count(*) from items", "1"),
        ("with found as (select * from items) select count(*) from found", "1"),
        ("select value from json_each('[1, 2]')", "1\n2"),
        ("select name from pragma_table_info('items')", "name\nprice"),
        ("select name from sqlite_master", "items"),
        ("select upper(name) || printf('%03d', 7) from items where name like 'p%'", "PANEL007"),
        ("select rank() over (order by price) from items", "1"),
    ],
)
async def test_sql_selects_as_sqlite_does(bench: Workbench, query: str, content: str) -> None:
    assert (await bench.call("sql", {"query": query})).content == content


async def test_code_and_constants_of_tools_apart_are_not_in_the_agents_sandbox() -> None:
    @tool(apart=True)
    def oracle(question: str) -> str:
        """Answer."""
        return APART_CONSTANT

    known = SHIPPED | WORLD_TOOLS | {oracle.name: oracle}
    backend = BubblewrapBackend(known, LIMITS, first_uid=332_000)
    async with (
        Pool(backend, size=1) as pool,
        Workbench(pool, {"oracle": oracle, "python": SHIPPED["python"]}, seed=1, owner="test") as bench,
    ):
        assert (await bench.call("oracle", {"question": "?"})).content == APART_CONSTANT
        look = LOOK_AROUND.replace(f"{SECRETS[0][:5]}[-]{SECRETS[0][6:]}", "constant[-]71730455")
        assert (await bench.call("python", {"code": look})).content == "[]"
        defined = (
            "import gc; sorted(n for o in gc.get_objects() if isinstance(o, dict) for n in ('sql', 'kv') if n in o)"
        )
        assert (await bench.call("python", {"code": defined})).content == "[]"


APART_CONSTANT = "constant-71730455"
