"""The prefill instance's side of a hand-over: requests blocks from decode, writes computed KV, reports the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from engine.disaggregation.memory import BlockMemory, Target
from engine.disaggregation.wire import (
    SILENCE_SECONDS,
    Prompt,
    encode_logprobs,
    open_connection,
    receive_message,
    send_message,
    wait_at_most,
)
from engine.scheduling.request import TokenLogprobs

__all__ = ["HandoverSender", "hand_over"]

log = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0

# The tasks that end hand-overs. The set keeps them alive, because the event loop has no strong references to tasks.
_ending: set[asyncio.Task[None]] = set()


class HandoverSender:
    """The hand-over of one request's prompt to a decode instance. ``hand_over`` creates it.

    Call all methods on the event loop's thread.

    Args:
        request_id: the id of the request.
        prompt: describes the prompt to the decode instance.
        memory: writes blocks to decode instances; None if hand-overs go only through the pool.
    """

    def __init__(self, request_id: str, prompt: Prompt, memory: BlockMemory | None) -> None:
        loop = asyncio.get_running_loop()
        self._request_id = request_id
        self._prompt = prompt
        self._memory = memory
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[tuple[str, dict[str, object]]] = []  # messages to send when there is a connection
        self._reached = asyncio.Event()  # set when the decode instance is connected, or cannot be reached
        self._target: asyncio.Future[Target | None] = loop.create_future()
        self._verdict: asyncio.Future[bool] = loop.create_future()
        # Computed blocks that are not written yet, with a reference on each: index of the first block, and the blocks.
        self._queue: deque[tuple[int, Sequence[int]]] = deque()
        self._queued = asyncio.Event()
        self._is_clean = True
        self._is_over = False
        self._kinds_sent: set[str] = set()
        self._block_bytes = memory.block_bytes if memory else 0
        self._begun_at = time.monotonic()
        self.first_write_at = 0.0
        """Time of ``time.monotonic`` at which the first write of blocks began; 0: none has begun."""
        self.trouble = "the decode instance could not be reached"
        """The reason for the log, if the direct transfer fails."""
        self._writing = asyncio.create_task(self._write_all())
        self._writing.add_done_callback(self._on_writing_done)
        self.is_wanted = True
        """Whether the decode instance may still wait for the prompt's KV."""

    def queue_blocks(self, first: int, blocks: Sequence[int]) -> None:
        """Queue computed blocks of the prompt to be written to the decode instance.

        This method is the ``on_computed`` of the engine's ``Listener``. It takes ownership of a reference on each
        block. ``first`` is the index of the first of these blocks in the prompt.
        """
        self._queue.append((first, blocks))
        if self._is_over:
            self._drop_queue()
        self._queued.set()

    async def deliver_directly(
        self, token: int, logprobs: TokenLogprobs | None, own_cached_tokens: int, pool_cached_tokens: int
    ) -> bool:
        """Wait until all blocks are written, and send "ready" to the decode instance.

        Args:
            token: the first token of the answer.
            logprobs: the log probabilities of ``token``.
            own_cached_tokens: number of prompt tokens that were in this instance's own cache.
            pool_cached_tokens: number of prompt tokens that came from the pool.

        Returns:
            Whether the decode instance has accepted the blocks.
        """
        digests = await asyncio.shield(self._writing)
        if digests is None:
            return False
        self.trouble = "the decode instance did not confirm the transfer"
        self._send_or_keep(
            "ready",
            token=token,
            logprobs=encode_logprobs(logprobs),
            digests=digests,
            own_cached_tokens=own_cached_tokens,
            pool_cached_tokens=pool_cached_tokens,
        )
        try:
            is_accepted = await wait_at_most(asyncio.shield(self._verdict), SILENCE_SECONDS)
            log.debug(
                "request %s: direct transfer %s: %d blocks written, %d bytes, %.1f ms since it began",
                *(self._request_id, "accepted" if is_accepted else "not accepted"),
                *(len(digests), len(digests) * self._block_bytes, 1e3 * (time.monotonic() - self._begun_at)),
            )
            return is_accepted
        except asyncio.TimeoutError:
            log.warning(
                "request %s: the decode instance did not confirm the direct transfer within %g s; transferring the "
                "prompt's KV through the pool",
                *(self._request_id, SILENCE_SECONDS),
            )
            return False

    def report_save(self, own_cached_tokens: int, pool_cached_tokens: int) -> None:
        """Report to the decode instance that the save of the blocks has ended; some may not be in the pool."""
        self._send_or_keep("saved", own_cached_tokens=own_cached_tokens, pool_cached_tokens=pool_cached_tokens)

    def report_failure(self, reason: str) -> None:
        """Report to the decode instance that it will get no KV, because the prompt was not computed."""
        self._send_or_keep("failed", reason=reason)

    async def talk_to_decode(self, host: str, port: int, is_working: Callable[[], bool]) -> None:
        """Connect to the decode instance and exchange messages, until it disconnects or the task is cancelled.

        Args:
            host, port: the decode instance's connector port.
            is_working: returns False if the computation of the prompt hangs.
        """
        alive: asyncio.Task[None] | None = None
        try:
            reader, writer = await open_connection(host, port)
            terms = self._memory.terms if self._memory else {}
            send_message(writer, "begin", request_id=self._request_id, **self._prompt.to_message(), **terms)
            for kind, members in self._unsent:
                send_message(writer, kind, **members)
            self._writer = writer
            self._reached.set()
            alive = asyncio.create_task(self._stay_alive(is_working))
            while True:
                await self._handle_message(reader)
        except EOFError:
            pass  # the decode instance closes the connection when it has the prompt, or has ended
        except (OSError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as exc:
            log.warning(
                "request %s: the direct transfer to the decode instance %s:%d failed (%s: %s)",
                *(self._request_id, host, port, type(exc).__name__, exc),
            )
        finally:
            self._on_no_longer_wanted()
            self._reached.set()
            if alive is not None:
                alive.cancel()
            if self._writer is not None:
                self._writer.close()

    async def end_handover(self) -> None:
        """End the hand-over: start no more writes, wait for the write in progress, and send the message "stopped"."""
        self._stop_writing()
        if not self._kinds_sent & {"ready", "saved"}:
            self.report_failure("the prefill was cancelled")
        await self._writing
        self._report_stop()
        await self._reached.wait()

    async def _handle_message(self, reader: asyncio.StreamReader) -> None:
        """Wait for the next message from the decode instance, and process it."""
        message = await receive_message(reader, None)
        kind = message["type"]
        if kind == "reserved" and not self._target.done():
            self._target.set_result(self._parse_target(message))
        elif kind == "refused":
            log.info(
                "request %s: the decode instance refused a direct transfer: %s", self._request_id, message.get("reason")
            )
            self.trouble = f"the decode instance refused: {message.get('reason')}"
            self._stop_writing()
        elif kind in ("accepted", "rejected"):
            if not self._verdict.done():
                self._verdict.set_result(kind == "accepted")
        elif kind == "given_up":
            self._on_no_longer_wanted()

    def _parse_target(self, message: dict[str, Any]) -> Target:
        assert self._memory is not None, "the decode instance reserves blocks only for an instance that can write"
        target = self._memory.parse_target(message, self._prompt)
        log.debug(
            "request %s: the decode instance at %s reserves %d blocks, and has the %d blocks before them already",
            *(self._request_id, target.session, len(target.addresses), target.num_cached),
        )
        return target

    async def _stay_alive(self, is_working: Callable[[], bool]) -> None:
        while is_working():
            await asyncio.sleep(ALIVE_SECONDS)
            self._send_or_keep("alive")

    async def _write_all(self) -> list[str] | None:
        """Write the blocks of the prompt as they are computed.

        Returns:
            The digests of the written blocks, or None if the direct transfer failed or was stopped.
        """
        digests: list[str] = []
        num_written = 0
        try:
            if self._memory is None:
                self.trouble = "this instance cannot write to other instances"
                return None
            target = await wait_at_most(asyncio.shield(self._target), SILENCE_SECONDS)
            if target is None:
                return None
            num_blocks = target.num_cached + len(target.addresses)
            while num_written < num_blocks:
                if self._is_over:
                    return None
                if not self._queue:
                    self._queued.clear()
                    await self._queued.wait()
                    continue
                first, blocks = self._queue.popleft()
                while self._queue:
                    blocks = [*blocks, *self._queue.popleft()[1]]
                start = time.monotonic()
                self.first_write_at = self.first_write_at or start
                written = await asyncio.wrap_future(self._memory.write_blocks(blocks, first, target))
                if written is None:
                    self._is_clean = False
                    self.trouble = "a write to the decode instance failed"
                    return None
                num_written = first + len(blocks)
                log.debug(
                    "request %s: direct transfer of blocks %d to %d: %d written, %d bytes in %.1f ms; the decode "
                    "instance had %d already",
                    *(self._request_id, first, num_written - 1, len(written), len(written) * self._block_bytes),
                    *(1e3 * (time.monotonic() - start), len(blocks) - len(written)),
                )
                digests += written
            return digests
        except asyncio.TimeoutError:
            log.warning(
                "request %s: the decode instance does not respond; transferring the prompt's KV through the pool",
                self._request_id,
            )
            self.trouble = "the decode instance did not respond"
            return None
        finally:
            self._is_over = True
            self._drop_queue()

    def _on_no_longer_wanted(self) -> None:
        """Stop the hand-over, because the decode instance has ended or does not need the blocks any more."""
        self.is_wanted = False
        if not self._verdict.done():
            self._verdict.set_result(False)
        self._stop_writing()

    def _on_writing_done(self, writing: asyncio.Task[list[str] | None]) -> None:
        if writing.result() is None:
            self._report_stop()

    def _report_stop(self) -> None:
        """Send "stopped", unless it was sent before. The decode instance can then use the reserved blocks again."""
        if "stopped" not in self._kinds_sent:
            self._send_or_keep("stopped", clean=self._is_clean)

    def _stop_writing(self) -> None:
        self._is_over = True
        if not self._target.done():
            self._target.set_result(None)
        self._queued.set()
        self._drop_queue()

    def _drop_queue(self) -> None:
        while self._queue:
            _, blocks = self._queue.popleft()
            if self._memory is not None:
                self._memory.release_blocks(blocks)

    def _send_or_keep(self, kind: str, **members: object) -> None:
        self._kinds_sent.add(kind)
        if self._writer is not None:
            send_message(self._writer, kind, **members)
        else:
            self._unsent.append((kind, members))


@contextlib.asynccontextmanager
async def hand_over(
    host: str,
    port: int,
    request_id: str,
    prompt: Prompt,
    memory: BlockMemory | None = None,
    is_working: Callable[[], bool] = lambda: True,
) -> AsyncIterator[HandoverSender]:
    """Open a hand-over of a prompt to a decode instance for the time in which the prompt is computed.

    A failure of the decode instance does not raise an exception, and does not delay the computation. If the ``with``
    block ends without a call of ``deliver_directly`` or ``report_save``, the decode instance gets the message "failed".
    The end of the hand-over runs in a task of its own, so the request does not wait for a write in progress.

    Args:
        host, port: the decode instance's connector port.
        request_id: the id of the request.
        prompt: describes the prompt to the decode instance.
        memory: writes blocks to decode instances; None if hand-overs go only through the pool.
        is_working: returns False if the computation of the prompt hangs. Then no more "alive" messages are sent.
    """
    sender = HandoverSender(request_id, prompt, memory)
    talking = asyncio.create_task(sender.talk_to_decode(host, port, is_working))

    async def end_and_hang_up() -> None:
        await sender.end_handover()
        talking.cancel()
        await asyncio.wait({talking})

    try:
        yield sender
    finally:
        ending = asyncio.create_task(end_and_hang_up())
        _ending.add(ending)
        ending.add_done_callback(_ending.discard)
