"""One Chromium in its jail: a network namespace with loopback only, and one Unix socket, that of the proxy."""

import asyncio
import contextlib
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from playwright.async_api import Browser as Chromium
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import Playwright

from replayground.sandboxes.outside.config import BrowserSettings
from replayground.sandboxes.outside.contract import OutsideFailed
from replayground.sandboxes.outside.jail import Jail
from replayground.sandboxes.outside.page_proxy import PageProxy

PROXY_PORT = 3128
START_TIMEOUT_SECONDS = 60.0
CLOSE_TIMEOUT_SECONDS = 10.0
# All traffic goes through the proxy, loopback too. WebRTC and QUIC would use UDP, which no proxy carries.
ARGUMENTS = (
    "--proxy-bypass-list=<-loopback>",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-quic",
)


class BrowserProcess:
    """One Chromium in its jail, with its proxy."""

    def __init__(self, settings: BrowserSettings) -> None:
        self.settings = settings
        self.proxy = PageProxy(settings.allow)
        self.sessions = 0
        self.rollouts_left = settings.rollouts_per_browser_max
        self.chromium: Chromium | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="browser-"))
        self._jail = contextlib.AsyncExitStack()

    @property
    def is_alive(self) -> bool:
        return self.chromium is not None and self.chromium.is_connected()

    async def start(self, playwright: Playwright) -> None:
        socket_path = self._folder / "proxy"
        await self.proxy.start(str(socket_path))
        self._folder.chmod(0o711)
        # The jail's uid must be able to connect. Others cannot find it: the folder has a random name.
        socket_path.chmod(0o666)
        # Trusts only the key of this proxy, for pages of the world by https; other certificates are checked as usual.
        arguments = [*ARGUMENTS, f"--ignore-certificate-errors-spki-list={self.proxy.key_digest}"]
        try:
            self.chromium = await playwright.chromium.launch(
                executable_path=await self._launcher(socket_path),
                args=arguments,
                chromium_sandbox=self.settings.chromium_sandbox,
                timeout=START_TIMEOUT_SECONDS * 1000,
                # Nothing of this program's environment reaches the browser.
                env={},
            )
        except PlaywrightError as error:
            raise OutsideFailed(f"Chromium did not start: {str(error)[-2000:]}") from error

    async def close(self) -> None:
        if self.chromium is not None:
            with contextlib.suppress(PlaywrightError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await self.chromium.close()
        # After the polite end: kills whatever is left in the cgroup.
        await self._jail.aclose()
        await self.proxy.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _launcher(self, socket_path: Path) -> Path:
        """Write the script that Playwright starts as Chromium: it runs Chromium in the jail with the same arguments."""
        forwarder = ("/usr/bin/python3", "-I", "/forwarder.py", "/proxy", str(PROXY_PORT))
        launched = self._jail_with(socket_path).launched([*forwarder, self.settings.chromium])
        command = await self._jail.enter_async_context(launched)
        launcher = self._folder / "launch"
        launcher.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        launcher.chmod(0o700)
        return launcher

    def _jail_with(self, socket_path: Path) -> Jail:
        return Jail(
            hostname="browser",
            readable=(
                (str(Path(__file__).with_name("forwarder.py")), "/forwarder.py"),
                (str(socket_path), "/proxy"),
                *((folder, folder) for folder in ("/etc/fonts",) if os.path.isdir(folder)),
            ),
            nested_namespaces=self.settings.chromium_sandbox,
            memory_bytes_per_process_max=self.settings.memory_bytes_per_process_max,
            memory_bytes_max=self.settings.memory_bytes_max,
            cpu_cores_max=self.settings.cpu_cores_max,
            processes_max=self.settings.processes_max,
            disk_bytes_max=self.settings.disk_bytes_max,
        )
