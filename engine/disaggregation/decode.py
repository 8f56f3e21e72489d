"""The decode instance's side of hand-overs: listens on the connector port, reserves and verifies blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engine.core import Prefilled
from engine.disaggregation.memory import BlockMemory
from engine.disaggregation.wire import (
    LINE_LIMIT,
    SILENCE_SECONDS,
    Prompt,
    decode_logprobs,
    decode_number,
    receive_message,
    send_message,
    wait_at_most,
)
from engine.scheduling.scheduler import Reservation

__all__ = ["HandoverReceiver", "HandoverResult"]

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 10.0
"""Time after which the blocks of a hand-over are released if the request has not arrived at the decode instance."""
LATE_SECONDS = 3.0
"""Time in which written bytes may still arrive after the prefill instance has stopped, or its process has ended."""
UNREACHABLE_SECONDS = 60.0
"""Time in which written bytes may still arrive if the host of the prefill instance cannot be reached."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

_T = TypeVar("_T")


@dataclass(frozen=True)
class HandoverResult:
    """The result of a hand-over that did not fail.

    Attributes:
        own_cached_tokens: number of prompt tokens that the prefill instance had in its own cache.
        pool_cached_tokens: number of prompt tokens that the prefill instance loaded from the pool.
        prefilled: the prompt's KV in blocks of this instance, if the transfer was direct. Its owner must submit it to
            the engine, or cancel its reservation. None if the KV is in the pool.
    """

    own_cached_tokens: int
    pool_cached_tokens: int
    prefilled: Prefilled | None = None


class _GivenUp(Exception):
    """Raised in the handler of a connection when its hand-over was given up, because no request waits for it."""


class _Handover:
    """One hand-over: a connection from a prefill instance and the request that waits for its result.

    This object owns ``reservation`` until it passes it to the request in a ``HandoverResult``.
    """

    def __init__(self, request_id: str, prompt: Prompt, memory: BlockMemory | None) -> None:
        loop = asyncio.get_running_loop()
        self.request_id = request_id
        self.prompt = prompt
        self.reservation: Reservation | None = None
        self.is_claimed = False
        self.late_seconds: float | None = None
        """Number of seconds in which written bytes may still arrive; None until prefill has sent "stopped"."""
        self._memory = memory
        self._is_taken = False
        self._result: asyncio.Future[HandoverResult | None] = loop.create_future()
        self._given_up: asyncio.Future[None] = loop.create_future()

    async def wait_for_result(self) -> HandoverResult | None:
        """Wait for the result. Return None if the hand-over failed; otherwise the caller owns the reservation in it."""
        result = await asyncio.shield(self._result)
        self._is_taken = True
        return result

    def set_result(self, result: HandoverResult | None) -> None:
        """Set the result of the hand-over, unless it is set already. ``result`` is None if the hand-over failed."""
        if self._result.done():
            return
        self._result.set_result(result)
        if self._given_up.done():
            self._drop_result()

    def give_up(self) -> None:
        """Give up the hand-over: no request needs its result. If there is a result already, cancel its reservation."""
        if not self._given_up.done():
            self._given_up.set_result(None)
        self._drop_result()

    async def unless_given_up(self, awaitable: Awaitable[_T]) -> _T:
        """Wait for the result of ``awaitable``, and return it.

        Raises:
            _GivenUp: the hand-over was given up before there was a result; ``awaitable`` was cancelled.
        """
        task = asyncio.ensure_future(awaitable)
        try:
            either: set[asyncio.Future[Any]] = {task, self._given_up}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _GivenUp("the client's request has ended on this decode instance, or has not arrived there")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)  # ignores a failure before the cancellation

    def _drop_result(self) -> None:
        if not self._result.done() or self._is_taken:
            return
        self._is_taken = True
        result = self._result.result()
        if result and result.prefilled and self._memory:
            self._memory.cancel_reservation(result.prefilled.reservation, clear=False)


class HandoverReceiver:
    """The decode instance's side of all hand-overs: accepts connections from prefill instances.

    Args:
        memory: reserves blocks to which prefill instances may write; None if hand-overs go only through the pool.
        silence_seconds: maximum time without a message from the prefill instance.
        expiry_seconds: time after which the blocks of a hand-over are released if the request has not arrived.
    """

    def __init__(
        self,
        memory: BlockMemory | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        expiry_seconds: float = EXPIRY_SECONDS,
    ) -> None:
        self.others: dict[str, Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]] = {}
        """For a type of first message other than "begin", the function that answers. Only simulated engines set it."""
        self._memory = memory
        self._silence_seconds = silence_seconds
        self._expiry_seconds = expiry_seconds
        self._server: asyncio.Server | None = None
        # Hand-overs by request id, from the arrival of the request or of the connection, whichever is first, until the
        # request has the result.
        self._pending: dict[str, asyncio.Future[_Handover]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._has_logged_version = False

    @property
    def num_pending(self) -> int:
        """Number of requests that wait for a hand-over, plus number of hand-overs without a request so far."""
        return len(self._pending)

    @property
    def port(self) -> int:
        """The connector port. Read this only after ``start_listening``."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start_listening(self, connector: socket.socket) -> None:
        """Accept connections at ``connector``, a bound socket."""
        self._server = await asyncio.start_server(self._on_connection, sock=connector, limit=LINE_LIMIT)

    async def stop_listening(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    async def wait_for_prompt(self, request_id: str, prompt: Prompt) -> HandoverResult | None:
        """Wait for the hand-over of a request's prompt.

        Args:
            request_id: the id of the request.
            prompt: the prompt that the request has here; the prefill instance must have the same one.

        Returns:
            The result, or None if the hand-over failed and this instance must compute the prompt.
        """
        begun, is_first = self._find_or_add(request_id), True
        try:
            handover = await wait_at_most(asyncio.shield(begun), self._silence_seconds)
            if handover.is_claimed:
                log.warning(
                    "request %s: another request with this id already waits for its KV from a prefill instance; this "
                    "decode instance loads or computes the prompt itself",
                    request_id,
                )
                is_first = False
                return None
            handover.is_claimed = True
            if handover.prompt != prompt:
                log.warning(
                    "request %s: the prefill instance computed another prompt; this decode instance loads or computes "
                    "the prompt itself",
                    request_id,
                )
                return None
            result = await handover.wait_for_result()
            if result and result.prefilled and handover.prompt.sampling != prompt.sampling:
                self._log_other_sampling(request_id, handover.prompt.sampling)
                return replace(result, prefilled=replace(result.prefilled, token=None, logprobs=None))
            return result
        except asyncio.TimeoutError:
            log.warning(
                "request %s: no prefill instance sent a message within %g s, so this decode instance loads or computes "
                "the prompt itself; check that prefill instances reach its connector port",
                request_id,
                self._silence_seconds,
            )
            return None
        finally:
            if is_first:
                self._forget_request(request_id, begun)

    def _log_other_sampling(self, request_id: str, sampling: str | None) -> None:
        """Log why the prefill instance's token is not used; for a prefill instance of an earlier version only once."""
        if sampling is not None:
            log.info(
                "request %s: the prefill instance used other sampling settings, those of another request with this id; "
                "this decode instance samples the first token itself",
                request_id,
            )
        elif not self._has_logged_version:
            self._has_logged_version = True
            log.warning(
                "request %s: the prefill instance has an earlier version, which does not say with which settings it "
                "sampled the first token, so this decode instance samples it again, as in all such requests (logged "
                "only once); upgrade the prefill instance",
                request_id,
            )

    def _find_or_add(self, request_id: str) -> asyncio.Future[_Handover]:
        if request_id not in self._pending:
            self._pending[request_id] = asyncio.get_running_loop().create_future()
        return self._pending[request_id]

    def _forget_request(self, request_id: str, begun: asyncio.Future[_Handover]) -> None:
        """Remove a request that has its result, or that has not arrived in time, and give up its hand-over.

        To give up a hand-over has no effect if the request has taken the result.
        """
        if self._pending.get(request_id) is begun:
            del self._pending[request_id]
        if begun.done():
            begun.result().give_up()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The task is created here, because asyncio of Python 3.11 logs an error if a task that it has created for a
        # connection is cancelled at the end of the process.
        serving = asyncio.get_running_loop().create_task(self._serve_connection(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request_id, handover = "?", None
        try:
            _keep_alive(writer)
            first = await receive_message(reader, self._silence_seconds)
            if (answer := self.others.get(first["type"])) is not None:
                return await answer(first, writer)
            if first["type"] != "begin" or not isinstance(first.get("request_id"), str):
                raise ValueError(f'the first message must have the type "begin", but it is {str(first)[:200]}')
            request_id = first["request_id"]
            handover = _Handover(first["request_id"], Prompt.from_message(first), self._memory)
            self._announce_handover(request_id, handover)
            await handover.unless_given_up(self._answer_begin(first, handover, writer))
            handover.set_result(await handover.unless_given_up(self._receive_result(reader, writer, handover)))
        except _GivenUp as exc:
            log.info("request %s: the direct transfer was cancelled: %s", request_id, exc)
        except Exception as exc:  # anything may connect to this port and send any bytes
            log.warning(
                "request %s: the direct transfer failed (%s: %s); this decode instance must load or compute the prompt "
                "itself",
                request_id,
                type(exc).__name__,
                exc,
            )
        finally:
            if handover is not None:
                handover.set_result(None)
                await self._give_back(handover, reader, writer)
            writer.close()

    def _announce_handover(self, request_id: str, handover: _Handover) -> None:
        """Pass a new hand-over to its request, which may wait already or may arrive later."""
        begun = self._find_or_add(request_id)
        if begun.done():  # an earlier hand-over has the same id, so this one gets no request
            handover.give_up()
            return
        begun.set_result(handover)

        def on_expiry() -> None:
            if not handover.is_claimed:
                self._forget_request(request_id, begun)

        asyncio.get_running_loop().call_later(self._expiry_seconds, on_expiry)

    async def _answer_begin(self, first: dict[str, Any], handover: _Handover, writer: asyncio.StreamWriter) -> None:
        """Reserve blocks and answer "reserved"; if that is not possible, answer "refused"."""
        memory, reason = self._memory, ""
        if memory is None:
            reason = "this instance does not accept direct transfers"
        elif different := [name for name, value in memory.terms.items() if first.get(name) != value]:
            reason = f"the {' and the '.join(different)} must be equal in both instances"
        else:
            handover.reservation = await memory.reserve_blocks(handover.prompt)
            if handover.reservation is None:
                reason = "not enough free blocks"
        if memory is None or handover.reservation is None:
            log.debug("request %s: a direct transfer is refused: %s", handover.request_id, reason)
            send_message(writer, "refused", reason=reason)
            return
        target = await memory.open_blocks(handover.reservation)
        log.debug(
            "request %s: the prefill instance begins a direct transfer of %d tokens; %d blocks are reserved, "
            "the %d blocks before them are in this instance's own cache",
            *(handover.request_id, handover.prompt.num_tokens, len(target.addresses), target.num_cached),
        )
        send_message(
            writer, "reserved", session=target.session, addresses=target.addresses, num_cached=target.num_cached
        )

    async def _receive_result(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handover: _Handover
    ) -> HandoverResult:
        """Process messages until the prompt's KV is in this instance's memory, or in the pool; return the result."""
        while True:
            message = await receive_message(reader, self._silence_seconds)
            if message["type"] == "saved":
                log.debug("request %s: the prefill instance has saved the prompt to the pool", handover.request_id)
                return _parse_result(message, handover.prompt, None)
            if message["type"] == "ready":
                result = _parse_result(message, handover.prompt, await self._verify_prompt(message, handover))
                if result.prefilled is not None:
                    handover.reservation = None
                    send_message(writer, "accepted")
                    return result
                send_message(writer, "rejected")
            elif message["type"] == "stopped":
                handover.late_seconds = _late_seconds(message)
            elif message["type"] != "alive":
                raise ValueError(str(message.get("reason", message))[:200])

    async def _verify_prompt(self, message: dict[str, Any], handover: _Handover) -> Prefilled | None:
        """Check the written blocks after "ready"; return the prompt, or None if a block has a wrong digest."""
        reservation, memory = handover.reservation, self._memory
        if memory is None or reservation is None:
            raise ValueError('the prefill instance sent "ready", but this instance had reserved no blocks')
        token = decode_number(message["token"], memory.vocab_size)
        logprobs = decode_logprobs(message["logprobs"], memory.vocab_size)
        start, nbytes = time.monotonic(), len(reservation.missing) * memory.block_bytes
        if not await memory.accept_blocks(reservation, message["digests"]):
            log.warning(
                "request %s: blocks from the prefill instance have wrong digests; this decode instance rejects them "
                "and expects the prompt's KV in the pool",
                handover.request_id,
            )
            return None
        log.debug(
            "request %s: direct transfer verified: %d blocks, %d bytes in %.1f ms",
            *(handover.request_id, len(reservation.missing), nbytes, 1e3 * (time.monotonic() - start)),
        )
        return Prefilled(reservation, token, logprobs)

    async def _give_back(self, handover: _Handover, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Wait until the prefill instance cannot write any more, and release the reservation of a failed hand-over."""
        if handover.reservation is None or self._memory is None:
            return
        send_message(writer, "given_up")
        seconds = handover.late_seconds
        if seconds is None:
            seconds = await _wait_for_stop(reader)
        # In short steps, so that only time in which this process runs counts: while it hangs, it receives no bytes.
        for _ in range(int(10 * seconds)):
            await asyncio.sleep(0.1)
        self._memory.cancel_reservation(handover.reservation, clear=True)


def _parse_result(message: dict[str, Any], prompt: Prompt, prefilled: Prefilled | None) -> HandoverResult:
    """Return the result in a "ready" or "saved" message. Raise an exception if its numbers are wrong."""
    own = decode_number(message["own_cached_tokens"], prompt.num_tokens + 1)
    pool = decode_number(message["pool_cached_tokens"], prompt.num_tokens - own + 1)
    return HandoverResult(own, pool, prefilled)


def _late_seconds(stopped: dict[str, Any]) -> float:
    """Return for how many seconds written bytes may still arrive after this "stopped" message."""
    return 0.0 if stopped.get("clean") is True else LATE_SECONDS


async def _wait_for_stop(reader: asyncio.StreamReader) -> float:
    """Wait until the prefill instance stops to write; return for how many seconds its bytes may still arrive."""
    while True:
        try:
            message = await receive_message(reader, None)
            if message["type"] == "stopped":
                return _late_seconds(message)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return LATE_SECONDS
        except OSError:
            return UNREACHABLE_SECONDS
        except ValueError:
            continue  # an invalid message does not mean that the prefill instance has stopped


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Enable TCP keep-alive, so that a dead host is noticed although nothing is sent to it."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        with contextlib.suppress(AttributeError):  # some systems lack these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
