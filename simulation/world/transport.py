"""SimTransport: asyncio's transport over a simulated connection. It behaves as that of asyncio's selector loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.world.loop import SimulatedLoop
    from simulation.world.network import SimSocket

__all__ = ["SimTransport"]

HIGH_WATER, LOW_WATER = 64 * 1024, 16 * 1024


class SimTransport(asyncio.Transport):
    """The transport of a protocol, for one end of a connection."""

    def __init__(self, loop: SimulatedLoop, sock: SimSocket, protocol: Any) -> None:
        super().__init__()
        self._loop = loop
        self._sock = sock
        self._endpoint = sock.endpoint
        self._protocol = protocol
        self._buffer = bytearray()
        self._has_begun = self._is_paused = self._is_closing = self._is_lost = False
        self._is_writing_paused = self._has_eof = self._is_due = self._is_room_due = False
        self._high, self._low = HIGH_WATER, LOW_WATER
        self._has_read_eof = False

    def __repr__(self) -> str:
        return f"<SimTransport {self._endpoint!r}>"

    def begin(self) -> None:
        """Call the protocol's ``connection_made``, and begin to pass received data to it."""
        self._protocol.connection_made(self)
        self._has_begun = True
        self._endpoint.transport = self if not self._is_lost else None
        self.on_readable()

    # The network calls these methods, outside of threads.

    def on_readable(self) -> None:
        """Schedule a read, because data, an end or an error has arrived."""
        if not self._is_due and not self._is_paused:
            self._is_due = True
            self._loop.post(self._read)

    def on_room(self) -> None:
        """Schedule a write of buffered data, because the other program has read data."""
        if self._buffer and not self._is_room_due:
            self._is_room_due = True
            self._loop.post(self._write_on)

    # The event loop calls these methods.

    def _read(self) -> None:
        self._is_due = False
        endpoint = self._endpoint
        if self._is_closing or self._is_paused or not self._has_begun:
            if endpoint.error is not None and self._is_closing:
                self._lose(endpoint.error)
            return
        if endpoint.received:
            self._protocol.data_received(endpoint.read())
            if endpoint.received or endpoint.has_eof or endpoint.error is not None:
                self.on_readable()
        elif endpoint.error is not None:
            self._lose(endpoint.error)
        elif endpoint.has_eof and not self._has_read_eof:
            self._has_read_eof = True
            if not self._protocol.eof_received():
                self.close()

    def _write_on(self) -> None:
        self._is_room_due = False
        endpoint = self._endpoint
        if endpoint.error is not None:
            if self._buffer:
                self._lose(endpoint.error)
            return
        size = min(endpoint.room, len(self._buffer))
        if size:
            data = bytes(self._buffer[:size])
            del self._buffer[:size]
            endpoint.send(data)
        if self._is_writing_paused and len(self._buffer) <= self._low:
            self._is_writing_paused = False
            self._protocol.resume_writing()
        if not self._buffer:
            if self._is_closing:
                self._loop.call_soon(self._end, None)
            elif self._has_eof:
                endpoint.shut_down_writing()

    def _lose(self, error: Exception | None) -> None:
        """End the connection at once, and drop the data that was not sent."""
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._buffer.clear()
        self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        if self._protocol is None:
            return
        self._is_lost = self._is_closing = True
        protocol, self._protocol = self._protocol, None
        try:
            protocol.connection_lost(error)
        finally:
            self._endpoint.close()

    # The methods of asyncio's ``Transport``.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {
            "socket": self._sock,
            "peername": self._sock.getpeername(),
            "sockname": self._sock.getsockname(),
        }.get(name, default)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if not self._buffer:
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        self._lose(None)

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.on_readable()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._has_eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._is_lost:
            return
        data = bytes(data)
        endpoint = self._endpoint
        if not self._buffer:
            if endpoint.error is not None or (endpoint.is_closed and not self._is_closing):
                self._lose(endpoint.error or ConnectionResetError(104, "Connection reset by peer"))
                return
            size = min(endpoint.room, len(data))
            if size:
                endpoint.send(data[:size])
            data = data[size:]
        self._buffer += data
        if len(self._buffer) > self._high and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._is_closing or self._has_eof:
            return
        self._has_eof = True
        if not self._buffer:
            self._endpoint.shut_down_writing()
