"""Blocks with another tensor-parallel size, or another block size, result in the same greedy responses.

This engine has no ranks, so the tests simulate them: they divide the blocks of one instance into the blocks of each
rank. Engines, or readers of one rank, load them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.scheduling.pool_use import Reason
from kvstore_backend import Namespace
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.manifest import manifest_key
from kvstore_backend.pool import BlockPool
from kvstore_backend.resharding import PeerShardings
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.engine.checkpoints import VOCAB_SIZE, config_of, write_checkpoint
from tests.engine.faulty_store import FaultyStore
from tests.engine.running import Engine
from tests.support.memory import Memory
from tests.support.recut import WholeKV, leave_marker, store_blocks

PROMPT = random.Random(3).choices(range(VOCAB_SIZE), k=150)
LAST = (len(PROMPT) - 1) // 16
"""Number of usable blocks of the prompt, with 16 tokens each."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with four KV heads."""
    return write_checkpoint(config_of("qwen2", num_key_value_heads=4), tmp_path_factory.mktemp("four heads"))


def wrap_store(store: MemoryStore) -> CheckedBackend:
    """Return the store for an engine, which does not close it."""
    return CheckedBackend(FaultyStore(store))


class SavedPrompt:
    """A prompt that an engine computed: the tokens of its response, and the KV of all heads."""

    def __init__(self, checkpoint: Path) -> None:
        store = MemoryStore(64 << 20)
        with Engine(checkpoint, store=wrap_store(store)) as engine:
            self.answer = engine.answer(PROMPT).wait()
            self.own, self.family = engine.runner.namespace, engine.runner.family
        blocks = self.read(store, self.own)
        array = np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), *self.family.shape_of(self.own))
        self.whole = WholeKV(np.concatenate(array, axis=3))

    def read(self, store: MemoryStore, sharding: Namespace) -> list[bytes]:
        """Return all blocks of the prompt that the rank of ``sharding`` saved."""
        pool = BlockPool(CheckedBackend(store), sharding)
        hashes = extend_block_hashes([], PROMPT, sharding.block_size, root_hash())
        memories = [Memory(self.family.block_bytes(sharding)) for _ in hashes]
        assert all(pool.get_blocks(hashes, [memory.value for memory in memories]))
        return [memory.content for memory in memories]

    def sharding(self, tp_size: int, block_size: int = 16) -> Namespace:
        return replace(self.own, tp_size=tp_size, num_kv_heads=4 // tp_size, block_size=block_size)

    def store_as(self, tp_size: int, block_size: int = 16) -> MemoryStore:
        """Return a pool in which an instance with this sharding has saved the prompt."""
        store = MemoryStore(64 << 20)
        for rank in range(tp_size):
            sharding = replace(self.sharding(tp_size, block_size), tp_rank=rank)
            store_blocks(BlockPool(CheckedBackend(store), sharding), self.whole, PROMPT)
        return store


@pytest.fixture(scope="module")
def saved_prompt(checkpoint: Path) -> SavedPrompt:
    return SavedPrompt(checkpoint)


@pytest.mark.parametrize(
    ("tp_size", "block_size", "cached"), [(2, 16, LAST * 16), (4, 16, LAST * 16), (1, 64, 128), (2, 32, 128)]
)
def test_an_engine_loads_blocks_of_another_sharding_and_generates_the_same_tokens(
    checkpoint: Path, saved_prompt: SavedPrompt, tp_size: int, block_size: int, cached: int
) -> None:
    store = saved_prompt.store_as(tp_size, block_size)
    with Engine(checkpoint, store=wrap_store(store)) as engine:
        submitted = engine.answer(PROMPT)
    assert submitted.wait() == saved_prompt.answer
    assert (submitted.sequence.pool_cached_tokens, submitted.sequence.pool_use.reason) == (cached, Reason.HIT)
    assert f"{cached // 16} of them from TP {tp_size}, blocks of {block_size}" in submitted.sequence.pool_use.text


def test_an_engine_with_large_blocks_reads_small_ones(checkpoint: Path, saved_prompt: SavedPrompt) -> None:
    with Engine(checkpoint, block_size=64, num_blocks=32, store=wrap_store(saved_prompt.store_as(2))) as engine:
        submitted = engine.answer(PROMPT)
    assert submitted.wait() == saved_prompt.answer
    assert submitted.sequence.pool_cached_tokens == 128


def test_ranks_load_blocks_of_fewer_ranks_and_an_engine_loads_their_blocks(
    checkpoint: Path, saved_prompt: SavedPrompt
) -> None:
    store, ranks_store = saved_prompt.store_as(2), MemoryStore(64 << 20)
    hashes = extend_block_hashes([], PROMPT, 16, root_hash())
    for rank in range(4):
        own = replace(saved_prompt.sharding(4), tp_rank=rank)
        pool = BlockPool(CheckedBackend(store), own)
        peers = PeerShardings(
            pool, replace(saved_prompt.family, own=own, peers=(saved_prompt.sharding(1), saved_prompt.sharding(2)))
        )
        run = peers.extend_run(pool.exists(hashes), 0, lambda _: hashes)
        assert run is not None
        memories = [Memory(saved_prompt.family.block_bytes(own)) for _ in hashes]
        values = [memory.value for memory in memories]
        assert peers.reader_of(run, hashes, 0, hashes)(0, values) == len(hashes)
        taken = BlockPool(CheckedBackend(ranks_store), own)
        assert all(taken.put_blocks(hashes, values))
        leave_marker(taken)
    with Engine(checkpoint, store=wrap_store(ranks_store)) as engine:
        submitted = engine.answer(PROMPT)
    assert submitted.wait() == saved_prompt.answer
    assert submitted.sequence.pool_cached_tokens == LAST * 16


def test_blocks_of_another_sharding_are_not_saved_again(checkpoint: Path, saved_prompt: SavedPrompt) -> None:
    store = saved_prompt.store_as(2)
    longer = PROMPT + PROMPT[:40]
    with Engine(checkpoint, store=wrap_store(store)) as engine:
        first = engine.answer(longer).wait()
        pool = BlockPool(CheckedBackend(store), engine.runner.namespace)
        hashes = extend_block_hashes([], longer, 16, root_hash())
        assert [bool(status) for status in pool.exists(hashes)] == [False] * LAST + [True] * (len(hashes) - LAST)
        assert engine.core._connector is not None  # these blocks must not count as lost
        assert set(engine.core._connector._saved.list_saved_blocks(99)) == set(hashes[LAST:])
    with Engine(checkpoint, store=wrap_store(store)) as engine:
        again = engine.answer(longer)
        assert again.wait() == first
        assert again.sequence.pool_cached_tokens == (len(longer) - 1) // 16 * 16


def test_a_damaged_part_of_a_block_is_computed(checkpoint: Path, saved_prompt: SavedPrompt) -> None:
    store = saved_prompt.store_as(2)
    hashes = extend_block_hashes([], PROMPT, 16, root_hash())
    key = replace(saved_prompt.sharding(2), tp_rank=1).key(hashes[3])
    stored = store._values[key]
    store._values[key] = stored[:-1] + bytes([stored[-1] ^ 1])
    with Engine(checkpoint, store=wrap_store(store)) as engine:
        submitted = engine.answer(PROMPT)
        assert submitted.wait() == saved_prompt.answer
        assert submitted.sequence.pool_cached_tokens == 3 * 16


def test_blocks_of_another_model_with_the_same_shape_are_not_loaded(
    checkpoint: Path, saved_prompt: SavedPrompt
) -> None:
    store, other = MemoryStore(64 << 20), replace(saved_prompt.sharding(2), model="another")
    store_blocks(BlockPool(CheckedBackend(store), other), saved_prompt.whole, PROMPT)
    with Engine(checkpoint, store=wrap_store(store)) as engine:
        assert not store.exists([manifest_key(saved_prompt.sharding(2).digest)])[0]
        assert engine.answer(PROMPT).sequence.pool_cached_tokens == 0
