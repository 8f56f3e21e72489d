"""Ports that are free now, and that no other test is given for long.

The system's own choice (``bind`` to port 0) is from the ports of connections' near ends: a server that starts there
again after it was killed may find its port taken by anybody's connection. So ports are dealt out from below those, in
turn over all test processes of the machine.
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
    """``count`` different loopback TCP ports that nobody has at this moment."""
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
    """One loopback TCP port that nobody has at this moment."""
    return free_ports(1)[0]


def is_bindable(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nobody has the port; connections that were closed do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
