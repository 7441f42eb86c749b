"""Checks of a world in real sandboxes: what they find after an agent has worked, and what a hostile one can do about it."""

import json
from collections.abc import AsyncIterator

import pytest

from replayground.sandboxes.backends import lacking, open_backend
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.scripted import ScriptedBackend
from replayground.sandboxes.limits import MEBIBYTE, Limits
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.tools.registry import SHIPPED, toolset
from replayground.sandboxes.tools.tool import tool
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.checks import TEXT_BYTES_MAX, Check, CheckResult
from replayground.sandboxes.worlds.world import WORLD_TOOLS, Table, World, world_from_json

LIMITS = Limits(memory_bytes_max=256 * MEBIBYTE, disk_bytes_max=8 * MEBIBYTE, call_timeout_seconds=10.0)
ORDERS = Table(columns=("id", "item", "price"), rows=((1, "pen", 1.5), (2, "ink", None), (2, "ink", None)))


@tool(needs=frozenset({"tables"}), apart=True)
def sell(statement: str) -> str:
    """Change the orders.

    statement: one SQL statement
    """
    import sqlite3

    connection = sqlite3.connect("/work/world.sqlite")
    connection.execute(statement)
    connection.commit()
    connection.close()
    return "done"


@tool(needs=frozenset())
def bare() -> None:
    """Have every later file of this session say something else. Needs no part of the world."""
    import builtins
    import io

    opened = builtins.open

    def forged(path: object, mode: str = "r", *more: object, **named: object) -> object:
        return io.BytesIO() if path == "/work/answer" else opened(path, mode, *more, **named)  # type: ignore[call-overload]

    builtins.open = forged  # type: ignore[assignment]


@pytest.fixture(scope="module")
async def pool() -> AsyncIterator[Pool]:
    known = SHIPPED | WORLD_TOOLS | {sell.name: sell, bare.name: bare}
    async with Pool(BubblewrapBackend(known, LIMITS, leases_per_sandbox_max=100, first_uid=310_000), 2) as pool:
        yield pool


def bench(pool: Pool, world: World, *tools: str) -> Workbench:
    return Workbench(pool, toolset(tools, (sell, bare)), world, seed=1, owner="test")


async def found(pool: Pool, world: World, *calls: tuple[str, str]) -> list[CheckResult]:
    """What the checks find after these calls of a tool with one argument."""
    names = dict.fromkeys(name for name, _ in calls) or {"terminal": None}
    async with bench(pool, world, *names) as work:
        for name, argument in calls:
            (parameter, *_) = work.tools[name].parameters["properties"]
            assert not (await work.call(name, {parameter: argument})).is_error
        return await work.check_world()


def world_with(*checks: Check, files: dict[str, str] | None = None) -> World:
    return World(name="w", files=dict(files or {}), tables={"orders": ORDERS}, checks=checks)


TABLES = world_with(Check(name="rows", kind="tables"))


async def test_rows_that_a_tool_changed_are_found_with_their_values(pool: Pool) -> None:
    (rows,) = await found(
        pool,
        TABLES,
        ("sell", "UPDATE orders SET price = 2.0 WHERE id = 1"),
        ("sell", "DELETE FROM orders WHERE rowid = 2"),
        ("sell", "CREATE TABLE notes (text)"),
        ("sell", "INSERT INTO notes VALUES ('sold')"),
    )
    assert rows.problem is None
    assert json.loads(rows.content) == {
        "orders": {"added": [[1, "pen", 2.0]], "removed": [[1, "pen", 1.5], [2, "ink", None]]},
        "notes": {"added": [["sold"]], "removed": []},
    }


async def test_an_attempt_that_touches_no_table_changes_none(pool: Pool) -> None:
    assert [rows.content for rows in await found(pool, TABLES)] == ["{}"]
    assert [rows.content for rows in await found(pool, TABLES, ("sql", "select 1"))] == ["{}"]
    assert [rows.content for rows in await found(pool, TABLES, ("sell", "DELETE FROM orders WHERE id = 9"))] == ["{}"]


async def test_tables_that_the_agents_code_can_reach_are_compared_too(pool: Pool) -> None:
    change = "import sqlite3; c = sqlite3.connect('/work/world.sqlite'); c.execute('DELETE FROM orders'); c.commit()"
    (rows,) = await found(pool, TABLES, ("terminal", f'python3 -c "{change}"'))
    assert len(json.loads(rows.content)["orders"]["removed"]) == 3
    (broken,) = await found(pool, TABLES, ("terminal", "echo broken > /work/world.sqlite"))
    assert "cannot be read" in (broken.problem or "")
    (gone,) = await found(pool, TABLES, ("terminal", "rm /work/world.sqlite"))
    assert "cannot be read" in (gone.problem or "")


async def test_more_changes_than_an_event_should_hold_are_a_problem(pool: Pool) -> None:
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n LIMIT 5000) INSERT INTO orders SELECT i, 'pen', 1 FROM n"
    (rows,) = await found(pool, TABLES, ("sell", many))
    assert "more rows have changed" in (rows.problem or "")


HIDDEN = "import solution\nassert solution.double(4) == 8\nprint('passed')\n"
TESTED = world_with(
    Check(name="tests", kind="command", command="python3 -B hidden/test.py", files={"hidden/test.py": HIDDEN}),
    Check(name="solution", kind="file", path="solution.py"),
    files={"solution.py": "def double(x):\n    return x + x\n"},
)


async def test_tests_run_when_the_agent_has_ended_and_are_not_there_before(pool: Pool) -> None:
    world = World(name="w", files=TESTED.files, checks=TESTED.checks[:1])
    seen = "ls -a /work /work/hidden > /work/seen; env >> /work/seen; true"
    command = Check(
        name="tests", kind="command", command="PYTHONPATH=. python3 -B hidden/test.py", files=world.checks[0].files
    )
    look = Check(name="seen", kind="file", path="seen")
    tests, listing = await found(pool, World(name="w", files=world.files, checks=(command, look)), ("terminal", seen))
    assert (tests.exit_code, tests.content) == (0, "passed\n")
    assert "test.py" not in listing.content
    wrong = "echo 'def double(x): return 9' > /work/solution.py"
    tests, _ = await found(pool, World(name="w", files=world.files, checks=(command, look)), ("terminal", wrong))
    assert tests.exit_code == 1
    assert "AssertionError" in tests.content


@pytest.mark.parametrize("isolation", ["bubblewrap", "gvisor"])
async def test_a_command_can_write_where_the_agent_and_the_world_have_written(isolation: str) -> None:
    """As tests do, whose files go into a folder that the agent has made."""
    if reason := lacking(isolation):
        pytest.skip(reason)
    command = "touch made/by_check there/by_check && cat made/test && echo x >> made/own"
    check = Check(name="writes", kind="command", command=command, files={"made/test": "hidden"})
    backend = open_backend(isolation, SHIPPED | WORLD_TOOLS, LIMITS, first_uid=311_000)
    async with Pool(backend, 1, warm=0) as one:
        world = world_with(check, files={"there/a": "a"})
        (writes,) = await found(one, world, ("terminal", "mkdir made; echo mine > made/own"))
    assert (writes.exit_code, writes.content) == (0, "hidden"), writes


async def test_without_a_call_the_checks_see_the_files_of_the_world(pool: Pool) -> None:
    _, solution = await found(pool, TESTED)
    assert solution.content.startswith("def double")


async def test_a_command_that_does_not_end_is_stopped(pool: Pool) -> None:
    (slow,) = await found(pool, world_with(Check(name="slow", kind="command", command="sleep 60", timeout_seconds=1)))
    assert "has not ended after 1 s" in (slow.problem or "")
    assert slow.exit_code is None


async def test_the_end_of_a_long_output_is_kept(pool: Pool) -> None:
    (long,) = await found(pool, world_with(Check(name="long", kind="command", command="seq 100000; exit 3")))
    assert long.exit_code == 3
    assert long.content.endswith("99999\n100000\n")
    assert len(long.content) <= TEXT_BYTES_MAX


STRANGERS = "for each in /proc/[0-9]*; do tr '\\0' ' ' < $each/cmdline; done | grep -c '[l]eft_behind'"
LEAVES = "bash -c 'exec -a left_behind sleep 60' > /dev/null 2>&1 & sleep 0.1"


async def test_no_process_of_the_agent_is_left_when_a_command_runs(pool: Pool) -> None:
    """One that was only stopped could be woken by the kernel, and decide how the command ends."""
    check = Check(name="strangers", kind="command", command=STRANGERS)
    (strangers,) = await found(pool, world_with(check), ("terminal", LEAVES))
    assert strangers.content == "0\n", strangers


async def test_no_process_of_an_earlier_check_is_left(pool: Pool) -> None:
    """A command may run code of the agent, which must neither see nor change the next check."""
    leaves = Check(name="leaves", kind="command", command=LEAVES)
    strangers = Check(name="strangers", kind="command", command=STRANGERS)
    assert [result.content for result in await found(pool, world_with(leaves, strangers))] == ["", "0\n"]


async def test_programs_of_a_check_read_nothing_from_the_home_of_the_agent(pool: Pool) -> None:
    """Python, git and others run or obey what they find there, also when the command runs no code of the agent."""
    site = "/work/.local/lib/python3.$(python3 -c 'import sys; print(sys.version_info.minor)')/site-packages"
    leaves = f"mkdir -p {site} && echo 'print(4); import os; os._exit(0)' > {site}/usercustomize.py"
    check = Check(name="judge", kind="command", command="python3 judge.py; ls -a ~", files={"judge.py": "print(2 + 3)"})
    (judged,) = await found(pool, world_with(check), ("terminal", leaves))
    assert (judged.exit_code, judged.content) == (0, "5\n.\n..\n"), judged


async def test_the_world_is_not_set_up_in_a_session_of_the_agent(pool: Pool) -> None:
    world = World(name="w", files={"answer": "the real one"}, checks=(Check(name="a", kind="file", path="answer"),))
    async with bench(pool, world, "bare") as work:
        assert not (await work.call("bare", {})).is_error
        (answer,) = await work.check_world()
    assert answer.content == "the real one", answer


async def test_an_end_of_a_command_that_is_none_is_a_problem(pool: Pool) -> None:
    """Whatever a tool process returns: a rollout must not end by an infra error for it."""
    for content in ("[]", "{}", '{"exit_code": 1}', '{"exit_code": 300, "output": ""}', "half of i"):
        answers = {"run_command": lambda _, content=content: content}
        world = World(name="w", checks=(Check(name="a", kind="command", command="true"),))
        async with Pool(ScriptedBackend(answers), 1) as scripted, bench(scripted, world, "terminal") as work:
            (result,) = await work.check_world()
        assert "cannot be read" in (result.problem or ""), result


async def test_processes_of_the_agent_stand_still_while_a_command_runs(pool: Pool) -> None:
    grows = "touch log; (while true; do echo x >> /work/log; done) > /dev/null 2>&1 &"
    compare = "a=$(wc -c < log); sleep 0.3; b=$(wc -c < log); echo $a $b; test $a = $b"
    (still,) = await found(pool, world_with(Check(name="still", kind="command", command=compare)), ("terminal", grows))
    assert still.exit_code == 0, still


async def test_links_and_folders_in_the_way_do_not_fake_a_result(pool: Pool) -> None:
    check = Check(name="tests", kind="command", command="cat hidden", files={"hidden": "the real one"})
    linked = "echo fake > /work/other; ln -s /work/other /work/hidden; ln -s /etc/passwd /work/solution.py"
    tests, solution = await found(pool, world_with(check, TESTED.checks[1]), ("terminal", linked))
    assert tests.content == "the real one"
    assert solution.problem is not None
    (tests,) = await found(pool, world_with(check), ("terminal", "mkdir /work/hidden"))
    assert tests.problem is not None


@pytest.mark.parametrize(
    ("check", "told"),
    [
        ('{"name": "", "kind": "tables"}', "needs a name"),
        ('{"name": "a", "kind": "file"}', "a file has a path"),
        ('{"name": "a", "kind": "tables", "command": "ls"}', "tables neither"),
        ('{"name": "a", "kind": "file", "path": "../x"}', "leaves /work"),
        ('{"name": "a", "kind": "command", "command": "ls", "files": {"/etc/x": ""}}', "leaves /work"),
        ('{"name": "a", "kind": "command", "command": "ls", "timeout_seconds": 1000}', "from 1 to 120"),
        ('{"name": "a", "kind": "tables"}, {"name": "a", "kind": "tables"}', "same name"),
        ('{"name": "a", "kind": "tables", "query": "select 1"}', "unknown field"),
    ],
)
def test_a_check_that_makes_no_sense_is_refused_with_its_world(check: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        world_from_json(f'{{"name": "w", "checks": [{check}]}}')
