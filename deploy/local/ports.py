"""Ports on loopback: those that a config names, or free ones."""

import random
import socket
from collections.abc import Mapping

import psutil

from replayground.schemas.errors import BadInput

# Below the range from which Linux takes ports of outgoing connections (32768 and up): a port that is free now is not
# taken by a connection before our program listens on it.
_LOWEST, _HIGHEST = 15000, 31999


def choose_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """A port for each name: the wanted one, or a free one for 0. Raises BadInput for a busy or invalid port."""
    chosen = {name: port for name, port in wanted.items() if port != 0}
    for name, port in chosen.items():
        _require_free(name, port)
    # Wanted ports are taken first, so that no free choice collides with one of them.
    for name in wanted:
        if name not in chosen:
            chosen[name] = _any_free(taken=set(chosen.values()))
    return {name: chosen[name] for name in wanted}


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Without it, closed connections in TIME_WAIT make a port look busy for a minute after its server ended.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    """Names the process that listens on a port; empty when this user may not see it."""
    try:
        connections = psutil.net_connections("tcp")
        for connection in connections:
            if connection.laddr and connection.laddr.port == port and connection.pid and connection.status == "LISTEN":
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return ""
    return ""


def _any_free(taken: set[int]) -> int:
    # Random and not the next free one: two stacks that start at the same time rarely choose the same port.
    candidates = random.sample(range(_LOWEST, _HIGHEST), 200)
    for port in candidates:
        if port not in taken and is_free(port):
            return port
    raise BadInput(
        f"no free port between {_LOWEST} and {_HIGHEST} in 200 tries: stop some of the programs that listen there"
    )
