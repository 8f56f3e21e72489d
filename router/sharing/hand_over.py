"""Hands clients' connections from the process that accepts them to the one that serves them."""

from __future__ import annotations

import logging
import socket

__all__ = ["receive_connections", "send_connection"]

_log = logging.getLogger("router.sharing.hand_over")

# Taken from the kernel at once; the rest is taken when the loop comes by again.
MAX_AT_ONCE = 16


def send_connection(channel: socket.socket, connection: socket.socket) -> bool:
    """Hand ``connection`` over; False if the other process takes none at present. It is closed here by the caller."""
    try:
        socket.send_fds(channel, [b"c"], [connection.fileno()])
    except OSError:
        return False
    return True


def receive_connections(channel: socket.socket) -> tuple[int, list[socket.socket]]:
    """The connections that have been handed over since the last call, and how many were to be.

    One is lost where this process has no descriptor left for it; who gave it counts it as given.
    """
    received: list[socket.socket] = []
    for number in range(MAX_AT_ONCE):
        try:
            data, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        except BlockingIOError:
            return number, received
        if not data:
            return number, received
        if not descriptors:
            _log.error("a client's connection is lost, as this process has no descriptor left for it")
        received += [socket.socket(fileno=descriptor) for descriptor in descriptors]
    return MAX_AT_ONCE, received
