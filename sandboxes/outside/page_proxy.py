"""The only way out of the browser's jail: an HTTP proxy on a Unix socket that gives each rollout its own small internet.

A connection begins with a line that names the rollout by its address (see forwarder.py), then speaks HTTP/1.1 as to any
proxy. What it asks for is, in this order:

* a page of the rollout's world: answered here, whatever the scheme; https by a certificate made at the start, whose key
  the browser is told to trust;
* on the allow-list: passed on; https as a tunnel, so that the browser checks the real certificate;
* anything else: refused with 403 and a sentence that says so.

A name on the allow-list that resolves to an address of this machine or of a private network is refused, unless the list
has the address itself: otherwise whoever rules a name could point it at the broker.

Not covered: what an allowed host does with what it is sent. WebSockets to pages of the world.
"""

import asyncio
import base64
import contextlib
import datetime
import hashlib
import ipaddress
import logging
import mimetypes
import os
import socket
import ssl
import tempfile
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sandboxes.worlds.world import plain_url

logger = logging.getLogger(__name__)

HEAD_BYTES_MAX = 64 * 1024
CHUNK_BYTES = 64 * 1024
CONNECT_TIMEOUT_SECONDS = 15.0
HEAD_TIMEOUT_SECONDS = 60.0
CONNECTIONS_PER_ROLLOUT_MAX = 64
DEFAULT_PORTS = {"http": 80, "https": 443}
HOSTS_NAMED_MAX = 10


class Request(msgspec.Struct, frozen=True):
    """The first line and the headers of a request, as to a proxy."""

    method: str
    target: str
    version: str
    headers: tuple[tuple[str, str], ...]


class BadRequest(Exception):
    """Not HTTP as a proxy is spoken to."""


class Site:
    """What one rollout can reach."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self.pages = {plain_url(url): text for url, text in pages.items()}
        self.hosts = {urlsplit(url).hostname or "" for url in self.pages}
        self.connections = 0

    def page(self, url: str) -> str | None:
        """The page at an address; one that was put there without a query answers any."""
        plain = plain_url(url)
        found = self.pages.get(plain)
        return found if found is not None else self.pages.get(plain.partition("?")[0])


class PageProxy:
    """Serves the sites of many rollouts over one Unix socket."""

    def __init__(self, allow: tuple[str, ...] = ()) -> None:
        self.allow = tuple(entry.lower() for entry in allow)
        self.key_digest, self._tls = self_signed()
        self._sites: dict[str, Site] = {}
        self._addresses_given = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path, limit=HEAD_BYTES_MAX)

    async def close(self) -> None:
        self._sites.clear()
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.close()

    def register(self, pages: Mapping[str, str]) -> str:
        """The loopback address by which a rollout with these pages is known from now on."""
        number = self._addresses_given = (self._addresses_given + 1) % (1 << 23)
        address = str(ipaddress.IPv4Address("127.64.0.0") + number)
        self._sites[address] = Site(pages)
        return address

    def release(self, address: str) -> None:
        self._sites.pop(address, None)

    def refusal(self, address: str, url: str) -> str | None:
        """A sentence for the agent when this rollout cannot reach an address; None when it can."""
        site, parts = self._sites[address], urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
        return None if host in site.hosts or self._is_allowed(host, port) else self._sentence(site, host)

    def _sentence(self, site: Site, host: str) -> str:
        hosts = [*sorted(site.hosts), *self.allow]
        named = ", ".join(hosts[:HOSTS_NAMED_MAX]) or "no host at all"
        more = "" if len(hosts) <= HOSTS_NAMED_MAX else f" and {len(hosts) - HOSTS_NAMED_MAX} more"
        return f"{host} cannot be reached from this browser; it can reach {named}{more}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Whatever a browser sends, the proxy goes on."""
        self._open.add(writer)
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
                address = (await reader.readline()).decode("ascii", "replace").strip()
            site = self._sites.get(address)
            if site is not None and site.connections < CONNECTIONS_PER_ROLLOUT_MAX:
                site.connections += 1
                try:
                    await self._answer(site, reader, writer)
                finally:
                    site.connections -= 1
        except (OSError, EOFError, TimeoutError, ValueError, BadRequest, asyncio.LimitOverrunError) as error:
            logger.debug("browser_connection_ended", extra={"reason": repr(error)})
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, site: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        if request.method == "CONNECT":
            await self._connect(site, request, reader, writer)
            return
        url = urlsplit(request.target)
        if url.scheme != "http" or not url.hostname:
            raise BadRequest(request.target[:200])
        if url.hostname in site.hosts:
            await send_page(writer, request, site.page(request.target))
        elif self._is_allowed(url.hostname, url.port or 80):
            await pass_on(request, reader, writer)
        else:
            await send_text(writer, HTTPStatus.FORBIDDEN, self._sentence(site, url.hostname))

    async def _connect(
        self, site: Site, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, _, port = request.target.rpartition(":")
        host = host.strip("[]").lower()
        if host in site.hosts:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.drain()
            await self._serve_inside(site, host, int(port), reader, writer)
        elif self._is_allowed(host, int(port)):
            await tunnel(host, int(port), reader, writer)
        else:
            await send_text(writer, HTTPStatus.FORBIDDEN, self._sentence(site, host))

    async def _serve_inside(
        self, site: Site, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """A page of the world through a tunnel: TLS, unless the port says otherwise (ws:// asks for a tunnel too)."""
        scheme = "http" if port == DEFAULT_PORTS["http"] else "https"
        if scheme == "https":
            await writer.start_tls(self._tls)
        request = await read_request(reader)
        netloc = host if port == DEFAULT_PORTS[scheme] else f"{host}:{port}"
        await send_page(writer, request, site.page(f"{scheme}://{netloc}{request.target}"))

    def _is_allowed(self, host: str, port: int) -> bool:
        return any(fits_entry(entry, host.lower(), port) for entry in self.allow)


def fits_entry(entry: str, host: str, port: int) -> bool:
    """Whether an entry of the allow-list covers a host and a port: 80 and 443, unless the entry names one."""
    name, colon, entry_port = entry.rpartition(":") if not entry.endswith("]") else (entry, "", "")
    if not colon:
        name, ports = entry, tuple(DEFAULT_PORTS.values())
    else:
        ports = (int(entry_port),)
    name = name.strip("[]")
    if name.startswith("*."):
        return port in ports and host.endswith(name[1:])
    return port in ports and host == name


async def read_request(reader: asyncio.StreamReader) -> Request:
    async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
        head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest(first[:200])
    headers = [line.partition(":") for line in lines]
    return Request(words[0], words[1], words[2], tuple((name.strip(), value.strip()) for name, _, value in headers))


async def send_page(writer: asyncio.StreamWriter, request: Request, text: str | None) -> None:
    if text is None:
        body = b"<!doctype html><title>404</title><h1>404 Not Found</h1><p>This site has no such page.</p>"
        await send(writer, HTTPStatus.NOT_FOUND, "text/html; charset=utf-8", body)
        return
    path = urlsplit(request.target).path
    media_type = mimetypes.guess_type(path)[0] or "text/html"
    body = b"" if request.method == "HEAD" else text.encode()
    await send(writer, HTTPStatus.OK, f"{media_type}; charset=utf-8", body)


async def send_text(writer: asyncio.StreamWriter, status: HTTPStatus, text: str) -> None:
    await send(writer, status, "text/plain; charset=utf-8", text.encode())


async def send(writer: asyncio.StreamWriter, status: HTTPStatus, media_type: str, body: bytes) -> None:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {media_type}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body)
    await writer.drain()


async def pass_on(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A plain request to an allowed host. One a connection: a second one might be for somebody else."""
    url = urlsplit(request.target)
    assert url.hostname is not None
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    kept = [(name, value) for name, value in request.headers if name.lower() not in HOP_HEADERS]
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in kept), "Connection: close"]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    await exchange(url.hostname, url.port or 80, head, reader, writer)


HOP_HEADERS = frozenset({"connection", "proxy-connection", "proxy-authorization", "keep-alive", "upgrade", "te"})


async def tunnel(host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await exchange(host, port, b"", reader, writer, b"HTTP/1.1 200 Connection established\r\n\r\n")


async def exchange(
    host: str,
    port: int,
    head: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    greeting: bytes = b"",
) -> None:
    """Carry bytes both ways until one side has nothing more to say."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            address = await safe_address(host, port)
            theirs, ours = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError) as error:
        text = f"{host}:{port} does not answer: {error or 'no connection in time'}"
        await send_text(writer, HTTPStatus.BAD_GATEWAY, text)
        return
    try:
        writer.write(greeting)
        ours.write(head)
        pumps = [asyncio.create_task(pump(reader, ours)), asyncio.create_task(pump(theirs, writer))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
    finally:
        ours.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()


async def safe_address(host: str, port: int) -> str:
    """An address of the host. ConnectionRefusedError when a name leads to this machine or a private network."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not ipaddress.ip_address(address).is_global:
            raise ConnectionRefusedError(f"it resolves to {address}, which is not on the internet")
    return addresses[0]


def self_signed() -> tuple[str, ssl.SSLContext]:
    """A certificate that only this proxy has, and the digest by which the browser knows its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pages of a world")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365))
        .sign(key, hashes.SHA256())
    )
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    with tempfile.NamedTemporaryFile() as file:  # the library reads certificates from files alone
        os.chmod(file.name, 0o600)
        file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    return base64.b64encode(hashlib.sha256(public).digest()).decode(), context
