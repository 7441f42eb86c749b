"""Ports on loopback: the ones a person asked for, or any free ones."""

import random
import socket
from collections.abc import Mapping

import psutil

from schemas.errors import BadInput

# below the range that Linux gives to outgoing connections: a port found free here stays free until we listen on it
_LOWEST, _HIGHEST = 15000, 31999


def choose_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """A port for each name: the wanted one, or for 0 a free one. Raises BadInput when a wanted port is busy or no port."""
    chosen = {name: port for name, port in wanted.items() if port != 0}
    for name, port in chosen.items():
        _require_free(name, port)
    for name in wanted:
        if name not in chosen:
            chosen[name] = _any_free(taken=set(chosen.values()))
    return {name: chosen[name] for name in wanted}


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an old connection winding down is no listener
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def is_listening(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _require_free(name: str, port: int) -> None:
    if not 0 < port < 65536:
        raise BadInput(f"{name} = {port} is no port: use 1 to 65535, or 0 for any free one")
    if not is_free(port):
        raise BadInput(
            f"{name} = {port} is in use{_holder(port)}: stop that program, or set {name} to 0 or another port"
        )


def _holder(port: int) -> str:
    """Who listens, as far as this user may know."""
    try:
        connections = psutil.net_connections("tcp")
        for connection in connections:
            if connection.laddr and connection.laddr.port == port and connection.pid and connection.status == "LISTEN":
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return ""
    return ""


def _any_free(taken: set[int]) -> int:
    candidates = random.sample(range(_LOWEST, _HIGHEST), 200)
    for port in candidates:
        if port not in taken and is_free(port):
            return port
    raise BadInput(
        f"no free port between {_LOWEST} and {_HIGHEST} in 200 tries: stop some of the programs that listen there"
    )
