import os
import socket

import pytest

from replayground.deploy.local.ports import choose_ports, is_free, is_listening
from replayground.schemas.errors import BadInput


def test_free_ports_are_distinct_and_free() -> None:
    ports = choose_ports(dict.fromkeys("abcdefgh", 0))
    assert len(set(ports.values())) == 8
    assert all(is_free(port) for port in ports.values())


def test_a_wanted_port_is_kept() -> None:
    wanted = choose_ports({"any": 0})["any"]
    assert choose_ports({"local.kafka_port": wanted, "other": 0})["local.kafka_port"] == wanted


def test_a_busy_port_is_named_with_its_holder() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert is_listening(port)
        with pytest.raises(BadInput) as caught:
            choose_ports({"local.kafka_port": port})
    assert f"local.kafka_port = {port} is in use by process {os.getpid()}" in str(caught.value)
    assert "set local.kafka_port to 0 or another port" in str(caught.value)
    assert not is_listening(port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(BadInput, match="is no port"):
        choose_ports({"traces.port": port})
