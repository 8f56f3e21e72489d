"""Fixtures of the tests of the examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.support.ports import is_bindable
from tests.support.waiting import wait_until

PORTS = (15001, 15002, 15003, 52400, 52500, 52600, 52700, 52780, 52790, 52800)


@pytest.fixture(scope="session")
def require_ports() -> Callable[[Sequence[int]], None]:
    """Return a function that waits for free ports. It skips the test if a port stays in use for 80 s."""

    def require(ports: Sequence[int]) -> None:
        for port in ports:
            try:
                wait_until(lambda port=port: is_bindable(port), f"port {port}", 80)  # type: ignore[misc]
            except AssertionError:
                pytest.skip(f"port {port}, which the script needs, is in use on this machine")

    return require


@pytest.fixture(scope="session")
def free_ports(require_ports: Callable[[Sequence[int]], None]) -> None:
    """Wait until the fixed ports of the example scripts are free."""
    require_ports(PORTS)


@pytest.fixture
def ports_free_again(require_ports: Callable[[Sequence[int]], None]) -> None:
    """Wait until the ports are free, before each test that starts scripts itself."""
    require_ports(PORTS)
