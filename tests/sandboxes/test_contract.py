"""What every backend promises, on each that ships."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator

import pytest

from replayground.sandboxes import machine
from replayground.sandboxes.backends import ISOLATIONS, bubblewrap, channel, enclosed, lacking, open_backend
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.backends.scripted import ScriptedBackend
from replayground.sandboxes.limits import Limits
from replayground.sandboxes.protocol import Backend, Sandbox, SandboxFailed, SandboxUnavailable
from replayground.sandboxes.tools.registry import SHIPPED

COUNT = "import os; open('n', 'a').write('x'); os.stat('n').st_size"


@pytest.fixture(params=ISOLATIONS)
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Backend, Sandbox]]:
    if reason := lacking(request.param):
        pytest.skip(reason)
    counter = iter(range(1, 100))
    backend = (
        ScriptedBackend({"python": lambda arguments: str(next(counter))})
        if request.param == "scripted"
        else open_backend(request.param, SHIPPED, first_uid=303_000, leases_per_sandbox_max=3)
    )
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
    snapshot = await sandbox.snapshot()
    assert await sandbox.reset()
    with pytest.raises(FileNotFoundError):
        await sandbox.get("folder/file")
    await sandbox.restore(snapshot)
    assert await sandbox.get("folder/file") == b"\x00\xff"
    with pytest.raises(OSError, match="cannot be read"):
        await sandbox.restore(b"no tar" * 1000)
    with pytest.raises(OSError, match="something other than folders and plain files"):
        await sandbox.restore(tar_of_a_link())
    with pytest.raises(SandboxFailed):
        await sandbox.call("no such tool", {}, "c")
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(SandboxFailed):
        await sandbox.call("python", {"code": "1"}, "d")


def tar_of_a_link() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("link")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(entry)
    return packed.getvalue()


async def test_impossible_paths_are_refused_and_harm_nobody(sandbox: RunnerSandbox) -> None:
    for path in ("a\0b", "", ".", "x" * 300, "/", "/work", "a/" * 3000 + "b"):
        with pytest.raises(OSError, match=r"\S"):
            await sandbox.get(path)
        with pytest.raises(OSError, match=r"\S"):
            await sandbox.put(path, b"x")
    assert (await sandbox.call("python", {"code": "1 + 1"}, "a")).content == "2"


async def test_put_and_get_of_a_large_file(sandbox: RunnerSandbox) -> None:
    data = bytes(range(256)) * 20_000
    await sandbox.put("large", data)
    assert await sandbox.get("large") == data
    with pytest.raises(OSError, match="No space left"):
        await sandbox.put("larger", data)


async def test_missing_bubblewrap_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SYSTEM_PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed: apt-get install bubblewrap"):
        await BubblewrapBackend(SHIPPED).open(0)


async def kill_and_wait(sandbox: RunnerSandbox) -> None:
    """The runner dies a moment after bwrap; its end of the stream tells."""
    assert isinstance(sandbox.enclosure, enclosed.EnclosedProcesses)
    sandbox.enclosure.process.kill()
    await sandbox.enclosure.process.wait()
    await sandbox._reader.read()


async def test_a_runner_that_is_greeted_late_has_not_waited_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it has done all it does in advance before it hears of its tools."""
    greet = RunnerSandbox.greet

    async def greet_late(sandbox: RunnerSandbox, compiled_tools: bytes) -> None:
        await asyncio.sleep(1.0)
        await greet(sandbox, compiled_tools)

    monkeypatch.setattr(RunnerSandbox, "greet", greet_late)
    sandbox = await BubblewrapBackend(SHIPPED, first_uid=301_900).open(0)
    assert (await sandbox.call("calculator", {"expression": "6 * 7"}, "k")).content == "42"
    await sandbox.close()


async def test_runner_that_dies_is_an_infra_failure() -> None:
    sandbox = await BubblewrapBackend(SHIPPED, first_uid=304_000).open(0)
    await kill_and_wait(sandbox)
    assert not sandbox.is_alive
    with pytest.raises(SandboxFailed):
        await sandbox.call("python", {"code": "1"}, "a")
    assert not await sandbox.reset()
    await sandbox.close()


async def test_runner_that_does_not_answer_is_an_infra_failure_while_no_code_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "GRACE_SECONDS", 0.1)
    backend = BubblewrapBackend(SHIPPED, Limits(call_timeout_seconds=0.1), first_uid=305_000)
    backend.runner_source = backend.runner_source.replace('header["timeout_seconds"]', "3600.0").replace(
        'read_file(header["path"], self.limits["disk_bytes_max"])', "time.sleep(3600)"
    )
    sandbox = await backend.open(0)
    with pytest.raises(SandboxFailed, match="did not answer in time"):
        await sandbox.get("a")
    await sandbox.close()
    sandbox = await backend.open(0)
    result = await sandbox.call("python", {"code": "while True: pass"}, "a")
    assert (result.error_kind, result.content) == ("agent", "error: the sandbox has ended: it did not answer in time")
    with pytest.raises(OSError, match="the sandbox has ended: it did not answer in time"):
        await sandbox.get("a")
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
