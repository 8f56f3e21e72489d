"""P's side of one request's hand-over: requests blocks from D, writes them as they are computed, reports the end."""

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
from engine.telemetry.trace import log_handover_end, log_handover_write

__all__ = ["HandoverSender", "hand_over"]

log = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0

# Hand-overs whose write was in progress when their request ended. The event loop itself holds no strong reference to a
# task.
_ending: set[asyncio.Task[None]] = set()


class HandoverSender:
    """The hand-over of one request; made by ``hand_over``. Call all methods on the event loop's thread."""

    def __init__(self, request_id: str, prompt: Prompt, memory: BlockMemory | None) -> None:
        loop = asyncio.get_running_loop()
        self._request_id = request_id
        self._prompt = prompt
        self._memory = memory
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[tuple[str, dict[str, object]]] = []  # messages before there is a connection
        self._reached = asyncio.Event()  # set when D was reached, or cannot be reached
        self._target: asyncio.Future[Target | None] = loop.create_future()
        self._verdict: asyncio.Future[bool] = loop.create_future()
        # Blocks to be written, with a reference on each: the index of the first, and the blocks.
        self._queue: deque[tuple[int, Sequence[int]]] = deque()
        self._queued = asyncio.Event()
        self._is_clean = True
        self._is_over = False
        self._kinds_sent: set[str] = set()
        self._block_bytes = memory.block_bytes if memory else 0
        self._begun_at = time.monotonic()
        self.first_write_at = 0.0
        """When the first write of blocks began, on ``time.monotonic``; 0 until then."""
        self.trouble = "the decode instance was not reached"
        """Why the prompt is not transferred directly, if it is not."""
        self._writing = asyncio.create_task(self._write_all())
        self._writing.add_done_callback(self._on_writing_done)
        self.is_wanted = True
        """Whether D may still be waiting for this."""

    def queue_blocks(self, first: int, blocks: Sequence[int]) -> None:
        """Take ownership of the prompt's blocks from the ``first``-th on, which the engine's listener gets."""
        self._queue.append((first, blocks))
        if self._is_over:
            self._drop_queue()
        self._queued.set()

    async def deliver_directly(
        self, token: int, logprobs: TokenLogprobs | None, own_cached_tokens: int, pool_cached_tokens: int
    ) -> bool:
        """Wait until all blocks are written and send D the first token; return whether D continues from there."""
        digests = await asyncio.shield(self._writing)
        if digests is None:
            return False
        self.trouble = "the decode instance did not take it over"
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
            seconds = time.monotonic() - self._begun_at
            log_handover_end(self._request_id, len(digests), self._block_bytes, seconds, is_accepted=is_accepted)
            return is_accepted
        except asyncio.TimeoutError:
            log.warning("%s: the decode instance does not say whether it takes over", self._request_id)
            return False

    def report_save(self, own_cached_tokens: int, pool_cached_tokens: int) -> None:
        """Report that the pool has the blocks that could be saved."""
        self._send_or_keep("saved", own_cached_tokens=own_cached_tokens, pool_cached_tokens=pool_cached_tokens)

    def report_failure(self, reason: str) -> None:
        """Report that there is nothing to transfer."""
        self._send_or_keep("failed", reason=reason)

    async def talk_to_decode(self, host: str, port: int, is_working: Callable[[], bool]) -> None:
        """Exchange messages with D until D closes the connection or this is cancelled."""
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
            pass  # D closes the connection when it has all it needs, or has ended: it needs none of the unsent messages
        except (OSError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as exc:
            log.warning(
                "%s: no hand-over to the decode instance %s:%d (%s: %s)",
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
        """Begin no more writes, wait for the write in progress, and report the end to D."""
        self._stop_writing()
        if not self._kinds_sent & {"ready", "saved"}:
            self.report_failure("the prefill was given up")
        await self._writing
        self._report_stop()
        await self._reached.wait()

    async def _handle_message(self, reader: asyncio.StreamReader) -> None:
        """Wait for one message from D and process it."""
        message = await receive_message(reader, None)
        kind = message["type"]
        if kind == "reserved" and not self._target.done():
            self._target.set_result(self._parse_target(message))
        elif kind == "refused":
            log.info("%s: no direct hand-over: %s", self._request_id, message.get("reason"))
            self.trouble = f"the decode instance refused: {message.get('reason')}"
            self._stop_writing()
        elif kind in ("accepted", "rejected"):
            if not self._verdict.done():
                self._verdict.set_result(kind == "accepted")
        elif kind == "given_up":
            self._on_no_longer_wanted()

    def _parse_target(self, message: dict[str, Any]) -> Target:
        assert self._memory is not None, "only who can write is lent blocks"
        target = self._memory.parse_target(message, self._prompt)
        log.debug(
            "request %s: the decode instance at %s lends %d blocks, and has the %d before them",
            *(self._request_id, target.session, len(target.addresses), target.num_cached),
        )
        return target

    async def _stay_alive(self, is_working: Callable[[], bool]) -> None:
        while is_working():
            await asyncio.sleep(ALIVE_SECONDS)
            self._send_or_keep("alive")

    async def _write_all(self) -> list[str] | None:
        """Write the prompt's blocks as they are computed; return their digests, or None if a write failed."""
        digests: list[str] = []
        num_written = 0
        try:
            if self._memory is None:
                self.trouble = "this instance cannot write to others"
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
                seconds, computed = time.monotonic() - start, range(first, first + len(blocks))
                log_handover_write(self._request_id, computed, len(written), self._block_bytes, seconds)
                digests += written
                num_written = first + len(blocks)
            return digests
        except asyncio.TimeoutError:
            log.warning("%s: the decode instance does not answer; handing over by the pool", self._request_id)
            self.trouble = "the decode instance does not answer"
            return None
        finally:
            self._is_over = True
            self._drop_queue()

    def _on_no_longer_wanted(self) -> None:
        """Stop the hand-over: D has ended, or needs no more blocks."""
        self.is_wanted = False
        if not self._verdict.done():
            self._verdict.set_result(False)
        self._stop_writing()

    def _on_writing_done(self, writing: asyncio.Task[list[str] | None]) -> None:
        if writing.result() is None:
            self._report_stop()

    def _report_stop(self) -> None:
        """Report to D that P writes no more, so that D can use its blocks again."""
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
    """Transfer a prompt to D while it is computed. No failure of D raises here, or delays the prefill.

    Without ``deliver_directly`` or ``report_save`` before its end, or with an exception, this closes the connection,
    and D takes that for a failure. The connection closes only after the write in progress has returned; the request
    does not wait for that.

    Args:
        host, port: D's connector port.
        memory: the blocks to write; None: use the pool only.
        is_working: false when the prompt's computation hangs; then D gets no more "alive" messages.
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
