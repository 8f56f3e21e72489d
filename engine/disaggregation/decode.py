"""D's side of a hand-over: listens on the connector port, reserves blocks, lets requests wait for their prompt's KV."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
from engine.telemetry.trace import log_lent_blocks, log_verified_blocks

__all__ = ["HandoverReceiver", "HandoverResult"]

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 10.0
LATE_SECONDS = 3.0
UNREACHABLE_SECONDS = 60.0

_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

_T = TypeVar("_T")


@dataclass(frozen=True)
class HandoverResult:
    """The outcome of a hand-over: where P had the prompt's KV from, in tokens, and where it is now.

    With ``prefilled`` it is in this instance's blocks, and the request must submit or cancel their reservation. Else it
    is in the pool.
    """

    own_cached_tokens: int
    pool_cached_tokens: int
    prefilled: Prefilled | None = None


class _GivenUp(Exception):
    """Raised when no request waits for this hand-over any more."""


class _Handover:
    """One connection of P's, and the request that waits for it, if that has arrived.

    This object owns ``reservation`` until a ``HandoverResult`` passes it to the request.
    """

    def __init__(self, request_id: str, prompt: Prompt, memory: BlockMemory | None) -> None:
        loop = asyncio.get_running_loop()
        self.request_id = request_id
        self.prompt = prompt
        self.reservation: Reservation | None = None
        self.is_claimed = False
        self.seconds_to_land: float | None = None
        """For how many seconds bytes of P's may still arrive; None until P has reported that it writes no more."""
        self._memory = memory
        self._is_taken = False
        self._result: asyncio.Future[HandoverResult | None] = loop.create_future()
        self._given_up: asyncio.Future[None] = loop.create_future()

    async def wait_for_result(self) -> HandoverResult | None:
        """Wait for the outcome; None: there is no KV to continue from. The caller owns the result's reservation."""
        result = await asyncio.shield(self._result)
        self._is_taken = True
        return result

    def set_result(self, result: HandoverResult | None) -> None:
        """Pass the outcome to the request that waits, unless it has one already."""
        if self._result.done():
            return
        self._result.set_result(result)
        if self._given_up.done():
            self._drop_result()

    def give_up(self) -> None:
        """Give the hand-over up: no request will wait for its outcome, or take an outcome that exists already."""
        if not self._given_up.done():
            self._given_up.set_result(None)
        self._drop_result()

    async def unless_given_up(self, awaitable: Awaitable[_T]) -> _T:
        """Wait for the result of ``awaitable``.

        Raises:
            _GivenUp: the hand-over was given up first.
        """
        task = asyncio.ensure_future(awaitable)
        try:
            either: set[asyncio.Future[Any]] = {task, self._given_up}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _GivenUp("the request has ended, or never came")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)  # it may fail before the cancellation reaches it

    def _drop_result(self) -> None:
        if not self._result.done() or self._is_taken:
            return
        self._is_taken = True
        result = self._result.result()
        if result and result.prefilled and self._memory:
            self._memory.cancel_reservation(result.prefilled.reservation, clear=False)


class HandoverReceiver:
    """Manages D's side of all hand-overs.

    Args:
        memory: the blocks that P may write to; None: hand-overs go through the pool only.
        silence_seconds: the maximum time without a message from P.
        expiry_seconds: how long blocks are reserved for a request that does not arrive.
    """

    def __init__(
        self,
        memory: BlockMemory | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        expiry_seconds: float = EXPIRY_SECONDS,
    ) -> None:
        self.others: dict[str, Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]] = {}
        """Answers first messages of other types than "begin": other engines' hand-overs, in tests."""
        self._memory = memory
        self._silence_seconds = silence_seconds
        self._expiry_seconds = expiry_seconds
        self._server: asyncio.Server | None = None
        # By request id, from the time that the request or the connection arrives, until the request has its outcome.
        self._pending: dict[str, asyncio.Future[_Handover]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def num_pending(self) -> int:
        """Number of requests that wait for their P, plus hand-overs that no request has arrived for or taken yet."""
        return len(self._pending)

    @property
    def port(self) -> int:
        """The connector port, once started."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start_listening(self, connector: socket.socket) -> None:
        """Listen on a bound socket."""
        self._server = await asyncio.start_server(self._on_connection, sock=connector, limit=LINE_LIMIT)

    async def stop_listening(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def wait_for_prompt(self, request_id: str, prompt: Prompt) -> HandoverResult | None:
        """Wait until P has transferred this request's prompt; None: D must compute it itself."""
        begun, is_first = self._find_or_add(request_id), True
        try:
            handover = await wait_at_most(asyncio.shield(begun), self._silence_seconds)
            if handover.is_claimed:
                log.warning("%s: another request has this id, too; computing the prompt here", request_id)
                is_first = False
                return None
            handover.is_claimed = True
            if handover.prompt != prompt:
                log.warning("%s: the prefill instance has another prompt; computing the prompt here", request_id)
                return None
            return await handover.wait_for_result()
        except asyncio.TimeoutError:
            log.warning(
                "%s: no word of a prefill instance in %g s; computing the prompt here",
                request_id,
                self._silence_seconds,
            )
            return None
        finally:
            if is_first:
                self._forget_request(request_id, begun)

    def _find_or_add(self, request_id: str) -> asyncio.Future[_Handover]:
        if request_id not in self._pending:
            self._pending[request_id] = asyncio.get_running_loop().create_future()
        return self._pending[request_id]

    def _forget_request(self, request_id: str, begun: asyncio.Future[_Handover]) -> None:
        """Remove a request that has its outcome or will not arrive; give up a hand-over that it did not take."""
        if self._pending.get(request_id) is begun:
            del self._pending[request_id]
        if begun.done():
            begun.result().give_up()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Otherwise asyncio of Python 3.11 reports a task that is cancelled at the end of the process as an error of
        # ours.
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
                raise ValueError(f"expected a begin message, got {str(first)[:200]}")
            request_id = first["request_id"]
            handover = _Handover(first["request_id"], Prompt.from_message(first), self._memory)
            self._announce_handover(request_id, handover)
            await handover.unless_given_up(self._answer_begin(first, handover, writer))
            handover.set_result(await handover.unless_given_up(self._receive_result(reader, writer, handover)))
        except _GivenUp as exc:
            log.info("%s: the hand-over was given up: %s", request_id, exc)
        except Exception as exc:  # P, or any other client, may send anything
            log.warning(
                "%s: the hand-over broke off (%s: %s); computing the prompt here", request_id, type(exc).__name__, exc
            )
        finally:
            if handover is not None:
                handover.set_result(None)
                await self._give_back(handover, reader, writer)
            writer.close()

    def _announce_handover(self, request_id: str, handover: _Handover) -> None:
        """Pass the hand-over to its request: one that waits, or one that the router has not delivered yet."""
        begun = self._find_or_add(request_id)
        if begun.done():  # two hand-overs begin with one id: no request gets the later one
            handover.give_up()
            return
        begun.set_result(handover)

        def on_expiry() -> None:
            if not handover.is_claimed:
                self._forget_request(request_id, begun)

        asyncio.get_running_loop().call_later(self._expiry_seconds, on_expiry)

    async def _answer_begin(self, first: dict[str, Any], handover: _Handover, writer: asyncio.StreamWriter) -> None:
        """Answer "begin" with "reserved" or "refused"."""
        memory, reason = self._memory, ""
        if memory is None:
            reason = "this instance cannot be written to"
        elif different := [name for name, value in memory.terms.items() if first.get(name) != value]:
            reason = f"another {' and '.join(different)}"
        else:
            handover.reservation = await memory.reserve_blocks(handover.prompt)
            if handover.reservation is None:
                reason = "no room"
        if memory is None or handover.reservation is None:
            log.debug("request %s: a direct hand-over is refused: %s", handover.request_id, reason)
            send_message(writer, "refused", reason=reason)
            return
        target = await memory.lend_blocks(handover.reservation)
        log_lent_blocks(handover.request_id, handover.prompt.num_tokens, len(target.addresses), target.num_cached)
        send_message(
            writer, "reserved", session=target.session, addresses=target.addresses, num_cached=target.num_cached
        )

    async def _receive_result(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handover: _Handover
    ) -> HandoverResult:
        """Process P's messages until the prompt's KV is here, or in the pool."""
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
                handover.seconds_to_land = _seconds_to_land(message)
            elif message["type"] != "alive":
                raise ValueError(str(message.get("reason", message))[:200])

    async def _verify_prompt(self, message: dict[str, Any], handover: _Handover) -> Prefilled | None:
        """Return the prompt that P has written, if every block of it has the digest that P sent."""
        reservation, memory = handover.reservation, self._memory
        if memory is None or reservation is None:
            raise ValueError("the prefill instance is ready, but was lent no blocks")
        token = decode_number(message["token"], memory.vocab_size)
        logprobs = decode_logprobs(message["logprobs"], memory.vocab_size)
        start, count = time.monotonic(), len(reservation.missing)
        if not await memory.take_blocks_in(reservation, message["digests"]):
            log.warning("%s: blocks that prefill wrote are not those it sent; they are not used", handover.request_id)
            return None
        log_verified_blocks(handover.request_id, count, memory.block_bytes, time.monotonic() - start)
        return Prefilled(reservation, token, logprobs)

    async def _give_back(self, handover: _Handover, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Release an unused reservation, once P cannot write to it any more."""
        if handover.reservation is None or self._memory is None:
            return
        send_message(writer, "given_up")
        seconds = handover.seconds_to_land
        if seconds is None:
            seconds = await _wait_for_stop(reader)
        # In ticks of this loop's own running time: if this process hangs, so do the threads that receive late bytes.
        for _ in range(int(10 * seconds)):
            await asyncio.sleep(0.1)
        self._memory.cancel_reservation(handover.reservation, clear=True)


def _parse_result(message: dict[str, Any], prompt: Prompt, prefilled: Prefilled | None) -> HandoverResult:
    """Parse a "ready" or a "saved" message from an untrusted sender."""
    own = decode_number(message["own_cached_tokens"], prompt.num_tokens + 1)
    pool = decode_number(message["pool_cached_tokens"], prompt.num_tokens - own + 1)
    return HandoverResult(own, pool, prefilled)


def _seconds_to_land(stopped: dict[str, Any]) -> float:
    return 0.0 if stopped.get("clean") is True else LATE_SECONDS


async def _wait_for_stop(reader: asyncio.StreamReader) -> float:
    """Wait until P writes no more; return for how many seconds its bytes may still arrive."""
    while True:
        try:
            message = await receive_message(reader, None)
            if message["type"] == "stopped":
                return _seconds_to_land(message)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            return LATE_SECONDS
        except OSError:
            return UNREACHABLE_SECONDS
        except ValueError:
            continue  # only "stopped", or P's end, shows that P writes no more


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Enable TCP keep-alive, which detects a dead host even if nothing is sent to it."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        with contextlib.suppress(AttributeError):  # some systems lack these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
