"""What every backend promises, on each that ships."""

from collections.abc import AsyncIterator

import pytest

from sandboxes.backends import bubblewrap
from sandboxes.backends.bubblewrap import BubblewrapBackend, BubblewrapSandbox
from sandboxes.backends.scripted import ScriptedBackend
from sandboxes.limits import Limits
from sandboxes.protocol import Backend, Sandbox, SandboxFailed, SandboxUnavailable
from sandboxes.tools.registry import SHIPPED

COUNT = "import os; open('n', 'a').write('x'); os.stat('n').st_size"


@pytest.fixture(params=["bubblewrap", "scripted"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Backend, Sandbox]]:
    counter = iter(range(1, 100))
    backends: dict[str, Backend] = {
        "bubblewrap": BubblewrapBackend(SHIPPED, Limits(), first_uid=303_000),
        "scripted": ScriptedBackend({"python": lambda arguments: str(next(counter))}),
    }
    backend = backends[request.param]
    sandbox = await backend.open(0)
    yield backend, sandbox
    await sandbox.close()


async def test_contract(opened: tuple[Backend, Sandbox]) -> None:
    backend, sandbox = opened
    assert isinstance(backend, Backend)
    assert isinstance(sandbox, Sandbox)
    assert sandbox.isolation == backend.isolation
    first = await sandbox.call("python", {"code": COUNT}, "a")
    assert (first.content, first.is_error, first.error_kind, first.blobs) == ("1", False, None, ())
    assert await sandbox.call("python", {"code": COUNT}, "a") == first
    assert (await sandbox.call("python", {"code": COUNT}, "b")).content == "2"
    await sandbox.put("folder/file", b"\x00\xff")
    assert await sandbox.get("/work/folder/file") == b"\x00\xff"
    assert await sandbox.reset()
    with pytest.raises(FileNotFoundError):
        await sandbox.get("folder/file")
    with pytest.raises(SandboxFailed):
        await sandbox.call("no such tool", {}, "c")
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(SandboxFailed):
        await sandbox.call("python", {"code": "1"}, "d")


async def test_put_and_get_of_a_large_file(sandbox: BubblewrapSandbox) -> None:
    data = bytes(range(256)) * 20_000
    await sandbox.put("large", data)
    assert await sandbox.get("large") == data
    with pytest.raises(OSError, match="No space left"):
        await sandbox.put("larger", data)


async def test_missing_bubblewrap_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "SYSTEM_PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed: apt-get install bubblewrap"):
        await BubblewrapBackend(SHIPPED).open(0)


async def kill_and_wait(sandbox: BubblewrapSandbox) -> None:
    """The runner dies a moment after bwrap; its end of the stream tells."""
    sandbox._process.kill()
    await sandbox._process.wait()
    await sandbox._reader.read()


async def test_runner_that_dies_is_an_infra_failure() -> None:
    sandbox = await BubblewrapBackend(SHIPPED, first_uid=304_000).open(0)
    await kill_and_wait(sandbox)
    assert not sandbox.is_alive
    with pytest.raises(SandboxFailed):
        await sandbox.call("python", {"code": "1"}, "a")
    assert not await sandbox.reset()
    await sandbox.close()


async def test_runner_that_does_not_answer_is_an_infra_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "GRACE_SECONDS", 0.1)
    backend = BubblewrapBackend(SHIPPED, Limits(call_timeout_seconds=0.1), first_uid=305_000)
    backend._runner_source = backend._runner_source.replace(b'header["timeout_seconds"]', b"3600.0")
    sandbox = await backend.open(0)
    with pytest.raises(SandboxFailed, match="did not answer in time"):
        await sandbox.call("python", {"code": "while True: pass"}, "a")
    await sandbox.close()


async def test_bwrap_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "DEVICES", ("no-such-device",))
    with pytest.raises(SandboxFailed, match="no-such-device"):
        await BubblewrapBackend(SHIPPED, first_uid=306_000).open(0)


async def test_leases_per_sandbox_are_counted() -> None:
    sandbox = await BubblewrapBackend(SHIPPED, leases_per_sandbox_max=2, first_uid=307_000).open(0)
    assert await sandbox.reset()
    assert not await sandbox.reset()
    await sandbox.close()
