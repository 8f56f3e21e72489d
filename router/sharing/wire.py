"""Wire: messages between two processes of one machine, over a socket that both inherited."""

from __future__ import annotations

import asyncio
import logging
import reprlib
import socket
from collections.abc import Callable
from typing import Any, cast

import msgpack

__all__ = ["Wire", "open_wire", "pack", "unpack"]

_log = logging.getLogger("router.sharing.wire")

# A full prefix index takes 13 MB (``PrefixIndex.dump``), or 250 MB in the worst case.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024


class Wire(asyncio.Protocol):
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


async def open_wire(
    channel: socket.socket, on_message: Callable[[list[Any]], None], on_lost: Callable[[], None]
) -> Wire:
    """Return the wire over ``channel``."""
    loop = asyncio.get_running_loop()
    _, wire = await loop.create_unix_connection(lambda: Wire(on_message, on_lost), sock=channel)
    return wire
