"""What the tests of the examples share."""

from __future__ import annotations

import socket

import pytest

PORTS = (15001, 15002, 15003, 52400, 52500, 52600, 52700, 52800)


@pytest.fixture(scope="session")
def free_ports() -> None:
    """Skip where something else has a port that the example scripts need; theirs are fixed."""
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as exc:
                pytest.skip(f"port {port}, which the example scripts need, cannot be had: {exc}")
