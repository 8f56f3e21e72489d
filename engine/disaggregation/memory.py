"""This instance's KV blocks as hand-overs reach them: reserved, written and verified on D; read and sent on P.

The engine's thread owns all blocks; here they are asked for and given back through ``EngineCore``, while bytes move
on threads of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from engine.core import EngineCore
from engine.disaggregation.transfer import Transfer
from engine.disaggregation.wire import Prompt
from engine.model_runner import ModelRunner
from engine.scheduler import Reservation

__all__ = ["BlockMemory", "Target"]

# A decode instance that hangs holds its writes for 30 s; writes to others go on beside them.
_MAX_WRITERS = 32


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
        runner: owns their memory, which must be the host's.
        transfer: has that memory registered.
    """

    def __init__(self, core: EngineCore, runner: ModelRunner, transfer: Transfer) -> None:
        self._core = core
        self._runner = runner
        self._transfer = transfer
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
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Reservation | None] = loop.create_future()

        def set_answer(reservation: Reservation | None) -> None:
            if not answered.done():
                answered.set_result(reservation)
            elif reservation is not None:  # the hand-over that asked has gone meanwhile
                self.cancel_reservation(reservation, clear=False)

        def on_reserved(reservation: Reservation | None) -> None:
            loop.call_soon_threadsafe(set_answer, reservation)

        self._core.reserve_blocks(prompt.hashes, prompt.num_tokens, on_reserved)
        try:
            return await answered
        except asyncio.CancelledError:
            # The answer may be there already, and now nobody takes it.
            if answered.done() and not answered.cancelled() and (reservation := answered.result()):
                self.cancel_reservation(reservation, clear=False)
            raise

    def cancel_reservation(self, reservation: Reservation, *, clear: bool) -> None:
        """Give the blocks back; nobody may write to them any more. ``clear``: somebody may have written."""
        self._core.cancel_reservation(reservation, clear=clear)

    def locate_target(self, reservation: Reservation) -> Target:
        """Where the missing blocks of ``reservation`` are to be written."""
        addresses = [self._runner.span(block).address for block in reservation.missing]
        return Target(self._transfer.session, addresses, reservation.num_cached)

    async def verify_blocks(self, reservation: Reservation, digests: object) -> bool:
        """Whether the missing blocks have these digests."""
        found: list[str] = await asyncio.to_thread(self.digest_blocks, reservation.missing)
        verified = found == digests
        if verified:
            self._count_bytes(len(found))
        return verified

    def write_blocks(self, blocks: Sequence[int], first: int, target: Target) -> Future[list[str] | None]:
        """Write the sequence's blocks from the ``first``-th on to where they belong, but those that D has.

        Takes over the caller's reference on each block, and gives it back when the write has returned.

        Returns:
            (on a thread of its own) the digests of the blocks written; None if the write failed.
        """

        def write_and_release() -> list[str] | None:
            try:
                missing = blocks[max(0, target.num_cached - first) :]
                if not missing:
                    return []
                start = max(0, first - target.num_cached)
                addresses = target.addresses[start : start + len(missing)]
                digests = self.digest_blocks(missing)
                sources = [self._runner.span(block).address for block in missing]
                if not self._transfer.write(target.session, sources, addresses, self._runner.shape.nbytes):
                    return None
                self._count_bytes(len(missing))
                return digests
            finally:
                self._core.release_blocks(blocks)

        return self._writers.submit(write_and_release)

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Give back references on blocks that are not to be written after all."""
        self._core.release_blocks(blocks)

    def digest_blocks(self, blocks: Sequence[int]) -> list[str]:
        """The XXH3-64 of each block's bytes, in hexadecimal."""
        nbytes = self._runner.shape.nbytes
        spans = map(self._runner.span, blocks)
        return [xxhash.xxh3_64_hexdigest((ctypes.c_char * nbytes).from_address(span.address)) for span in spans]

    def _count_bytes(self, num_blocks: int) -> None:
        self._core.metrics.handed_over_bytes.inc(num_blocks * self._runner.shape.nbytes)
