"""What an operator or a trainer orders of a running instance, with FastDeploy's meaning.

A paused instance has no request: those that ran were aborted, and new ones are refused. Its own prefix cache is empty,
as FastDeploy's is. An instance that sleeps is paused, and has given memory back. Weights are updated from the folder of
the checkpoint, while the instance is paused; KV of the old ones is not read any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.core import EngineCore
from engine.disaggregation import KeptPrompts
from engine.generation import Generations
from engine.model_runner import ModelRunner
from kvstore_backend import ConfigError

__all__ = ["TAGS", "Control", "ControlFailed"]

log = logging.getLogger(__name__)

# As long as FastDeploy waits for the end of an order.
_ORDER_SECONDS = 600.0
# So long blocks may still be on their way when the requests have ended; as FastDeploy waits for its transfer processes.
_BLOCKS_SECONDS = 60.0
_POLL_SECONDS = 0.005

TAGS = ("weight", "kv_cache")
"""What can sleep."""


class ControlFailed(Exception):
    """An order that cannot be carried out, in one sentence."""


class Control:
    """Carries out one order at a time; for the event loop's thread.

    Args:
        core: runs the requests.
        runner: has the weights and the KV memory.
        generations: the requests.
        kept: the prompts that decode instances may ask for.
        on_change: called when ``is_paused`` or ``version`` has changed.
        has_dynamic_weights: whether weights may be given back and updated (``--dynamic-load-weight``).
        frees_kv: whether the pages of KV memory can be given back: no device has them registered.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        generations: Generations,
        kept: KeptPrompts,
        on_change: Callable[[], None],
        *,
        has_dynamic_weights: bool = False,
        frees_kv: bool = True,
    ) -> None:
        self._core = core
        self._runner = runner
        self._generations = generations
        self._kept = kept
        self._on_change = on_change
        self.has_dynamic_weights = has_dynamic_weights
        self._frees_kv = frees_kv
        self._sleeping: set[str] = set()
        self._turn = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """Whether requests are refused now."""
        return self._core.is_paused

    @property
    def version(self) -> str | None:
        """The version of the weights; None: nobody has named one."""
        return self._runner.version or None

    async def pause(self) -> None:
        """Refuse new requests, abort those that run, and empty the own prefix cache.

        Raises:
            ControlFailed: some did not end in time; new ones are refused nevertheless.
        """
        async with self._turn:
            await self._pause()

    async def resume(self) -> None:
        """Take requests again.

        Raises:
            ControlFailed: the instance sleeps.
        """
        async with self._turn:
            if self._sleeping:
                names = ", ".join(sorted(self._sleeping))
                raise ControlFailed(f"this instance sleeps, without {names}; POST /v1/wakeup first")
            self._set_paused(False)

    async def find_out_if_paused(self) -> bool:
        """Whether it is paused, once the orders before this question are carried out."""
        async with self._turn:
            return self.is_paused

    async def sleep(self, tags: Sequence[str]) -> list[None]:
        """Pause, and give the memory of these parts back.

        Raises:
            ControlFailed: ``pause`` does, a part cannot sleep, or blocks are still in use.
        """
        self._check_tags(tags)
        async with self._turn:
            await self._pause()
            await self._wait_for_blocks()
            if "weight" in tags:
                await asyncio.to_thread(self._runner.free_weights)
            if "kv_cache" in tags and self._frees_kv:
                await asyncio.to_thread(self._runner.free_kv)
            self._sleeping.update(tags)
            log.info("This instance sleeps, without %s", ", ".join(sorted(self._sleeping)))
        return [None]

    async def wake_up(self, tags: Sequence[str]) -> list[None]:
        """Load these parts again where they sleep, and take requests once none sleeps any more.

        The weights are those that the checkpoint's folder has now.

        Raises:
            ControlFailed: a part cannot be loaded; it sleeps on.
        """
        self._check_tags(tags)
        async with self._turn:
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
            FastDeploy's account of it, by its one worker.

        Raises:
            ControlFailed: the instance is not paused, or the weights cannot be loaded; then it has the old ones.
        """
        self._check_tags(("weight",))
        async with self._turn:
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
        """Load the weights of now, for which the core then has no KV; the seconds that it took."""
        start = time.monotonic()
        await self._run(lambda: self._runner.update_weights(version))
        await asyncio.wrap_future(self._core.call(self._core.follow_weights))
        seconds = time.monotonic() - start
        log.info("Weights of version %s are loaded (%.1f s)", self.version or "(not named)", seconds)
        self._on_change()
        return seconds

    async def _run(self, call: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(call)
        except ConfigError as exc:
            raise ControlFailed(str(exc)) from exc

    async def _pause(self) -> None:
        self._set_paused(True)
        self._kept.drop_all("this instance is paused")
        try:
            await asyncio.wait_for(self._end_requests(), _ORDER_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            raise ControlFailed(f"requests that run have not ended within {_ORDER_SECONDS:g} s") from None
        self._core.clear_prefix_cache()

    async def _end_requests(self) -> None:
        """Abort all requests, and wait until the engine has none; their clients may read on for long."""
        while True:
            self._generations.abort_all()
            if not await self._ask_core(lambda: self._core.scheduler.has_sequences):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_for_blocks(self) -> None:
        """Wait until no load, save or hand-over touches KV memory, or names blocks by the weights of now."""
        give_up_at = time.monotonic() + _BLOCKS_SECONDS
        while await self._ask_core(lambda: self._core.has_blocks_in_use):
            if time.monotonic() > give_up_at:
                raise ControlFailed(
                    f"KV blocks are still on their way to the pool or another instance after {_BLOCKS_SECONDS:g} s; "
                    "try again"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _ask_core(self, question: Callable[[], bool]) -> bool:
        if not self._core.is_alive:
            raise ControlFailed("this instance's engine has ended; its log says why")
        return await asyncio.wrap_future(self._core.call(question))

    def _set_paused(self, is_paused: bool) -> None:
        if self._core.is_paused != is_paused:
            self._core.is_paused = self._generations.is_paused = is_paused
            log.info("Requests are %s", "refused: this instance is paused" if is_paused else "taken again")
            self._on_change()
