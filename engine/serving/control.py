"""Executes commands of an operator or a trainer, as FastDeploy does.

- Pause: abort running requests, refuse new requests, and clear the prefix cache.
- Sleep: pause, and free the memory of the weights or of KV blocks.
- Update of weights: load the weights that are now in the checkpoint's folder, while the instance is paused. KV of the
  old weights is not used afterwards. If an update fails before it is complete, the instance is broken: it refuses all
  requests until the weights are loaded again.
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

# Maximum time for a command, as in FastDeploy. Only loading weights may take longer, because it cannot be interrupted.
_COMMAND_SECONDS = 600.0
# Maximum time to wait for transfers of blocks after all requests have ended, as in FastDeploy.
_BLOCKS_SECONDS = 60.0
_POLL_SECONDS = 0.005

TAGS = ("weight", "kv_cache")
"""The parts that the command sleep can free."""


class ControlFailed(Exception):
    """Raised if a command cannot be executed; the message is one sentence."""


class Control:
    """Executes commands, one at a time. Call all methods on the event loop's thread.

    Args:
        core: runs sequences.
        runner: owns the weights and the KV memory.
        generations: has the running requests.
        on_change: called when ``is_paused`` or ``version`` has changed.
        has_dynamic_weights: whether weights may be freed and updated (``--dynamic-load-weight``).
        frees_kv: whether the pages of KV memory can be freed; not if a network device has registered them.
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
        """Called when a pause begins. Parts that hold blocks without a running request release them then."""
        self.has_dynamic_weights = has_dynamic_weights
        self._frees_kv = frees_kv
        self._sleeping: set[str] = set()
        self._turn = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """Whether the instance refuses requests because it is paused or sleeps."""
        return self._core.is_paused

    @property
    def is_broken(self) -> bool:
        """Whether the weights are incomplete because an update has failed; ``wake_up`` loads them again."""
        return self._generations.is_broken

    @property
    def version(self) -> str | None:
        """The version of the weights, or None if the weights have no version."""
        return self._runner.version or None

    async def pause(self) -> None:
        """Refuse new requests, abort running requests, and clear the prefix cache.

        Raises:
            ControlFailed: running requests did not end in time; new requests are refused nevertheless.
        """
        async with self._take_turn():
            await self._pause()

    async def resume(self) -> None:
        """Accept requests again.

        Raises:
            ControlFailed: the instance sleeps, so it must be woken up first.
        """
        async with self._take_turn():
            if self._sleeping:
                names = ", ".join(sorted(self._sleeping))
                raise ControlFailed(f"this instance sleeps and has freed {names}; POST /v1/wakeup first")
            self._set_paused(False)

    async def find_out_if_paused(self) -> bool:
        """Wait until all earlier commands have ended, and return whether the instance is paused."""
        async with self._take_turn():
            return self.is_paused

    async def sleep(self, tags: Sequence[str]) -> list[None]:
        """Pause the instance, and free the memory of the parts ``tags``, which are some of ``TAGS``.

        Returns:
            FastDeploy's result: a list with None for each worker. An instance here has one worker.

        Raises:
            ControlFailed: the pause failed, a part cannot be freed, or blocks are still in use.
        """
        self._check_tags(tags)
        async with self._take_turn():
            await self._pause()
            await self._wait_for_blocks()
            self._sleeping.update(tags)  # before the memory is freed, so that a part is loaded again if that fails
            if "weight" in tags:
                await self._run(self._runner.free_weights)
            if "kv_cache" in tags and self._frees_kv:
                await self._run(self._runner.free_kv)
            log.info("This instance sleeps and has freed %s", ", ".join(sorted(self._sleeping)))
        return [None]

    async def wake_up(self, tags: Sequence[str]) -> list[None]:
        """Restore the parts ``tags``, if they are freed. If no part is freed any more, accept requests again.

        The weights are loaded from the checkpoint's folder as it is now.

        Returns:
            FastDeploy's result: a list with None for each worker. An instance here has one worker.

        Raises:
            ControlFailed: a part cannot be restored; it stays freed.
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
        """Load the weights that are now in the checkpoint's folder. KV of the old weights is not used afterwards.

        Args:
            version: version of the new weights; "": the version in the folder's ``version.yaml``, if there is one.

        Returns:
            FastDeploy's report of the update: a list with one item for each worker, of which there is one here.

        Raises:
            ControlFailed: the instance is not paused, or the weights cannot be loaded. Then the old weights are in use,
                or the instance ``is_broken`` and has no weights.
        """
        self._check_tags(("weight",))
        async with self._take_turn():
            if not self.is_paused:
                raise ControlFailed("Pause LLM Engine first before calling updating weights")
            if "weight" in self._sleeping:
                raise ControlFailed(
                    "this instance sleeps and has freed its weights; POST /v1/wakeup loads the current weights"
                )
            await self._wait_for_blocks()
            seconds = await self._load_weights(version)
        cost = {"sync_cost": 0.0, "update_cost": seconds, "total_cost": seconds}
        return [{**cost, "version": self._runner.version, "rank": 0}]

    def _check_tags(self, tags: Sequence[str]) -> None:
        for tag in tags:
            if tag not in TAGS:
                raise ControlFailed(f"Unsupported tag [{tag}] in [{','.join(tags)}], expected one of {list(TAGS)}")
        if "weight" in tags and not self.has_dynamic_weights:
            raise ControlFailed(
                "the weights of this instance cannot change; start the instance with --dynamic-load-weight"
            )

    async def _load_weights(self, version: str) -> float:
        """Load the weights in the checkpoint's folder, and clear the KV of the old weights.

        Returns:
            The duration in seconds.
        """
        start, before = time.monotonic(), self._runner.namespace
        try:
            await self._run(lambda: self._runner.update_weights(version))
            await self._ask_core(self._core.follow_weights)
        except BaseException:
            is_freed = "weight" in self._sleeping
            if self._runner.namespace != before or not (is_freed or self._runner.has_weights):
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
            await asyncio.wait_for(self._end_requests(), _COMMAND_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            raise ControlFailed(f"running requests have not ended within {_COMMAND_SECONDS:g} s; try again") from None
        self._core.clear_prefix_cache()

    async def _end_requests(self) -> None:
        """Abort all requests, and wait until the engine has no sequences. Clients may still read their answers then."""
        while True:
            self._generations.abort_all()
            if not await self._ask_core(lambda: self._core.scheduler.has_sequences):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_for_blocks(self) -> None:
        """Wait until no load, save or hand-over uses a block.

        Raises:
            ControlFailed: blocks are still in use after ``_BLOCKS_SECONDS``.
        """
        deadline = time.monotonic() + _BLOCKS_SECONDS
        while await self._ask_core(lambda: self._core.has_blocks_in_use):
            if time.monotonic() > deadline:
                raise ControlFailed(
                    f"KV blocks are still being saved or transferred after {_BLOCKS_SECONDS:g} s; try again"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _ask_core(self, question: Callable[[], _T]) -> _T:
        if not self._core.is_alive:
            raise ControlFailed("the engine of this instance has ended; the instance's log says why")
        answering = asyncio.wrap_future(self._core.call(question))
        # After the time limit the engine still calls ``question`` at some time.
        await asyncio.wait([answering], timeout=_COMMAND_SECONDS)
        if not answering.done():
            raise ControlFailed(
                f"the engine did not process the command within {_COMMAND_SECONDS:g} s, because a step takes longer"
            )
        try:
            return answering.result()
        except Exception as exc:
            raise ControlFailed(f"the engine failed: {exc}") from exc

    @contextlib.asynccontextmanager
    async def _take_turn(self) -> AsyncIterator[None]:
        """Wait until all earlier commands have ended; later commands wait until the ``with`` block ends."""
        try:
            await asyncio.wait_for(self._turn.acquire(), _COMMAND_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            raise ControlFailed(
                f"the previous command has not ended within {_COMMAND_SECONDS:g} s; try again"
            ) from None
        try:
            yield
        finally:
            self._turn.release()

    def _set_broken(self, is_broken: bool) -> None:
        if self.is_broken != is_broken:
            self._generations.is_broken = is_broken
            log.warning("%s", BROKEN if is_broken else "The weights are complete again")

    def _set_paused(self, is_paused: bool) -> None:
        if self._core.is_paused != is_paused:
            self._core.is_paused = self._generations.is_paused = is_paused
            log.info("Requests are %s", "refused: this instance is paused" if is_paused else "accepted again")
            self._on_change()
