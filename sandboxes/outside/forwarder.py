"""Runs inside the browser's jail, by the system's Python: starts Chromium and carries its connections to the proxy.

The jail has a network of its own with nothing in it but loopback. All of 127.0.0.0/8 is here, so each browser context is
given an address of its own, and the address that a connection was made to tells the proxy whose it is. Chromium itself
cannot speak to a Unix socket; that is all this program is for.

    python3 -I forwarder.py SOCKET PORT PROGRAM ARGUMENT…

Playwright speaks to Chromium by the descriptors 3 and 4, which go to it untouched.
"""

import asyncio
import os
import sys

CHUNK_BYTES = 65536
PLAYWRIGHT_DESCRIPTORS = (3, 4)


async def main(socket_path: str, port: int, program: list[str]) -> int:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("sockname")[0]
        try:
            proxy_reader, proxy_writer = await asyncio.open_unix_connection(socket_path)
        except OSError:
            writer.close()
            return
        proxy_writer.write(f"{address}\n".encode())
        await asyncio.gather(pump(reader, proxy_writer), pump(proxy_reader, writer))

    server = await asyncio.start_server(carry, "0.0.0.0", port)
    async with server:  # it listens before the browser is there
        child = os.fork()
        if child == 0:
            os.execv(program[0], program)
        for descriptor in PLAYWRIGHT_DESCRIPTORS:
            os.close(descriptor)
        _, status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
        return os.waitstatus_to_exitcode(status)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:  # one side hung up; closing tells the other
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    code = asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
    os._exit(code if code >= 0 else 128 - code)  # connections that are still open are nobody's any more
