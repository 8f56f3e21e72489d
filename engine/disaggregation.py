"""Prefill -> decode hand-over through the pool: P saves the prompt's blocks and tells D, which loads them.

The wire is one TCP connection per request, from P to D's connector port, with one JSON object a line::

    P -> D   {"type": "begin", "request_id": R}                 P has the request and will compute its prompt
    P -> D   {"type": "alive"}                                  every second until it is done
    P -> D   {"type": "ready", "own_cached_tokens": n, "pool_cached_tokens": m}     the blocks are in the pool
    P -> D   {"type": "failed", "reason": "..."}                they are not, and will not be

D never depends on any of it: silence for ``SILENCE_SECONDS``, a lost connection or "failed" only mean that D computes
the prompt itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Handed", "HandoverReceiver", "HandoverSender", "hand_over"]

log = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0
SILENCE_SECONDS = 5.0


@dataclass(frozen=True)
class Handed:
    """P's word that the prompt's blocks are in the pool, and where P had their KV from, in tokens."""

    own_cached_tokens: int
    pool_cached_tokens: int


class HandoverReceiver:
    """D's side: listens on the connector port and lets requests wait for their prompt's blocks."""

    def __init__(self, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._silence = silence_seconds
        self._server: asyncio.Server | None = None
        # By request id, from whichever comes first, the request or P's connection, until the request has its answer.
        self._pending: dict[str, asyncio.Future[asyncio.Future[Handed | None]]] = {}

    @property
    def port(self) -> int:
        """The connector port, once started."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self, connector: socket.socket) -> None:
        """Listen on a bound socket."""
        self._server = await asyncio.start_server(self._serve, sock=connector)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def wait(self, request_id: str) -> Handed | None:
        """What P says of this request's prompt; None when D is to compute it itself."""
        begun = self._future(request_id)
        try:
            result = await asyncio.wait_for(asyncio.shield(begun), self._silence)
            return await asyncio.shield(result)  # it is P's connection that sets it
        except asyncio.TimeoutError:
            log.warning(
                "%s: no word of a prefill instance in %g s; computing the prompt here", request_id, self._silence
            )
            return None
        finally:
            self._pending.pop(request_id, None)

    def _future(self, request_id: str) -> asyncio.Future[asyncio.Future[Handed | None]]:
        if request_id not in self._pending:
            self._pending[request_id] = asyncio.get_running_loop().create_future()
        return self._pending[request_id]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        result: asyncio.Future[Handed | None] = asyncio.get_running_loop().create_future()
        request_id = "?"
        try:
            first = await self._message(reader)
            if first.get("type") != "begin" or not isinstance(first.get("request_id"), str):
                raise ValueError(f"expected a begin message, got {first}")
            request_id = first["request_id"]
            begun = self._future(request_id)
            if not begun.done():
                begun.set_result(result)
            result.set_result(await self._outcome(reader))
        except Exception as exc:  # whatever P, or a stranger, sends or fails to send
            log.warning(
                "%s: the hand-over broke off (%s: %s); computing the prompt here", request_id, type(exc).__name__, exc
            )
        finally:
            if not result.done():
                result.set_result(None)
            writer.close()
            # The request may still be on its way from the router; one that never comes must not be kept for good.
            asyncio.get_running_loop().call_later(self._silence, self._forget, request_id, result)

    def _forget(self, request_id: str, result: asyncio.Future[Handed | None]) -> None:
        begun = self._pending.get(request_id)
        if begun is not None and begun.done() and begun.result() is result:
            del self._pending[request_id]

    async def _outcome(self, reader: asyncio.StreamReader) -> Handed:
        while True:
            message = await self._message(reader)
            if message["type"] == "ready":
                return Handed(int(message["own_cached_tokens"]), int(message["pool_cached_tokens"]))
            if message["type"] != "alive":
                raise ValueError(str(message.get("reason", message)))

    async def _message(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        line = await asyncio.wait_for(reader.readline(), self._silence)
        if not line:
            raise EOFError("the prefill instance closed the connection")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"expected an object, got {message!r}")
        return message


class HandoverSender:
    """P's side of one request's hand-over; made by ``hand_over``."""

    def __init__(self, writer: asyncio.StreamWriter | None) -> None:
        self._writer = writer

    def send(self, **message: object) -> None:
        """Send one message; lost silently when D has gone (D then computes, or is dead)."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")


@contextlib.asynccontextmanager
async def hand_over(host: str, port: int, request_id: str) -> AsyncIterator[HandoverSender]:
    """Tell D that its prompt is being computed; yields the sender for ``ready`` or ``failed``.

    Leaving without either, by an exception too, closes the connection, which D takes for a failure.
    """
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), SILENCE_SECONDS)
    except (OSError, asyncio.TimeoutError) as exc:
        log.warning("%s: decode instance %s:%d cannot be told of the hand-over: %s", request_id, host, port, exc)
        yield HandoverSender(None)
        return
    sender = HandoverSender(writer)
    sender.send(type="begin", request_id=request_id)

    async def stay_alive() -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            sender.send(type="alive")

    alive = asyncio.create_task(stay_alive())
    try:
        yield sender
    finally:
        alive.cancel()
        writer.close()
