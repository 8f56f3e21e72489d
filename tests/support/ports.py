"""Ports that are free now."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["free_port", "free_ports", "is_bindable"]


def free_ports(count: int) -> list[int]:
    """``count`` different loopback TCP ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def free_port() -> int:
    """One loopback TCP port that nobody listens on at this moment."""
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
