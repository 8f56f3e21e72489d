"""The two sockets between a supervisor and each of its workers: one for messages, one for clients' connections."""

from __future__ import annotations

import asyncio
import logging
import reprlib
import socket
from collections.abc import Callable
from typing import Any, cast

import msgpack

__all__ = ["MessageChannel", "open_channel", "pack", "receive_connections", "send_connection", "unpack"]

_log = logging.getLogger("router.sharing.channels")

# A full prefix index takes 13 MB (``PrefixIndex.dump``), or 250 MB in the worst case.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
# Maximum number of connections to receive in one step; the rest follows in the next turn of the event loop.
MAX_AT_ONCE = 16


class MessageChannel(asyncio.Protocol):
    """One end. A message is a list of plain values, encoded as https://msgpack.org."""

    def __init__(self, on_message: Callable[[list[Any]], None], on_lost: Callable[[], None]) -> None:
        """
        Args:
            on_message: called with each received message, in order.
            on_lost: called once, when the other end is gone.
        """
        self._on_message = on_message
        self._on_lost = on_lost
        # Text from outside may contain half a surrogate pair, which JSON allows as an escape.
        self._unpacker = msgpack.Unpacker(
            strict_map_key=False, max_buffer_size=MAX_MESSAGE_BYTES, unicode_errors="surrogatepass"
        )
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle asyncio's event."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle asyncio's event."""
        self._unpacker.feed(data)
        for message in self._unpacker:
            try:
                self._on_message(message)
            except Exception:  # the following messages are processed nevertheless
                _log.exception("a message of another process was not understood: %s", reprlib.repr(message))

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle asyncio's event."""
        self._on_lost()

    def send_message(self, *message: Any) -> None:
        """Send a message. It is buffered until the other end reads it, and lost if that is gone.

        Raises:
            ValueError: it cannot be encoded: it is nested too deeply, or has a number of more than 64 bits.
            TypeError: it contains something that is not a plain value.
        """
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(pack(message))

    def close(self) -> None:
        """Close this end after all messages have been written."""
        assert self._transport is not None
        self._transport.close()


async def open_channel(
    end: socket.socket, on_message: Callable[[list[Any]], None], on_lost: Callable[[], None]
) -> MessageChannel:
    """Return the channel over ``end``, one of a pair of sockets."""
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_unix_connection(lambda: MessageChannel(on_message, on_lost), sock=end)
    return channel


def pack(message: Any) -> bytes:
    """Return the bytes of a message, or of a part of one.

    Raises:
        ValueError: it is nested too deeply, or has a number of more than 64 bits.
        TypeError: it contains something that is not a plain value.
    """
    try:
        return cast(bytes, msgpack.packb(message))
    except UnicodeEncodeError:  # the general encoding takes 50 % longer
        return cast(bytes, msgpack.packb(message, unicode_errors="surrogatepass"))
    except OverflowError as exc:
        raise ValueError(f"a message has a number of more than 64 bits: {exc}") from exc


def unpack(data: bytes) -> Any:
    """Decode the bytes from ``pack``.

    Raises:
        ValueError: the bytes are invalid.
    """
    try:
        return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")
    except (msgpack.UnpackException, TypeError) as exc:
        raise ValueError(f"it is no message: {exc!r}") from exc


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
