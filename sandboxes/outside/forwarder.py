"""Runs inside the browser's jail, by the system's Python: starts Chromium and forwards its connections to the proxy.

The jail has its own network namespace with loopback only, and Chromium cannot connect to a proxy by a Unix socket: that
is what this program is for. It listens on all of 127.0.0.0/8. Each browser context uses a different address there, and
the address that a connection was made to tells the proxy which rollout it belongs to.

    python3 -I forwarder.py SOCKET PORT PROGRAM ARGUMENT…

Playwright talks to Chromium over the descriptors 3 and 4, which Chromium inherits.
"""

import asyncio
import os
import sys

CHUNK_BYTES = 65536
PLAYWRIGHT_DESCRIPTORS = (3, 4)


async def main(socket_path: str, port: int, program: list[str]) -> int:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The local address: the one that Chromium connected to.
        address = writer.get_extra_info("sockname")[0]
        try:
            proxy_reader, proxy_writer = await asyncio.open_unix_connection(socket_path)
        except OSError:
            writer.close()
            return
        # Written here, outside of Chromium: a page cannot claim the address of another rollout.
        proxy_writer.write(f"{address}\n".encode())
        try:
            await asyncio.gather(pump(reader, proxy_writer), pump(proxy_reader, writer))
        # One side broke off; closing tells the other.
        except OSError:
            pass
        finally:
            proxy_writer.close()
            writer.close()

    server = await asyncio.start_server(carry, "0.0.0.0", port)
    # Listens before the browser starts.
    async with server:
        child = os.fork()
        if child == 0:
            # Descriptors 3 and 4 stay open; those of this program are close-on-exec.
            os.execv(program[0], program)
        # A copy that stays open here would hide the end of Chromium from Playwright.
        for descriptor in PLAYWRIGHT_DESCRIPTORS:
            os.close(descriptor)
        _, status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
        return os.waitstatus_to_exitcode(status)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward until the sender ends, then tell the receiver, which may go on sending."""
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


if __name__ == "__main__":
    code = asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
    # At once: connections that are still open belong to nobody any more.
    os._exit(code if code >= 0 else 128 - code)
