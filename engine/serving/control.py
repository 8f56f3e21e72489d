"""Commands of an operator or a trainer to a running instance, with FastDeploy's meaning.

A paused instance has no requests: those that ran were aborted, and new ones are refused. Its own prefix cache is empty,
as FastDeploy's is. A sleeping instance is paused and has freed memory. Weights are updated from the checkpoint's folder
while the instance is paused; KV of the old weights is not read any more. An update that fails halfway leaves a broken
instance: it refuses every request until the weights are loaded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from engine.core import EngineCore
from engine.generation import BROKEN, Generations
from engine.model.model_runner import ModelRunner
from kvstore_backend import ConfigError

__all__ = ["TAGS", "Control", "ControlFailed"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# FastDeploy's time limit for a command. Reading weights may take longer, because it cannot be interrupted.
_ORDER_SECONDS = 600.0
# How long blocks may still be transferred after the requests have ended; FastDeploy waits for its transfer processes in
# the same way.
_BLOCKS_SECONDS = 60.0
_POLL_SECONDS = 0.005

TAGS = ("weight", "kv_cache")
"""The parts that can sleep."""


class ControlFailed(Exception):
    """A command that cannot be executed; the message is one sentence."""


class Control:
    """Executes one command at a time; for the event loop's thread.

    Args:
        core: runs the requests.
        runner: has the weights and the KV memory.
        generations: the requests.
        on_change: called when ``is_paused`` or ``version`` has changed.
        has_dynamic_weights: whether weights may be freed and updated (``--dynamic-load-weight``).
        frees_kv: whether the pages of KV memory can be freed: no device has them registered.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        generations: Generations,
        on_change: Callable[[], None],
        *,
        has_dynamic_weights: bool = False,
        frees_kv: bool = True,
    ) -> None:
        self._core = core
        self._runner = runner
        self._generations = generations
        self._on_change = on_change
        self.on_pause: Callable[[], None] = lambda: None
        """Called when a pause begins, for parts that hold blocks without a running request."""
        self.has_dynamic_weights = has_dynamic_weights
        self._frees_kv = frees_kv
        self._sleeping: set[str] = set()
        self._turn = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """Whether requests are refused now."""
        return self._core.is_paused

    @property
    def is_broken(self) -> bool:
        """Whether a failed update left no weights, or KV of other weights; ``wake_up`` repairs that."""
        return self._generations.is_broken

    @property
    def version(self) -> str | None:
        """The version of the weights; None: it is not set."""
        return self._runner.version or None

    async def pause(self) -> None:
        """Refuse new requests, abort those that run, and empty the own prefix cache.

        Raises:
            ControlFailed: some requests did not end in time; new ones are refused even then.
        """
        async with self._take_turn():
            await self._pause()

    async def resume(self) -> None:
        """Accept requests again.

        Raises:
            ControlFailed: the instance sleeps.
        """
        async with self._take_turn():
            if self._sleeping:
                names = ", ".join(sorted(self._sleeping))
                raise ControlFailed(f"this instance sleeps, without {names}; POST /v1/wakeup first")
            self._set_paused(False)

    async def find_out_if_paused(self) -> bool:
        """Return whether the instance is paused, after all earlier commands."""
        async with self._take_turn():
            return self.is_paused

    async def sleep(self, tags: Sequence[str]) -> list[None]:
        """Pause, and free the memory of these parts.

        Raises:
            ControlFailed: ``pause`` does, a part cannot sleep, or blocks are still in use.
        """
        self._check_tags(tags)
        async with self._take_turn():
            await self._pause()
            await self._wait_for_blocks()
            self._sleeping.update(tags)  # also if freeing fails halfway: then they are loaded again
            if "weight" in tags:
                await self._run(self._runner.free_weights)
            if "kv_cache" in tags and self._frees_kv:
                await self._run(self._runner.free_kv)
            log.info("This instance sleeps, without %s", ", ".join(sorted(self._sleeping)))
        return [None]

    async def wake_up(self, tags: Sequence[str]) -> list[None]:
        """Load those of these parts that sleep, and accept requests when none sleeps any more.

        The weights are those that the checkpoint's folder has now.

        Raises:
            ControlFailed: a part cannot be loaded; it continues to sleep.
        """
        self._check_tags(tags)
        async with self._take_turn():
            if "kv_cache" in tags and "kv_cache" in self._sleeping:
                await self._run(self._runner.restore_kv)
                self._sleeping.remove("kv_cache")
            if "weight" in tags and "weight" in self._sleeping:
                await self._load_weights("")
                self._sleeping.remove("weight")
            if not self._sleeping:
                self._set_paused(False)
        return [None]

    async def update_weights(self, version: str) -> list[dict[str, Any]]:
        """Load the weights that the checkpoint's folder has now, and read no KV of the old ones any more.

        Args:
            version: of the new weights; "": as the folder's ``version.yaml`` says, if there is one.

        Returns:
            FastDeploy's report of the update, with one worker.

        Raises:
            ControlFailed: the instance is not paused, or the weights cannot be loaded; then it has the old ones, or
                ``is_broken`` and sleeps without weights.
        """
        self._check_tags(("weight",))
        async with self._take_turn():
            if not self.is_paused:
                raise ControlFailed("Pause LLM Engine first before calling updating weights")
            if "weight" in self._sleeping:
                raise ControlFailed("this instance sleeps, without weight; POST /v1/wakeup loads the weights of now")
            await self._wait_for_blocks()
            seconds = await self._load_weights(version)
        cost = {"sync_cost": 0.0, "update_cost": seconds, "total_cost": seconds}
        return [{**cost, "version": self._runner.version, "rank": 0}]

    def _check_tags(self, tags: Sequence[str]) -> None:
        for tag in tags:
            if tag not in TAGS:
                raise ControlFailed(f"Unsupported tag [{tag}] in [{','.join(tags)}], expected one of {list(TAGS)}")
        if "weight" in tags and not self.has_dynamic_weights:
            raise ControlFailed("its weights are fixed; start the instance with --dynamic-load-weight")

    async def _load_weights(self, version: str) -> float:
        """Load the current weights, for which the core then has no KV; return the seconds that it took."""
        start, before = time.monotonic(), self._runner.namespace
        try:
            await self._run(lambda: self._runner.update_weights(version))
            await self._ask_core(self._core.follow_weights)
        except BaseException:
            is_asleep = "weight" in self._sleeping
            if self._runner.namespace != before or not (is_asleep or self._runner.has_weights):
                self._sleeping.add("weight")
                self._set_broken(True)
            raise
        self._set_broken(False)
        seconds = time.monotonic() - start
        log.info("Weights of version %s are loaded (%.1f s)", self.version or "(not named)", seconds)
        self._on_change()
        return seconds

    async def _run(self, call: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(call)
        except (ConfigError, OSError) as exc:
            raise ControlFailed(str(exc)) from exc

    async def _pause(self) -> None:
        self._set_paused(True)
        self.on_pause()
        try:
            await asyncio.wait_for(self._end_requests(), _ORDER_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            raise ControlFailed(f"requests that run have not ended within {_ORDER_SECONDS:g} s") from None
        self._core.clear_prefix_cache()

    async def _end_requests(self) -> None:
        """Abort all requests, and wait until the engine has none; their clients may read the answers for longer."""
        while True:
            self._generations.abort_all()
            if not await self._ask_core(lambda: self._core.scheduler.has_sequences):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_for_blocks(self) -> None:
        """Wait until no load, save or hand-over uses KV memory, or names blocks by the current weights."""
        give_up_at = time.monotonic() + _BLOCKS_SECONDS
        while await self._ask_core(lambda: self._core.has_blocks_in_use):
            if time.monotonic() > give_up_at:
                raise ControlFailed(
                    f"KV blocks are still on their way to the pool or another instance after {_BLOCKS_SECONDS:g} s; "
                    "try again"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _ask_core(self, question: Callable[[], _T]) -> _T:
        if not self._core.is_alive:
            raise ControlFailed("this instance's engine has ended; its log says why")
        answering = asyncio.wrap_future(self._core.call(question))
        # a timeout cancels nothing: the callback is still called
        await asyncio.wait([answering], timeout=_ORDER_SECONDS)
        if not answering.done():
            raise ControlFailed(f"the engine has not come to it within {_ORDER_SECONDS:g} s: a step of it takes longer")
        try:
            return answering.result()
        except Exception as exc:
            raise ControlFailed(f"the engine has failed at it: {exc}") from exc

    @contextlib.asynccontextmanager
    async def _take_turn(self) -> AsyncIterator[None]:
        """Wait until the commands before this one are executed."""
        try:
            await asyncio.wait_for(self._turn.acquire(), _ORDER_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            raise ControlFailed(f"the order before this one has not ended within {_ORDER_SECONDS:g} s") from None
        try:
            yield
        finally:
            self._turn.release()

    def _set_broken(self, is_broken: bool) -> None:
        if self.is_broken != is_broken:
            self._generations.is_broken = is_broken
            log.warning("%s", BROKEN if is_broken else "The weights are whole again")

    def _set_paused(self, is_paused: bool) -> None:
        if self._core.is_paused != is_paused:
            self._core.is_paused = self._generations.is_paused = is_paused
            log.info("Requests are %s", "refused: this instance is paused" if is_paused else "taken again")
            self._on_change()
