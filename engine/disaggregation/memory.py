"""The KV blocks of an instance, for hand-overs: decode reserves and verifies blocks, prefill writes them to decode.

The engine's thread owns the blocks; they are reserved and released by methods of ``EngineCore``. Bytes are copied on
other threads.
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
from engine.disaggregation.incoming import IncomingBlocks, digest_values
from engine.disaggregation.transfer import Transfer
from engine.disaggregation.wire import Prompt
from engine.model.model_runner import ModelRunner
from engine.scheduling.scheduler import Reservation
from kvstore_backend.transfers import Event, TransferMemory

__all__ = ["BlockMemory", "Target"]

# Maximum number of threads that write to decode instances. If a decode instance hangs, its threads wait for 30 s.
_MAX_WRITERS = 32
# Maximum number of threads that check and copy incoming blocks.
_MAX_MOVERS = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """The memory of a decode instance to which the blocks of a prompt are written.

    Attributes:
        session: the name of the decode instance for TransferEngine.
        addresses: the address for each block from index ``num_cached`` on.
        num_cached: number of leading blocks of the prompt that the decode instance has already.
    """

    session: str
    addresses: list[int]
    num_cached: int


class BlockMemory:
    """Reserves and verifies blocks that other instances write, and writes blocks to other instances.

    Args:
        core: owns the blocks.
        runner: owns the KV memory.
        transfer: writes bytes to other instances.
        memory: gives ``transfer`` access to KV memory, directly or through buffers.
        max_reserved: maximum number of blocks that are reserved at the same time for writes of other instances.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        transfer: Transfer,
        memory: TransferMemory,
        max_reserved: float = math.inf,
    ) -> None:
        self._core = core
        self._runner = runner
        self._transfer = transfer
        self._memory = memory
        self._max_reserved = max_reserved
        self._incoming: dict[Reservation, IncomingBlocks] = {}
        self._num_requested = 0
        """Number of blocks that were requested from the engine and are not in ``_incoming`` yet."""
        self._movers = ThreadPoolExecutor(_MAX_MOVERS, "kv-move")
        self._writers = ThreadPoolExecutor(_MAX_WRITERS, "kv-write")
        self.vocab_size = runner.vocab_size

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes."""
        return self._runner.shape.nbytes

    @property
    def terms(self) -> dict[str, object]:
        """The namespace and the protocol. They must be equal in both instances of a direct transfer."""
        return {"namespace": self._runner.namespace.digest, "protocol": self._transfer.protocol}

    def parse_target(self, message: dict[str, Any], prompt: Prompt) -> Target:
        """Return the target in a "reserved" message.

        Raises:
            ValueError, KeyError, TypeError: the message does not have one address for each missing block of ``prompt``.
        """
        session, addresses, num_cached = message["session"], message["addresses"], message["num_cached"]
        num_blocks = self._core.scheduler.groups.count_held_blocks(prompt.num_tokens)
        if not 0 <= num_cached <= num_blocks or len(addresses) != num_blocks - num_cached:
            raise ValueError(
                f"the prompt has {num_blocks} blocks, but the decode instance has sent {len(addresses)} addresses and "
                f"says that its own cache has {num_cached} of these blocks"
            )
        return Target(str(session), list(map(int, addresses)), num_cached)

    async def reserve_blocks(self, prompt: Prompt) -> Reservation | None:
        """Reserve blocks for ``prompt``.

        Returns:
            The reservation, which the caller passes to the engine or to ``cancel_reservation``; or None if there are
            not enough free blocks, or ``max_reserved`` would be exceeded.
        """
        reserved = self._num_requested + sum(len(incoming.blocks) for incoming in self._incoming.values())
        wanted = self._core.scheduler.groups.count_held_blocks(prompt.num_tokens)
        if reserved + wanted > self._max_reserved:
            return None
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Reservation | None] = loop.create_future()

        def set_answer(reservation: Reservation | None) -> None:
            if not answered.done():
                answered.set_result(reservation)
            elif reservation is not None:  # the caller was cancelled meanwhile
                self.cancel_reservation(reservation, clear=False)

        def on_reserved(reservation: Reservation | None) -> None:
            loop.call_soon_threadsafe(set_answer, reservation)

        self._num_requested += wanted
        self._core.reserve_blocks(prompt.hashes, prompt.num_tokens, on_reserved)
        try:
            return await answered
        except asyncio.CancelledError:
            # If the reservation exists already, the caller will not get it.
            if answered.done() and not answered.cancelled() and (reservation := answered.result()):
                self.cancel_reservation(reservation, clear=False)
            raise
        finally:
            # The caller calls ``open_blocks`` next, which counts the blocks again before another task can run.
            self._num_requested -= wanted

    def cancel_reservation(self, reservation: Reservation, *, clear: bool) -> None:
        """Release the blocks of a reservation, and the memory that was opened for them.

        With ``clear`` the blocks are set to zero, because another instance may have written to them.
        """
        if (incoming := self._incoming.pop(reservation, None)) is None:
            self._core.cancel_reservation(reservation, clear=clear)
            return

        def close_and_cancel() -> None:
            try:
                incoming.close()
            finally:
                self._core.cancel_reservation(reservation, clear=clear)

        self._movers.submit(close_and_cancel)

    async def open_blocks(self, reservation: Reservation) -> Target:
        """Open the missing blocks of ``reservation`` for writes of another instance, and return their addresses."""
        incoming = self._incoming[reservation] = IncomingBlocks(self._memory, reservation.missing)
        addresses = await asyncio.wrap_future(self._movers.submit(incoming.open_windows))
        return Target(self._transfer.session, addresses, reservation.num_cached)

    async def accept_blocks(self, reservation: Reservation, digests: object) -> bool:
        """Check the written blocks of ``reservation``, and move them to KV memory.

        Returns:
            False if a block does not have its digest in ``digests``; then nothing was moved.
        """
        incoming = self._incoming[reservation]
        if not await asyncio.wrap_future(self._movers.submit(incoming.move_in, digests)):
            return False
        del self._incoming[reservation]
        self._count_bytes(len(reservation.missing))
        return True

    def write_blocks(self, blocks: Sequence[int], first: int, target: Target) -> Future[list[str] | None]:
        """Start to write blocks of a prompt to a decode instance, except blocks that the decode instance already has.

        The write runs on another thread. The caller's reference on each block is released when the write has ended.

        ``first`` is the index of the first of these blocks in the prompt.

        Returns:
            A future with the digests of the written blocks, or with None if the write failed.
        """

        after = self._memory.record_event()

        def write_and_release() -> list[str] | None:
            try:
                start = max(0, first - target.num_cached)
                missing = blocks[max(0, target.num_cached - first) :]
                return self._write_parts(missing, target.session, target.addresses[start : start + len(missing)], after)
            except Exception:
                log.exception("Writing %d blocks to the instance at %s failed", len(blocks), target.session)
                return None
            finally:
                self._core.release_blocks(blocks)

        return self._writers.submit(write_and_release)

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Release the references on blocks that will not be written."""
        self._core.release_blocks(blocks)

    def _write_parts(
        self, blocks: Sequence[int], session: str, addresses: Sequence[int], after: Event | None
    ) -> list[str] | None:
        """Write blocks in parts, after the device event ``after``. Return their digests, or None if a write failed."""
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
