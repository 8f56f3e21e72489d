"""Hands clients' connections from the process that accepts them to the one that serves them."""

from __future__ import annotations

import socket

__all__ = ["receive_connections", "send_connection"]

# Taken from the kernel at once; the rest is taken when the loop comes by again.
MAX_AT_ONCE = 16


def send_connection(channel: socket.socket, connection: socket.socket) -> bool:
    """Hand ``connection`` over; False if the other process takes none at present. It is closed here by the caller."""
    try:
        socket.send_fds(channel, [b"c"], [connection.fileno()])
    except OSError:
        return False
    return True


def receive_connections(channel: socket.socket) -> list[socket.socket]:
    """The connections that have been handed over since the last call."""
    received = []
    for _ in range(MAX_AT_ONCE):
        try:
            data, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        except BlockingIOError:
            break
        if not data:
            break
        received += [socket.socket(fileno=descriptor) for descriptor in descriptors]
    return received
