"""What the tests of the examples share."""

from __future__ import annotations

import pytest

from tests.support.waiting import port_answers

PORTS = (15001, 15002, 15003, 52400, 52500, 52600, 52700, 52800)


@pytest.fixture(scope="session")
def free_ports() -> None:
    """Skip where something else listens on a port that the example scripts need; theirs are fixed."""
    for port in PORTS:
        if port_answers(port):
            pytest.skip(f"port {port}, which the example scripts need, is in use on this machine")
