"""Free ports, which no other test gets for a long time.

If ``bind`` gets port 0, the system chooses one of the ports for outgoing connections. A server that restarts there may
find its port in use by such a connection. So this module selects lower ports, in turn for all test processes.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from pathlib import Path

__all__ = ["free_port", "free_ports", "is_bindable"]

# Above the ports of the example scripts (15001 to 15003, 16379) and of Mooncake's clients (tests/conftest.py: 17200 to
# 19999), below Linux' ip_local_port_range.
_PORTS = range(20000, 32500)
_DEALT = Path(tempfile.gettempdir()) / f"kvstore-tests-port-{os.getuid()}"


def free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports of loopback that are free now."""
    with _DEALT.open("a+") as dealt:
        fcntl.flock(dealt, fcntl.LOCK_EX)
        dealt.seek(0)
        first = int(dealt.read() or _PORTS.start) - _PORTS.start
        in_turn = (_PORTS[(first + i) % len(_PORTS)] for i in range(1, len(_PORTS)))
        ports = list(itertools.islice(filter(is_bindable, in_turn), count))
        dealt.truncate(0)
        dealt.write(str(ports[-1]))
    return ports


def free_port() -> int:
    """Return a TCP port of loopback that is free now."""
    return free_ports(1)[0]


def is_bindable(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether the port is free. Closed connections do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
