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

# A full prefix index takes 9 to 18 MB (``PrefixIndex.dump``), and more if there were many instances.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
# Maximum number of connections to receive in one step. Further ones are received in the next turn of the event loop.
MAX_AT_ONCE = 16


class MessageChannel(asyncio.Protocol):
    """One end of a channel for messages. A message is a list of plain values, encoded as msgpack."""

    def __init__(self, on_message: Callable[[list[Any]], None], on_lost: Callable[[], None]) -> None:
        """
        Args:
            on_message: called with each received message, in order.
            on_lost: called once, when the other process has closed its end or has ended.
        """
        self._on_message = on_message
        self._on_lost = on_lost
        # A client's text may contain half a surrogate pair, because JSON allows it as an escape.
        self._unpacker = msgpack.Unpacker(
            strict_map_key=False, max_buffer_size=MAX_MESSAGE_BYTES, unicode_errors="surrogatepass"
        )
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the channel, which is open now. asyncio calls this."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Decode received bytes, and handle the messages that are complete. asyncio calls this."""
        self._unpacker.feed(data)
        for message in self._unpacker:
            try:
                self._on_message(message)
            except Exception:  # continue with the next message
                _log.exception("a message from another process could not be handled: %s", reprlib.repr(message))

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the other process has closed its end. asyncio calls this."""
        self._on_lost()

    def send_message(self, *message: Any) -> None:
        """Send a message. It is buffered until the other process reads it, and lost if that process ends first.

        Raises:
            ValueError: the message is nested too deeply, or contains a number of more than 64 bits.
            TypeError: the message contains something that is not a plain value.
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
    """Return a channel over the socket ``end``, which is one of a connected pair."""
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_unix_connection(lambda: MessageChannel(on_message, on_lost), sock=end)
    return channel


def pack(message: Any) -> bytes:
    """Encode a message, or a part of a message.

    Raises:
        ValueError: it is nested too deeply, or contains a number of more than 64 bits.
        TypeError: it contains something that is not a plain value.
    """
    try:
        return cast(bytes, msgpack.packb(message))
    except UnicodeEncodeError:  # the general encoding takes 50 % longer
        return cast(bytes, msgpack.packb(message, unicode_errors="surrogatepass"))
    except OverflowError as exc:
        raise ValueError(f"a message contains a number of more than 64 bits: {exc}") from exc


def unpack(data: bytes) -> Any:
    """Decode bytes that ``pack`` has returned.

    Raises:
        ValueError: the bytes are invalid.
    """
    try:
        return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")
    except (msgpack.UnpackException, TypeError) as exc:
        raise ValueError(f"the bytes are not a message: {exc!r}") from exc


def send_connection(channel: socket.socket, connection: socket.socket) -> bool:
    """Pass ``connection`` to the other process. Return False if that process accepts no connection now.

    The caller closes its own copy of ``connection``.
    """
    try:
        socket.send_fds(channel, [b"c"], [connection.fileno()])
    except OSError:
        return False
    return True


def receive_connections(channel: socket.socket) -> tuple[int, list[socket.socket]]:
    """Receive up to ``MAX_AT_ONCE`` connections that the supervisor has passed. Return their number, and the sockets.

    A connection is lost if this process has no file descriptor left for it. It is counted, but has no socket.
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
            _log.error("a client's connection was lost because this process has no file descriptor left")
        received += [socket.socket(fileno=descriptor) for descriptor in descriptors]
    return MAX_AT_ONCE, received
