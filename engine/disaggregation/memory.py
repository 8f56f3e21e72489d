"""Access of hand-overs to this instance's KV blocks: D reserves and verifies them, P reads and sends them.

The engine's thread owns all blocks. This module reserves and releases them through ``EngineCore``; bytes move on other
threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engine.core import EngineCore
from engine.disaggregation.landing import Landing, digest_values
from engine.disaggregation.transfer import Transfer
from engine.disaggregation.wire import Prompt
from engine.model.model_runner import ModelRunner
from engine.scheduling.scheduler import Reservation
from kvstore_backend.transfers import Event, TransferMemory

__all__ = ["BlockMemory", "Target"]

# A decode instance that hangs blocks its writes for 30 s. Writes to other instances continue on other threads.
_MAX_WRITERS = 32
# These threads compare and copy bytes within this machine.
_MAX_LANDERS = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """The addresses where D wants the blocks from the ``num_cached``-th on, one for each, in D's ``session``."""

    session: str
    addresses: list[int]
    num_cached: int


class BlockMemory:
    """KV memory that other instances write to, and that is written to other instances.

    Args:
        core: owns the blocks.
        runner: owns the memory of the blocks.
        transfer: moves bytes.
        memory: the blocks' memory, as ``transfer`` accesses it.
        max_lent: the maximum number of blocks that are reserved for writes of other instances at a time.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        transfer: Transfer,
        memory: TransferMemory,
        max_lent: float = math.inf,
    ) -> None:
        self._core = core
        self._runner = runner
        self._transfer = transfer
        self._memory = memory
        self._max_lent = max_lent
        self._landings: dict[Reservation, Landing] = {}
        self._num_asked = 0
        """Blocks of hand-overs that wait for their reservation, and are not in ``_landings`` yet."""
        self._landers = ThreadPoolExecutor(_MAX_LANDERS, "kv-land")
        self._writers = ThreadPoolExecutor(_MAX_WRITERS, "kv-write")
        self.vocab_size = runner.vocab_size

    @property
    def block_bytes(self) -> int:
        """The size of a block in bytes."""
        return self._runner.shape.nbytes

    @property
    def terms(self) -> dict[str, object]:
        """The namespace and the protocol, which must be equal on both sides."""
        return {"namespace": self._runner.namespace.digest, "protocol": self._transfer.protocol}

    def parse_target(self, message: dict[str, Any], prompt: Prompt) -> Target:
        """Parse a "reserved" message from an untrusted sender.

        Raises:
            ValueError, KeyError, TypeError: it does not name an address for every block of ``prompt``.
        """
        session, addresses, num_cached = message["session"], message["addresses"], message["num_cached"]
        num_blocks = -(-prompt.num_tokens // self._runner.shape.block_size)
        if not 0 <= num_cached <= num_blocks or len(addresses) != num_blocks - num_cached:
            raise ValueError(f"{len(addresses)} addresses and {num_cached} cached for {num_blocks} blocks")
        return Target(str(session), list(map(int, addresses)), num_cached)

    async def reserve_blocks(self, prompt: Prompt) -> Reservation | None:
        """Reserve blocks for ``prompt``; None: there are not enough.

        Adopt the result or call ``cancel_reservation``.
        """
        lent = self._num_asked + sum(len(landing.blocks) for landing in self._landings.values())
        wanted = -(-prompt.num_tokens // self._runner.shape.block_size)
        if lent + wanted > self._max_lent:
            return None
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Reservation | None] = loop.create_future()

        def set_answer(reservation: Reservation | None) -> None:
            if not answered.done():
                answered.set_result(reservation)
            elif reservation is not None:  # the hand-over that requested it has ended meanwhile
                self.cancel_reservation(reservation, clear=False)

        def on_reserved(reservation: Reservation | None) -> None:
            loop.call_soon_threadsafe(set_answer, reservation)

        self._num_asked += wanted
        self._core.reserve_blocks(prompt.hashes, prompt.num_tokens, on_reserved)
        try:
            return await answered
        except asyncio.CancelledError:
            # The reservation may exist already, and now no caller takes it.
            if answered.done() and not answered.cancelled() and (reservation := answered.result()):
                self.cancel_reservation(reservation, clear=False)
            raise
        finally:
            self._num_asked -= wanted  # the caller lends at once, with no other task between

    def cancel_reservation(self, reservation: Reservation, *, clear: bool) -> None:
        """Release the blocks; other instances write to them no more. ``clear``: another instance may have written."""
        if (landing := self._landings.pop(reservation, None)) is None:
            self._core.cancel_reservation(reservation, clear=clear)
            return

        def close_and_cancel() -> None:
            try:
                landing.close()
            finally:
                self._core.cancel_reservation(reservation, clear=clear)

        self._landers.submit(close_and_cancel)

    async def lend_blocks(self, reservation: Reservation) -> Target:
        """Open the missing blocks of ``reservation`` for writes; return their addresses."""
        landing = self._landings[reservation] = Landing(self._memory, reservation.missing)
        addresses = await asyncio.wrap_future(self._landers.submit(landing.open_windows))
        return Target(self._transfer.session, addresses, reservation.num_cached)

    async def take_blocks_in(self, reservation: Reservation, digests: object) -> bool:
        """Move the missing blocks into KV memory; return whether they were written with these digests."""
        landing = self._landings[reservation]
        if not await asyncio.wrap_future(self._landers.submit(landing.take_in, digests)):
            return False
        del self._landings[reservation]
        self._count_bytes(len(reservation.missing))
        return True

    def write_blocks(self, blocks: Sequence[int], first: int, target: Target) -> Future[list[str] | None]:
        """Write the sequence's blocks from the ``first``-th on to ``target``, except those that D has.

        Takes ownership of the caller's reference on each block, and releases it when the write has returned.

        Returns:
            (on a thread of its own) the digests of the blocks written; None if the write failed.
        """

        after = self._memory.record_event()

        def write_and_release() -> list[str] | None:
            try:
                start = max(0, first - target.num_cached)
                missing = blocks[max(0, target.num_cached - first) :]
                return self._write_parts(missing, target.session, target.addresses[start : start + len(missing)], after)
            except Exception:
                log.exception("Writing %d blocks to %s failed", len(blocks), target.session)
                return None
            finally:
                self._core.release_blocks(blocks)

        return self._writers.submit(write_and_release)

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Release references on blocks that will not be written."""
        self._core.release_blocks(blocks)

    def _write_parts(
        self, blocks: Sequence[int], session: str, addresses: Sequence[int], after: Event | None
    ) -> list[str] | None:
        """Write blocks through as many windows as they need; return their digests, or None if a write failed."""
        digests: list[str] = []
        while len(digests) < len(blocks):
            begin = len(digests)
            window = self._memory.open_outgoing(blocks[begin:], after)
            try:
                window.wait()
                sources = [value[0].address for value in window.values]
                digests += digest_values(window.values)
                if not self._transfer.write(session, sources, addresses[begin : len(digests)], self.block_bytes):
                    return None
            finally:
                window.take_back()
        self._count_bytes(len(blocks))
        return digests

    def _count_bytes(self, num_blocks: int) -> None:
        self._core.metrics.handed_over_bytes.inc(num_blocks * self._runner.shape.nbytes)
