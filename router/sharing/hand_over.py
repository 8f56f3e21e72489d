"""Passes clients' connections from the process that accepts them to the one that serves them."""

from __future__ import annotations

import logging
import socket

__all__ = ["receive_connections", "send_connection"]

_log = logging.getLogger("router.sharing.hand_over")

# Maximum number of connections to receive in one step; the rest follows in the next turn of the event loop.
MAX_AT_ONCE = 16


def send_connection(channel: socket.socket, connection: socket.socket) -> bool:
    """Pass ``connection`` on; return False if the other process accepts none at present. The caller closes it here."""
    try:
        socket.send_fds(channel, [b"c"], [connection.fileno()])
    except OSError:
        return False
    return True


def receive_connections(channel: socket.socket) -> tuple[int, list[socket.socket]]:
    """Return the connections that were passed since the last call, and how many were sent.

    A connection is lost if this process has no file descriptor left for it; the sender counts it as passed.
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
