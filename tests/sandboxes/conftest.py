"""One real bubblewrap sandbox for most tests; each test begins with a proven clean one."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from replayground.sandboxes.backends import open_backend
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.libraries import LIBRARIES
from replayground.sandboxes.limits import MEBIBYTE, Limits
from replayground.sandboxes.protocol import Sandbox, ToolResult
from replayground.sandboxes.tools.registry import SHIPPED
from replayground.sandboxes.tools.schema import complaint
from replayground.sandboxes.worlds.world import WORLD_TOOLS

LIMITS = Limits(
    cpu_seconds=3,
    memory_bytes_max=256 * MEBIBYTE,
    disk_bytes_max=8 * MEBIBYTE,
    inodes_max=2000,
    processes_max=24,
    open_files_max=64,
    output_bytes_max=2000,
    call_timeout_seconds=2.0,
)

type Run = Callable[[str], Awaitable[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without bubblewrap the tests that need it say so."""
    if shutil.which("bwrap") is None:
        for item in items:
            if {"sandbox", "backend", "equipped_sandbox"} & set(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.skip(reason="bubblewrap is not installed"))


@pytest.fixture(scope="session")
def backend() -> BubblewrapBackend:
    return BubblewrapBackend(SHIPPED | WORLD_TOOLS, LIMITS, leases_per_sandbox_max=10_000, first_uid=300_000)


@pytest.fixture(scope="session")
async def shared_sandbox(backend: BubblewrapBackend) -> AsyncIterator[RunnerSandbox]:
    sandbox = await backend.open(0)
    yield sandbox
    await sandbox.close()


@pytest.fixture
async def sandbox(shared_sandbox: RunnerSandbox) -> AsyncIterator[RunnerSandbox]:
    """Clean before and after: a test that soils it for good fails here."""
    yield shared_sandbox
    assert await shared_sandbox.reset()


@pytest.fixture
def run(sandbox: RunnerSandbox) -> Run:
    """Run code by the python tool and return what the agent sees."""
    calls = iter(range(1_000_000))

    async def run_code(code: str) -> str:
        return (await sandbox.call("python", {"code": code}, f"run-{next(calls)}")).content

    return run_code


type Call = Callable[..., Awaitable[ToolResult]]


@pytest.fixture(scope="session")
async def equipped_sandbox(pytestconfig: pytest.Config) -> AsyncIterator[Sandbox]:
    """With the libraries of the tools, under the limits that a worker sets."""
    isolation, known = pytestconfig.getoption("isolation"), SHIPPED | WORLD_TOOLS
    backend = open_backend(isolation, known, leases_per_sandbox_max=10_000, first_uid=310_000, libraries=LIBRARIES)
    sandbox = await backend.open(0)
    yield sandbox
    await sandbox.close()


@pytest.fixture
async def call(equipped_sandbox: Sandbox) -> AsyncIterator[Call]:
    """Call a tool in the equipped sandbox: `await call("read_file", path="notes.txt")`."""
    calls = iter(range(1_000_000))

    async def call_tool(tool: str, **arguments: Any) -> ToolResult:
        assert complaint(tool, SHIPPED[tool].parameters, arguments) is None
        return await equipped_sandbox.call(tool, arguments, f"call-{next(calls)}")

    yield call_tool
    assert await equipped_sandbox.reset()
