"""P's side of one request's hand-over: asks D for blocks, writes them as they are computed, says when it is done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from engine.disaggregation.memory import BlockMemory, Target
from engine.disaggregation.wire import LINE_LIMIT, SILENCE_SECONDS, Prompt, encoded_logprobs, receive, send
from engine.request import TokenLogprobs

__all__ = ["HandoverSender", "hand_over"]

log = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0

# Hand-overs whose request has ended while a write was under way; the event loop keeps no task alive by itself.
_ending: set[asyncio.Task[None]] = set()


class HandoverSender:
    """One request's hand-over; made by ``hand_over``. All methods are for the event loop's thread."""

    def __init__(self, request_id: str, prompt: Prompt, memory: BlockMemory | None) -> None:
        loop = asyncio.get_running_loop()
        self._request_id = request_id
        self._prompt = prompt
        self._memory = memory
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[tuple[str, dict[str, object]]] = []  # before there is a connection
        self._reached = asyncio.Event()  # D, or that it is not to be had
        self._target: asyncio.Future[Target | None] = loop.create_future()
        self._verdict: asyncio.Future[bool] = loop.create_future()
        # Blocks to be written, with a reference on each: the index of the first, and the blocks.
        self._queue: deque[tuple[int, Sequence[int]]] = deque()
        self._queued = asyncio.Event()
        self._clean = True
        self._over = False
        self._said: set[str] = set()
        self._writing = asyncio.create_task(self._write_all())
        self._writing.add_done_callback(lambda written: self._stopped() if written.result() is None else None)
        self.is_wanted = True
        """Whether D may still be waiting for this."""

    def computed(self, first: int, blocks: Sequence[int]) -> None:
        """Take over the prompt's blocks from the ``first``-th on, as the engine's listener is given them."""
        self._queue.append((first, blocks))
        if self._over:
            self._drop_queued()
        self._queued.set()

    async def deliver(
        self, token: int, logprobs: TokenLogprobs | None, own_cached_tokens: int, pool_cached_tokens: int
    ) -> bool:
        """Wait until all blocks are written, tell D the first token, and hear whether D takes it from there."""
        digests = await asyncio.shield(self._writing)
        if digests is None:
            return False
        self._send(
            "ready",
            token=token,
            logprobs=encoded_logprobs(logprobs),
            digests=digests,
            own_cached_tokens=own_cached_tokens,
            pool_cached_tokens=pool_cached_tokens,
        )
        try:
            return await asyncio.wait_for(asyncio.shield(self._verdict), SILENCE_SECONDS)
        except asyncio.TimeoutError:
            log.warning("%s: the decode instance does not say whether it takes over", self._request_id)
            return False

    def saved(self, own_cached_tokens: int, pool_cached_tokens: int) -> None:
        """The blocks are in the pool, as far as they could be saved."""
        self._send("saved", own_cached_tokens=own_cached_tokens, pool_cached_tokens=pool_cached_tokens)

    def failed(self, reason: str) -> None:
        """There is nothing to hand over."""
        self._send("failed", reason=reason)

    async def talk(self, host: str, port: int, is_working: Callable[[], bool]) -> None:
        """Speak with D until it hangs up or this is cancelled."""
        alive: asyncio.Task[None] | None = None
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host, port, limit=LINE_LIMIT), SILENCE_SECONDS
            )
            terms = self._memory.terms if self._memory else {}
            send(writer, "begin", request_id=self._request_id, **self._prompt.message(), **terms)
            for kind, members in self._unsent:
                send(writer, kind, **members)
            self._writer = writer
            self._reached.set()
            alive = asyncio.create_task(self._stay_alive(is_working))
            while True:
                await self._hear(reader)
        except EOFError:
            pass  # D hangs up when it has what it wants, or has gone: then nobody misses what is not sent
        except (OSError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as exc:
            log.warning(
                "%s: no hand-over to the decode instance %s:%d (%s: %s)",
                *(self._request_id, host, port, type(exc).__name__, exc),
            )
        finally:
            self._stop()
            self._reached.set()
            if alive is not None:
                alive.cancel()
            if self._writer is not None:
                self._writer.close()

    async def end(self) -> None:
        """Begin no more writes, wait for the one that is under way, and tell D that it is over."""
        self._stop_writing()
        if not self._said & {"ready", "saved"}:
            self.failed("the prefill was given up")
        await self._writing
        self._stopped()
        await self._reached.wait()

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        message = await receive(reader, None)
        kind = message["type"]
        if kind == "reserved" and not self._target.done():
            assert self._memory is not None, "only who can write is lent blocks"
            self._target.set_result(self._memory.target_of(message, self._prompt))
        elif kind == "refused":
            log.info("%s: no direct hand-over: %s", self._request_id, message.get("reason"))
            self._stop_writing()
        elif kind in ("accepted", "rejected"):
            if not self._verdict.done():
                self._verdict.set_result(kind == "accepted")
        elif kind == "given_up":
            self._stop()

    async def _stay_alive(self, is_working: Callable[[], bool]) -> None:
        while is_working():
            await asyncio.sleep(ALIVE_SECONDS)
            self._send("alive")

    async def _write_all(self) -> list[str] | None:
        """Write the prompt's blocks as they are computed; their digests, or None if not all could be written."""
        digests: list[str] = []
        num_written = 0
        try:
            if self._memory is None:
                return None
            target = await asyncio.wait_for(asyncio.shield(self._target), SILENCE_SECONDS)
            if target is None:
                return None
            num_blocks = target.num_cached + len(target.addresses)
            while num_written < num_blocks:
                if self._over:
                    return None
                if not self._queue:
                    self._queued.clear()
                    await self._queued.wait()
                    continue
                first, blocks = self._queue.popleft()
                while self._queue:
                    blocks = [*blocks, *self._queue.popleft()[1]]
                written = await asyncio.wrap_future(self._memory.write(blocks, first, target))
                if written is None:
                    self._clean = False
                    return None
                digests += written
                num_written = first + len(blocks)
            return digests
        except asyncio.TimeoutError:
            log.warning("%s: the decode instance does not answer; handing over by the pool", self._request_id)
            return None
        finally:
            self._over = True
            self._drop_queued()

    def _stop(self) -> None:
        """D has gone, or wants no more."""
        self.is_wanted = False
        if not self._verdict.done():
            self._verdict.set_result(False)
        self._stop_writing()

    def _stopped(self) -> None:
        """Tell D that nothing is written any more, and so that it may have its blocks back."""
        if "stopped" not in self._said:
            self._send("stopped", clean=self._clean)

    def _stop_writing(self) -> None:
        self._over = True
        if not self._target.done():
            self._target.set_result(None)
        self._queued.set()
        self._drop_queued()

    def _drop_queued(self) -> None:
        while self._queue:
            _, blocks = self._queue.popleft()
            if self._memory is not None:
                self._memory.release(blocks)

    def _send(self, kind: str, **members: object) -> None:
        self._said.add(kind)
        if self._writer is not None:
            send(self._writer, kind, **members)
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
    """Hand a prompt over to D while it is computed. Nothing that becomes of D raises here, or holds up the prefill.

    Leaving without ``deliver`` or ``saved``, by an exception too, closes the connection, which D takes for a failure;
    not before a write that is under way has returned, for which nobody waits here.

    Args:
        host, port: D's connector port.
        memory: what is written from; None: only by the pool.
        is_working: false when the prompt's computation hangs; D is told no more that it goes on.
    """
    sender = HandoverSender(request_id, prompt, memory)
    talking = asyncio.create_task(sender.talk(host, port, is_working))

    async def end() -> None:
        await sender.end()
        talking.cancel()
        await asyncio.wait({talking})

    try:
        yield sender
    finally:
        ending = asyncio.create_task(end())
        _ending.add(ending)
        ending.add_done_callback(_ending.discard)
