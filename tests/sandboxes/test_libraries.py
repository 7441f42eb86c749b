"""Python packages of the operator: the session imports them, nobody changes them, the runner never touches them."""

from pathlib import Path

import pytest

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import SandboxUnavailable
from replayground.sandboxes.tools.registry import SHIPPED, toolset
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.checks import Binary
from replayground.sandboxes.worlds.world import WORLD_TOOLS, World, world_from_json


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """In a folder that only its owner may enter, as below root's home."""
    hidden = tmp_path / "hidden"
    package = hidden / "libraries" / "abacus"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def add(a, b):\n    return a + b\n")
    (package / "__init__.py").chmod(0o666)  # so that only the read-only mount protects it
    hidden.chmod(0o700)
    return hidden / "libraries"


async def test_session_imports_libraries_and_cannot_change_them(libraries: Path) -> None:
    sandbox = await BubblewrapBackend(SHIPPED, leases_per_sandbox_max=2, first_uid=309_000, libraries=libraries).open(0)
    try:
        assert (await sandbox.call("python", {"code": "import abacus; abacus.add(2, 3)"}, "a")).content == "5"
        change = "open('/opt/libraries/abacus/__init__.py', 'a')"
        assert "Read-only file system" in (await sandbox.call("python", {"code": change}, "b")).content
        started = (
            "import subprocess; subprocess.check_output(['python3', '-c', 'import abacus; print(abacus.add(1, 1))'])"
        )
        assert (await sandbox.call("python", {"code": started}, "c")).content == r"b'2\n'"
        assert await sandbox.reset()
        assert (await sandbox.call("python", {"code": "import abacus; abacus.add(4, 3)"}, "d")).content == "7"
    finally:
        await sandbox.close()


async def test_missing_libraries_are_said(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match=r"there is no folder .*nowhere: make setup"):
        await BubblewrapBackend(SHIPPED, libraries=tmp_path / "nowhere").open(0)


async def test_world_files_may_be_bytes() -> None:
    world = World(name="w", files={"text": "é", "folder/bytes": Binary(b"\x00\xff\n")})
    assert world_from_json(world.to_json()) == world
    async with (
        Pool(BubblewrapBackend(SHIPPED | WORLD_TOOLS, first_uid=309_100), size=1) as pool,
        Workbench(pool, toolset(["python"]), world, seed=1, owner="test") as bench,
    ):
        code = "open('text', 'rb').read() + open('folder/bytes', 'rb').read()"
        assert (await bench.call("python", {"code": code})).content == repr("é".encode() + b"\x00\xff\n")
