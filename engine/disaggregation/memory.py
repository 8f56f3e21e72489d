"""This instance's KV blocks as hand-overs reach them: reserved, written and verified on D; read and sent on P.

The engine's thread owns all blocks; here they are asked for and given back through ``EngineCore``, while bytes move
on threads of their own.
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

# A decode instance that hangs holds its writes for 30 s; writes to others go on beside them.
_MAX_WRITERS = 32
# Bytes are compared and copied within this machine.
_MAX_LANDERS = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Where D wants the blocks from the ``num_cached``-th on: one address each, in D's ``session``."""

    session: str
    addresses: list[int]
    num_cached: int


class BlockMemory:
    """KV memory that others may write to, and that can be written to others.

    Args:
        core: owns the blocks.
        runner: owns their memory.
        transfer: moves bytes.
        memory: that memory, where ``transfer`` reaches it.
        max_lent: how many blocks others may be about to write at once.
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
        """The size of a block."""
        return self._runner.shape.nbytes

    @property
    def terms(self) -> dict[str, object]:
        """The namespace and the protocol, in which both sides must agree."""
        return {"namespace": self._runner.namespace.digest, "protocol": self._transfer.protocol}

    def parse_target(self, message: dict[str, Any], prompt: Prompt) -> Target:
        """Read a "reserved" whose author is not trusted.

        Raises:
            ValueError, KeyError, TypeError: it names no place for every block of ``prompt``.
        """
        session, addresses, num_cached = message["session"], message["addresses"], message["num_cached"]
        num_blocks = -(-prompt.num_tokens // self._runner.shape.block_size)
        if not 0 <= num_cached <= num_blocks or len(addresses) != num_blocks - num_cached:
            raise ValueError(f"{len(addresses)} addresses and {num_cached} cached for {num_blocks} blocks")
        return Target(str(session), list(map(int, addresses)), num_cached)

    async def reserve_blocks(self, prompt: Prompt) -> Reservation | None:
        """Blocks for ``prompt``; None where there is no room. Given back by ``cancel_reservation``, or adopted."""
        lent = self._num_asked + sum(len(landing.blocks) for landing in self._landings.values())
        wanted = -(-prompt.num_tokens // self._runner.shape.block_size)
        if lent + wanted > self._max_lent:
            return None
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Reservation | None] = loop.create_future()

        def set_answer(reservation: Reservation | None) -> None:
            if not answered.done():
                answered.set_result(reservation)
            elif reservation is not None:  # the hand-over that asked has gone meanwhile
                self.cancel_reservation(reservation, clear=False)

        def on_reserved(reservation: Reservation | None) -> None:
            loop.call_soon_threadsafe(set_answer, reservation)

        self._num_asked += wanted
        self._core.reserve_blocks(prompt.hashes, prompt.num_tokens, on_reserved)
        try:
            return await answered
        except asyncio.CancelledError:
            # The answer may be there already, and now nobody takes it.
            if answered.done() and not answered.cancelled() and (reservation := answered.result()):
                self.cancel_reservation(reservation, clear=False)
            raise
        finally:
            self._num_asked -= wanted  # the caller lends at once, with no other task between

    def cancel_reservation(self, reservation: Reservation, *, clear: bool) -> None:
        """Give the blocks back; nobody may write to them any more. ``clear``: somebody may have written."""
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
        """Where the missing blocks of ``reservation`` are to be written."""
        landing = self._landings[reservation] = Landing(self._memory, reservation.missing)
        addresses = await asyncio.wrap_future(self._landers.submit(landing.open_windows))
        return Target(self._transfer.session, addresses, reservation.num_cached)

    async def take_blocks_in(self, reservation: Reservation, digests: object) -> bool:
        """Whether the missing blocks were written with these digests; then they are in KV memory."""
        landing = self._landings[reservation]
        if not await asyncio.wrap_future(self._landers.submit(landing.take_in, digests)):
            return False
        del self._landings[reservation]
        self._count_bytes(len(reservation.missing))
        return True

    def write_blocks(self, blocks: Sequence[int], first: int, target: Target) -> Future[list[str] | None]:
        """Write the sequence's blocks from the ``first``-th on to where they belong, but those that D has.

        Takes over the caller's reference on each block, and gives it back when the write has returned.

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
        """Give back references on blocks that are not to be written after all."""
        self._core.release_blocks(blocks)

    def _write_parts(
        self, blocks: Sequence[int], session: str, addresses: Sequence[int], after: Event | None
    ) -> list[str] | None:
        """Write blocks by way of as many windows as they take; their digests, or None."""
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
