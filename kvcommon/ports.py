"""Binds a server's port. If Linux still holds the port for a closed outgoing connection (TIME_WAIT), waits for it."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from typing import Any

__all__ = ["bind_patiently"]

# Linux gives clients the ports from 32768 to 60999, and reserves each for 60 s after its connection is closed.
CLOSED_CONNECTION_SECONDS = 70.0
_PAUSE_SECONDS = 0.2


def bind_patiently(bound: socket.socket, address: tuple[Any, ...], on_wait: Callable[[], None]) -> None:
    """Bind a socket to an address. If a closed connection still holds the port, wait until Linux releases the port.

    Args:
        on_wait: called once, before the first wait.

    Raises:
        OSError: a server listens at the address, the address does not belong to this machine, or the port is still
            in use after ``CLOSED_CONNECTION_SECONDS``.
    """
    give_up_at, has_waited = time.monotonic() + CLOSED_CONNECTION_SECONDS, False
    while True:
        try:
            return bound.bind(address)
        except OSError as exc:
            is_held = exc.errno == errno.EADDRINUSE and not _is_served(bound.family, address)
            if not is_held or time.monotonic() >= give_up_at:
                raise
        if not has_waited:
            on_wait()
            has_waited = True
        time.sleep(_PAUSE_SECONDS)


def _is_served(family: int, address: tuple[Any, ...]) -> bool:
    """Return whether a server listens at the address. A server at ``::`` usually gets IPv4 connections, too."""
    tried = [(family, address)]
    if family == socket.AF_INET6 and address[0] == "::":
        tried.append((socket.AF_INET, ("127.0.0.1", address[1])))
    return any(_accepts(*each) for each in tried)


def _accepts(family: int, address: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0
