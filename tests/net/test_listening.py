"""Where servers listen."""

import socket
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.net.listening import free_port, listening_socket, url_of


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_server_is_reached_at_the_url_that_it_says(host: str) -> None:
    if not is_of_this_machine(host):  # such as ::1 where there is no IPv6
        with pytest.raises(ConfigError, match=f"host: expected .* got {host}"):
            listening_socket(host, 0)
        return
    with listening_socket(host, 0) as listening:
        address, port = url_of(listening).removeprefix("http://").rsplit(":", 1)
        socket.create_connection((address.strip("[]"), int(port))).close()


def is_of_this_machine(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as any_port:
            any_port.bind((host, 0))
    except OSError:
        return False
    return True


def test_a_host_that_is_not_this_machine_s_and_a_port_that_is_taken_are_told_apart() -> None:
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(ConfigError, match=f"host: expected .* got {host}"):
            listening_socket(host, 0)
    with listening_socket("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="port: expected a free one"):
        listening_socket("127.0.0.1", taken.getsockname()[1])


def test_a_free_port_is_none_that_the_system_gives_to_a_program_that_asks_for_any() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        port = free_port()
        assert port < lowest
        with listening_socket("127.0.0.1", port):
            assert free_port() != port
