"""A prefill and a decode instance in one process, with a real TransferEngine, without HTTP and router."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from engine.disaggregation import BlockMemory, HandoverReceiver, Transfer
from engine.generation import Generation, Generations, Piece, SharedParts
from engine.pool.staging import open_direct, stage_handovers
from engine.protocol import DisaggregateInfo
from engine.scheduling.request import Request, SamplingParams
from kvstore_backend.backend import HEADROOM_BYTES
from tests.engine.event_loop import eventually
from tests.engine.running import Engine
from tests.support.device import TEST_DEVICE

__all__ = [
    "HOST",
    "PROMPT",
    "FaultyTransfer",
    "Pair",
    "Side",
    "collect_pieces",
    "empty_prefix_cache",
    "pair_of",
    "tokens_of",
]

HOST = "127.0.0.1"
PROMPT = tuple(range(1, 101))


class FaultyTransfer(Transfer):
    """A real transfer that a test can make fail, corrupt a byte, or hang."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(HOST, "tcp")
        self.direct = open_direct(engine.runner, self) if TEST_DEVICE == "cpu" else None
        self.staged = stage_handovers(
            engine.runner, self, 0, buffer_bytes=2 * (engine.runner.shape.nbytes + HEADROOM_BYTES)
        )
        self.fails = False
        self.corrupts = False
        """Whether each write changes a byte of the target memory to a wrong value."""
        self.hanging = threading.Event()
        """Set when a write hangs."""
        self._go = threading.Event()
        self._go.set()

    def hang(self) -> None:
        self._go.clear()

    def go_on(self) -> None:
        """Continue all writes that hang."""
        self._go.set()

    def write(self, session: str, sources: Sequence[int], targets: Sequence[int], nbytes: int) -> bool:
        if not self._go.is_set():
            self.hanging.set()
            self._go.wait()
        if self.fails:
            return False
        written = super().write(session, sources, targets, nbytes)
        if self.corrupts:
            ctypes.c_ubyte.from_address(targets[0]).value ^= 1
        return written


class Side:
    """One instance of a pair: its engine, transfer, receiver and generations."""

    def __init__(
        self, engine: Engine, role: str, tokenizer: Any, expiry_seconds: float = 10.0, *, staged: bool = False
    ) -> None:
        self.engine = engine
        self.transfer = transfer_of(engine)
        self.transfer.fails = self.transfer.corrupts = False
        self.transfer.hanging.clear()
        memory = self.transfer.staged if staged else self.transfer.direct
        assert memory, "the host cannot read a device's memory"
        self.memory = BlockMemory(engine.core, engine.runner, self.transfer, memory)
        self.receiver = HandoverReceiver(self.memory, max(30.0, expiry_seconds), expiry_seconds)
        self.generations = Generations(
            SharedParts(engine.core, tokenizer, role, engine.block_size, self.receiver, self.memory)
        )
        self._before = {way: self._handed_over(way) for way in ("direct", "pool", "computed")}
        self._bytes_before = engine.metric("kvstore_handed_over_bytes_total")

    def handed_over(self, way: str) -> float:
        """Return the number of this test's requests that got their KV this way."""
        return self._handed_over(way) - self._before[way]

    def _handed_over(self, way: str) -> float:
        return self.engine.metric("kvstore_handed_over_total", way=way)

    @property
    def bytes_handed_over(self) -> float:
        """Bytes that this instance handed over, or received, in this test."""
        return self.engine.metric("kvstore_handed_over_bytes_total") - self._bytes_before

    @property
    def is_free(self) -> bool:
        return self.engine.metric("fastdeploy:available_gpu_block_num") == self.engine.blocks.num_blocks

    @property
    def num_reserved(self) -> float:
        return self.engine.metric("kvstore_reserved_blocks")


class Pair:
    """A prefill and a decode instance; at the end of a test, neither has a request."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill, self.decode = prefill, decode

    @property
    def info(self) -> DisaggregateInfo:
        """The information about the pair that a router adds to a request."""
        return DisaggregateInfo(decode_ip=HOST, decode_connector_port=self.decode.receiver.port)

    def start(
        self, prompt: Sequence[int] = PROMPT, max_tokens: int = 12, name: str = "r", **params: Any
    ) -> tuple[Generation, Generation]:
        """Start both legs of a request."""
        sampling = SamplingParams(max_tokens, **{"temperature": 0.0, **params})
        request = Request(name, tuple(prompt), sampling)
        return (self.prefill.generations.begin(request, self.info), self.decode.generations.begin(request, self.info))

    async def answer(self, prompt: Sequence[int] = PROMPT, max_tokens: int = 12, **params: Any) -> list[Piece]:
        """Start a request; return the pieces that decode generates."""
        _, pieces = await asyncio.gather(*map(collect_pieces, self.start(prompt, max_tokens, **params)))
        return pieces

    async def until_free(self) -> None:
        await eventually(lambda: self.prefill.is_free and self.decode.is_free, f"all blocks: {self}")

    def __repr__(self) -> str:
        return f"{self.prefill.engine.scheduler} {self.decode.engine.scheduler}"


async def collect_pieces(generation: Generation) -> list[Piece]:
    """Return all pieces that one leg generates."""
    return [piece async for piece in generation.pieces()]


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [piece.token_id for piece in pieces if piece.token_id is not None]


@functools.cache
def transfer_of(engine: Engine) -> FaultyTransfer:
    """Return the transfer of an engine. It is never closed, because that takes a second."""
    return FaultyTransfer(engine)


@functools.cache
def shared_engines(folder: str) -> tuple[Engine, Engine]:
    """Return two engines for all tests without special options. Their threads end with the process."""
    return Engine(Path(folder)), Engine(Path(folder))


def empty_prefix_cache(engine: Engine) -> None:
    """Remove all blocks from the prefix cache of an idle engine."""
    blocks = engine.blocks
    blocks.release_blocks(blocks.allocate_blocks(blocks.num_available))


@contextlib.asynccontextmanager
async def pair_of(
    folder: Path,
    tokenizer: Any,
    *,
    expiry_seconds: float = 10.0,
    num_blocks: int = 64,
    prefill_blocks: int = 64,
    staged: bool = TEST_DEVICE != "cpu",
    **options: Any,
) -> AsyncIterator[Pair]:
    """Start a pair. At the end, assert that all its blocks become free.

    Args:
        expiry_seconds: time after which decode releases the blocks of a request that does not arrive.
        num_blocks: number of decode's blocks.
        prefill_blocks: number of prefill's blocks.
        staged: blocks pass through staging buffers on both sides, as with a GPU.
        options: further options of both engines.
    """
    own = options or (num_blocks, prefill_blocks) != (64, 64)
    with contextlib.ExitStack() as started:
        engines = shared_engines(str(folder))
        if own:
            engines = (
                started.enter_context(Engine(folder, num_blocks=prefill_blocks, **options)),
                started.enter_context(Engine(folder, num_blocks=num_blocks, **options)),
            )
        p, d = engines
        decode = Side(d, "decode", tokenizer, expiry_seconds, staged=staged)
        pair = Pair(Side(p, "prefill", tokenizer, staged=staged), decode)
        await pair.decode.receiver.start_listening(socket.create_server((HOST, 0)))
        try:
            yield pair
            await pair.until_free()
            assert pair.decode.num_reserved == 0
        finally:
            pair.prefill.transfer.go_on()
            await pair.decode.receiver.stop_listening()
            for engine in engines:
                empty_prefix_cache(engine)
