"""Binding a port that is in use."""

from __future__ import annotations

import socket
import struct

import pytest

from kvcommon.ports import bind_patiently
from tests.support.ports import free_port

no_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), pytest.param(socket.AF_INET6, "::", marks=no_ipv6)]
)
def test_a_port_where_a_server_listens_is_refused_at_once(family: socket.AddressFamily, host: str) -> None:
    waits: list[None] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(family) as bound,
        pytest.raises(OSError, match="in use"),
    ):
        bind_patiently(bound, (host, server.getsockname()[1]), lambda: waits.append(None))
    assert not waits


def test_bind_waits_for_a_port_that_a_client_connection_uses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        # The kernel never gives this port to a client of another test.
        client = socket.create_connection(server.getsockname(), source_address=("127.0.0.1", free_port()))
        address = client.getsockname()
        waits: list[None] = []

        def on_wait() -> None:
            waits.append(None)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
            client.close()

        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind_patiently(bound, address, on_wait)
        assert (bound.getsockname(), len(waits)) == (address, 1)
