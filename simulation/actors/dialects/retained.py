"""Prompts that a prefill instance (P) retains under a key, until a decode instance (D) begins a hand-over of them.
D sends the request over a connection to P's connector port, with one JSON object per line. P then transfers the prompt
in the same way as in every hand-over::

    D -> P   fetch     key, request_id, host and port of D's connector, wait_seconds
    P -> D   found     the prompt is computed, and P transfers it as request_id
             missing   reason      P does not retain it
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.disaggregation import BlockMemory, HandoverReceiver, hand_over
from engine.disaggregation.wire import Prompt, open_connection, receive_message, send_message, wait_at_most
from engine.scheduling.request import TokenLogprobs

__all__ = ["RetainedPrompt", "RetainedPrompts", "ask_for_prompt", "retain_prompts", "retained_prompts_of"]

log = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 300.0


class RetainedPrompt:
    """One prompt, from the arrival of its request until it was transferred or dropped.

    It owns a reference on each of its ``blocks``, until a hand-over takes the references. The engine may still deliver
    blocks of a step that was running when the prompt was dropped; those are released immediately.
    """

    def __init__(self, key: str, request_id: str, prompt: Prompt, memory: BlockMemory | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.key = key
        self.request_id = request_id
        self.prompt = prompt
        self._memory = memory
        self.blocks: list[int] = []
        self.is_dropped = False
        self.is_asked_for = False
        self.token: int | None = None
        self.logprobs: TokenLogprobs | None = None
        self.cached_tokens = (0, 0)
        self.wait_for_pool: Callable[[], Awaitable[None]] | None = None
        self._ready: asyncio.Future[str] = loop.create_future()  # why the prompt is not ready, or ""
        self._taken: asyncio.Future[bool] = loop.create_future()

    @property
    def is_ready(self) -> bool:
        """Whether its KV is computed and still retained."""
        return self.token is not None and not self.is_dropped

    def add_blocks(self, _: int, blocks: Sequence[int]) -> None:
        """Take ownership of the references on blocks that the engine passes to ``Listener.on_computed``."""
        if self.is_dropped:
            self._release(blocks)
        else:
            self.blocks += blocks

    def drop(self, reason: str) -> None:
        """End all waits for the prompt. Release its blocks, unless a hand-over has taken them."""
        self.end_waits(reason, is_taken=False)
        self.is_dropped = True
        if not self.is_asked_for:
            blocks, self.blocks = self.blocks, []
            self._release(blocks)

    def _release(self, blocks: Sequence[int]) -> None:
        if self._memory is not None and blocks:
            self._memory.release_blocks(blocks)

    def record_computed(
        self,
        token: int,
        logprobs: TokenLogprobs | None,
        cached_tokens: tuple[int, int],
        wait_for_pool: Callable[[], Awaitable[None]],
    ) -> None:
        """Record that all of the prompt is computed.

        Args:
            token, logprobs: the first token of the answer, and its log probabilities.
            cached_tokens: tokens of the prompt from the own cache and from the pool.
            wait_for_pool: returns when other instances can read the prompt from the pool.
        """
        self.token, self.logprobs, self.cached_tokens, self.wait_for_pool = (
            token,
            logprobs,
            cached_tokens,
            wait_for_pool,
        )
        if not self._ready.done():
            self._ready.set_result("")

    async def wait_until_ready(self) -> str:
        """Wait until the prompt is computed; return why it never will be, or ""."""
        return await asyncio.shield(self._ready)

    async def wait_until_taken(self, seconds: float) -> bool:
        """Wait until decode has the prompt; return whether that happened within ``seconds``."""
        try:
            return await wait_at_most(asyncio.shield(self._taken), seconds)
        except asyncio.TimeoutError:
            return False

    def end_waits(self, reason: str, *, is_taken: bool) -> None:
        """End all waits for the prompt, with this outcome."""
        if not self._ready.done():
            self._ready.set_result(reason)
        if not self._taken.done():
            self._taken.set_result(is_taken)


class RetainedPrompts:
    """The prompts that this instance retains for decode instances.

    Args:
        memory: writes blocks to decode instances; None: prompts go through the pool only.
    """

    def __init__(self, memory: BlockMemory | None = None) -> None:
        self._memory = memory
        self._retained: dict[str, RetainedPrompt] = {}
        self._opened = asyncio.Condition()
        self._notifications: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._retained)

    def has_key(self, key: str) -> bool:
        """Whether a prompt is retained under this key."""
        return key in self._retained

    def open_prompt(self, key: str, request_id: str, prompt: Prompt) -> RetainedPrompt:
        """Register a prompt under ``key`` before it is computed."""
        retained = self._retained[key] = RetainedPrompt(key, request_id, prompt, self._memory)
        notification = asyncio.get_running_loop().create_task(self._notify_opened())
        self._notifications.add(notification)
        notification.add_done_callback(self._notifications.discard)
        return retained

    def drop_prompt(self, retained: RetainedPrompt, reason: str) -> None:
        """Drop a prompt; a hand-over that has begun continues."""
        retained.drop(reason)
        if self._retained.get(retained.key) is retained:
            del self._retained[retained.key]

    def drop_all(self, reason: str) -> None:
        """Drop all prompts."""
        for retained in list(self._retained.values()):
            self.drop_prompt(retained, reason)

    def drop_later(self, retained: RetainedPrompt, seconds: float) -> None:
        """Drop a prompt after ``seconds``."""

        def on_expiry() -> None:
            if not retained.is_dropped:
                log.warning("%s: no decode instance asked for its prompt in %g s", retained.request_id, seconds)
                self.drop_prompt(retained, "it was retained for its time")

        asyncio.get_running_loop().call_later(seconds, on_expiry)

    async def serve_fetch(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Answer a decode instance that requests a prompt, and transfer the prompt.

        Raises:
            ValueError, KeyError, TypeError: the message lacks a member, or has an invalid one.
        """
        key, request_id = str(message["key"]), str(message["request_id"])
        host, port = str(message["host"]), int(message["port"])
        wait_seconds = min(float(message["wait_seconds"]), MAX_WAIT_SECONDS)
        retained = await self._find_prompt(key, wait_seconds)
        reason = await retained.wait_until_ready() if retained else "no prompt is retained under this key"
        if retained is not None and retained.is_asked_for:
            reason = "another request has asked for it"
        elif retained is not None and retained.is_dropped:  # after it was ready
            reason = reason or "it was dropped"
        if retained is None or reason:
            send_message(writer, "missing", reason=reason)
            return
        retained.is_asked_for = True
        send_message(writer, "found")
        await self._hand_over(retained, host, port, request_id)

    async def _hand_over(self, retained: RetainedPrompt, host: str, port: int, request_id: str) -> None:
        assert retained.token is not None
        assert retained.wait_for_pool is not None
        try:
            async with hand_over(host, port, request_id, retained.prompt, self._memory) as sender:
                if self._memory is not None:
                    sender.queue_blocks(0, list(retained.blocks))
                delivered = await sender.deliver_directly(retained.token, retained.logprobs, *retained.cached_tokens)
                if not delivered and sender.is_wanted:
                    await retained.wait_for_pool()
                    log.debug("request %s: handed over through the pool: %s", retained.request_id, sender.trouble)
                    sender.report_save(*retained.cached_tokens)
        finally:
            retained.end_waits("it was handed over", is_taken=True)
            self.drop_prompt(retained, "it was handed over")

    async def _find_prompt(self, key: str, wait_seconds: float) -> RetainedPrompt | None:
        """Return the prompt under this key; wait for it up to ``wait_seconds``."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._opened:
                await wait_at_most(self._opened.wait_for(lambda: key in self._retained), wait_seconds or 0.001)
        return self._retained.get(key)

    async def _notify_opened(self) -> None:
        async with self._opened:
            self._opened.notify_all()


def retain_prompts(receiver: HandoverReceiver, memory: BlockMemory | None) -> RetainedPrompts:
    """Let the instance with this receiver retain prompts, which decode instances request at its connector port."""
    retained = RetainedPrompts(memory)
    receiver.others["fetch"] = retained.serve_fetch
    return retained


def retained_prompts_of(receiver: HandoverReceiver) -> RetainedPrompts:
    """Return the prompts that the receiver's instance retains."""
    retained: RetainedPrompts = receiver.others["fetch"].__self__  # type: ignore[attr-defined]
    return retained


async def ask_for_prompt(
    host: str, port: int, key: str, request_id: str, address: tuple[str, int], wait_seconds: float
) -> str:
    """Request the prompt ``key`` from prefill at ``host`` and ``port``, as ``request_id``, for decode's ``address``.

    Returns:
        Why prefill refuses; "" when the prompt is computed and prefill will transfer it.
    """
    try:
        reader, writer = await open_connection(host, port)
    except (OSError, asyncio.TimeoutError) as exc:
        return f"the prefill instance {host}:{port} was not reached ({type(exc).__name__}: {exc})"
    try:
        fields = {"key": key, "request_id": request_id, "host": address[0], "port": address[1]}
        send_message(writer, "fetch", **fields, wait_seconds=wait_seconds)
        message = await receive_message(reader, MAX_WAIT_SECONDS)
        return "" if message["type"] == "found" else str(message.get("reason", message))[:200]
    except (OSError, EOFError, ValueError, asyncio.TimeoutError) as exc:
        return f"the prefill instance {host}:{port} closed the connection ({type(exc).__name__}: {exc})"
    finally:
        writer.close()
