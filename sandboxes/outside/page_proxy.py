"""The only way out of the browser's jail: an HTTP proxy on a Unix socket that serves each rollout its own set of hosts.

A connection begins with a line that identifies the rollout by its loopback address (see forwarder.py); then it is
HTTP/1.1 as to any proxy. A request is, in this order:

* for a host of the rollout's world: answered here, by http or https; https by a certificate made at the start, whose
  key the browser is told to trust;
* for a host on the allow-list: forwarded; https as a tunnel, so that the browser checks the real certificate;
* anything else: refused with 403 and an explanation.

A name on the allow-list that resolves to this machine or a private network is refused: also to a public address that
this machine has, and to an IPv6 address that a gateway turns into such an IPv4 address. An IP address on the list is
used as it is.

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
from collections.abc import Coroutine, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from replayground.sandboxes.worlds.world import plain_url

logger = logging.getLogger(__name__)

# Bounds what one connection can make this process hold: the agent chooses what the browser sends.
HEAD_BYTES_MAX = 64 * 1024
CHUNK_BYTES = 64 * 1024
CONNECT_TIMEOUT_SECONDS = 15.0
HEAD_TIMEOUT_SECONDS = 60.0
HALF_CLOSED_SECONDS_MAX = 60.0
CONNECTIONS_PER_ROLLOUT_MAX = 64
DEFAULT_PORTS = {"http": 80, "https": 443}
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# All IPv6 addresses of the internet, and the forms of an IPv4 address that are judged as one. Python counts more as
# global: old and translated forms of IPv4 addresses, addresses of one site, and ranges that nobody was given.
OF_THE_INTERNET = tuple(map(ipaddress.IPv6Network, ("2000::/3", "64:ff9b::/96", "::ffff:0:0/96")))
ISATAP = (0x0000_5EFE, 0x0200_5EFE)
HOSTS_NAMED_MAX = 10


class Request(msgspec.Struct, frozen=True):
    """The request line and the headers of a request to a proxy."""

    method: str
    target: str
    version: str
    headers: tuple[tuple[str, str], ...]


class BadRequest(Exception):
    """The request is not HTTP/1.x in the form for a proxy."""


class Site:
    """The pages and hosts of one rollout's world."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self.pages = {plain_url(url): text for url, text in pages.items()}
        self.hosts = {urlsplit(url).hostname or "" for url in self.pages}
        self.connections = 0

    def page(self, url: str) -> str | None:
        """The page at a URL; a page stored without a query is returned for any query."""
        plain = plain_url(url)
        found = self.pages.get(plain)
        return found if found is not None else self.pages.get(plain.partition("?")[0])


class PageProxy:
    """The proxy of one browser: serves the sites of many rollouts over one Unix socket."""

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
        """Register a rollout with these pages; returns its loopback address."""
        # 2**23 addresses from 127.64.0.0 on, so that none is reused soon.
        number = self._addresses_given = (self._addresses_given + 1) % (1 << 23)
        address = str(ipaddress.IPv4Address("127.64.0.0") + number)
        self._sites[address] = Site(pages)
        return address

    def release(self, address: str) -> None:
        self._sites.pop(address, None)

    def refusal(self, address: str, url: str) -> str | None:
        """An error message for the agent when this rollout cannot reach a URL; None when it can."""
        site, parts = self._sites[address], urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
        return None if host in site.hosts or self._is_allowed(host, port) else self._sentence(site, host)

    def _sentence(self, site: Site, host: str) -> str:
        hosts = [*sorted(site.hosts), *self.allow]
        named = ", ".join(hosts[:HOSTS_NAMED_MAX]) or "no host at all"
        more = "" if len(hosts) <= HOSTS_NAMED_MAX else f" and {len(hosts) - HOSTS_NAMED_MAX} more"
        return f"{host} cannot be reached from this browser; it can reach {named}{more}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. Errors are logged and close this connection only."""
        self._open.add(writer)
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_SECONDS):
                address = (await reader.readline()).decode("ascii", "replace").strip()
            site = self._sites.get(address)
            # An unknown rollout, or one with too many connections: closed without a response.
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
        # The world comes first: its pages hide a real host of the same name.
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
        """Answer a request to a page of the world inside a CONNECT tunnel: TLS, except on port 80."""
        # Browsers use CONNECT for ws:// too, which is not encrypted.
        scheme = "http" if port == DEFAULT_PORTS["http"] else "https"
        if scheme == "https":
            await writer.start_tls(self._tls)
        request = await read_request(reader)
        netloc = host if port == DEFAULT_PORTS[scheme] else f"{host}:{port}"
        await send_page(writer, request, site.page(f"{scheme}://{netloc}{request.target}"))

    def _is_allowed(self, host: str, port: int) -> bool:
        return any(fits_entry(entry, host.lower(), port) for entry in self.allow)


def fits_entry(entry: str, host: str, port: int) -> bool:
    """Whether an entry of the allow-list covers this host and port. An entry without a port covers 80 and 443."""
    # An entry that ends in "]" is an IPv6 address without a port.
    name, colon, entry_port = entry.rpartition(":") if not entry.endswith("]") else (entry, "", "")
    if not colon:
        name, ports = entry, tuple(DEFAULT_PORTS.values())
    else:
        ports = (int(entry_port),)
    name = name.strip("[]")
    if name.startswith("*."):
        # With the dot: *.example.org covers neither example.org nor badexample.org.
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
    """Forward one plain http request to an allowed host."""
    url = urlsplit(request.target)
    assert url.hostname is not None
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    kept = [(name, value) for name, value in request.headers if name.lower() not in HOP_HEADERS]
    # Connection: close, because a browser reuses a connection to its proxy: the next request on it may be for another
    # host, which nobody would check.
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in kept), "Connection: close"]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    await exchange(url.hostname, url.port or 80, head, reader, writer)


# Headers about this connection only. Not Transfer-Encoding: the body is forwarded as it comes.
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
    """Connect to a host and forward bytes both ways until both sides have ended. 502 when it cannot be reached."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            # Connects to the address that was checked: a second lookup of the name could give another one.
            address = await safe_address(host, port)
            theirs, ours = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError) as error:
        text = f"{host}:{port} does not answer: {error or 'no connection in time'}"
        await send_text(writer, HTTPStatus.BAD_GATEWAY, text)
        return
    try:
        writer.write(greeting)
        ours.write(head)
        await both(pump(reader, ours), pump(theirs, writer))
    finally:
        ours.close()


async def both(*directions: Coroutine[Any, Any, None]) -> None:
    """Wait for both directions of a connection. One that ends leaves the other some time: a request may be sent whole
    before its response comes. One that breaks ends the other at once."""
    pumps = [asyncio.create_task(direction) for direction in directions]
    try:
        ended, running = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        if running and all(task.exception() is None for task in ended):
            await asyncio.wait(running, timeout=HALF_CLOSED_SECONDS_MAX)
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward until the sender ends, then tell the receiver. What the receiver sends is not affected."""
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def safe_address(host: str, port: int) -> str:
    """An IP address of the host. ConnectionRefusedError when a name resolves to this machine or a private network."""
    with contextlib.suppress(ValueError):
        # An address on the allow-list is meant as it is written.
        return str(ipaddress.ip_address(host))
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    # Otherwise whoever controls a name on the list could point it at a service on this machine, such as the broker.
    for address in addresses:
        if not is_elsewhere(ipaddress.ip_address(address)):
            raise ConnectionRefusedError(f"it resolves to {address}, which is not on the internet")
    return addresses[0]


def is_elsewhere(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is on the internet and none of this machine's own."""
    if address.is_multicast:
        return False
    if address.version == 6 and not any(address in network for network in OF_THE_INTERNET):
        return False
    return all(part.is_global and not is_own(part) for part in (address, *embedded(address)))


def embedded(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 address that a gateway would turn this IPv6 address into: NAT64, 6to4, Teredo, ISATAP or an IPv4-mapped
    one."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in NAT64 or int(address) >> 32 & 0xFFFFFFFF in ISATAP:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [part for part in found if part is not None]


def is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether this machine has the address, also a public one. Nothing is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket only looks up the route. The kernel reaches an address of its own from that
        # address itself.
        try:
            probe.connect((str(address), 9))
        # No route: the connection that follows will say so.
        except OSError:
            return False
        return ipaddress.ip_address(probe.getsockname()[0]) == address


def self_signed() -> tuple[str, ssl.SSLContext]:
    """Make a key with a self-signed certificate; returns the digest of the public key and the TLS context."""
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
    # The proxy does not speak HTTP/2.
    context.set_alpn_protocols(["http/1.1"])
    # ssl loads certificates only from files.
    with tempfile.NamedTemporaryFile() as file:
        os.chmod(file.name, 0o600)
        file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    return base64.b64encode(hashlib.sha256(public).digest()).decode(), context
