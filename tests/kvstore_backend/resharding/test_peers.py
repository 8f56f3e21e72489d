"""Blocks of other shardings extend the own blocks and are read with them; without any, the lookups are few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvstore_backend import Namespace, Status
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.manifest import manifest_key
from kvstore_backend.pool import BlockPool
from kvstore_backend.resharding import PeerShardings, Run, find_family
from kvstore_backend.resharding.family import HEAD, TOKEN, ShardingFamily
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.support.memory import Memory
from tests.support.recut import WholeKV, leave_marker, store_blocks

AXES = [("layer", 2), ("kv", 2), (HEAD, 4), (TOKEN, 16), ("dim", 3)]
OWN = Namespace("m", "uint8", 16, 2, 4, 3, "any")
TOKENS = list(range(128))
WHOLE = WholeKV(np.random.default_rng(1).integers(0, 256, (2, 2, 4, 128, 3), dtype=np.uint8))


def family(own: Namespace = OWN) -> ShardingFamily:
    return find_family(own, 4, AXES, block_sizes=(16, 64))


def sharding(tp_size: int, block_size: int = 16, rank: int = 0) -> Namespace:
    return replace(OWN, tp_size=tp_size, tp_rank=rank, num_kv_heads=4 // tp_size, block_size=block_size)


class CountingStore(MemoryStore):
    """Records the keys of each lookup."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.lookups: list[Sequence[str]] = []

    def exists(self, keys: Sequence[str]) -> list[Status]:
        self.lookups.append(keys)
        return super().exists(keys)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("kvstore_backend.resharding.peers.time.monotonic", lambda: now[0])
    return now


def pool_of(store: MemoryStore, namespace: Namespace) -> BlockPool:
    return BlockPool(CheckedBackend(store), namespace)


def write(store: MemoryStore, tp_size: int, block_size: int = 16, *, tokens: int = 128) -> list[bytes]:
    for rank in range(tp_size):
        hashes = store_blocks(pool_of(store, sharding(tp_size, block_size, rank)), WHOLE, TOKENS[:tokens])
    return hashes


class Reader:
    """A reader in the sharding ``own``; by default TP 1 and blocks of 16 tokens."""

    def __init__(self, store: MemoryStore, own: Namespace = OWN, first: int = 0) -> None:
        self.pool = pool_of(store, own)
        self.peers = PeerShardings(self.pool, family(own))
        self.own, self.first = own, first
        self.hashes = self.names_of(own.block_size)[first:]
        self.memories = [Memory(family(own).block_bytes(own)) for _ in self.hashes]

    @staticmethod
    def names_of(block_size: int) -> list[bytes]:
        return extend_block_hashes([], TOKENS, block_size, root_hash())

    def look_up(self) -> Run | None:
        return self.peers.extend_run(self.pool.exists(self.hashes), self.first, self.names_of)

    def read(self, run: Run, begin: int = 0) -> int:
        targets = [memory.value for memory in self.memories[begin : run.count]]
        names = self.names_of(run.sharding.block_size)
        return self.peers.reader_of(run, self.hashes, self.first, names)(begin, targets)

    def check_blocks(self, count: int) -> None:
        for i, memory in enumerate(self.memories):
            is_right = memory.content == WHOLE.block(self.own, self.first + i)
            assert is_right if i < count else memory.content == b"\xee" * memory.nbytes


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("own", [sharding(1), sharding(2, 16, 1), sharding(4, 64, 2)], ids=["tp1", "tp2", "tp4"])
def test_a_prompt_that_is_stored_in_another_sharding_is_read_completely(
    store: CountingStore, tp_size: int, block_size: int, own: Namespace
) -> None:
    write(store, tp_size, block_size)
    reader = Reader(store, own)
    run = reader.look_up()
    if (tp_size, block_size) == (own.tp_size, own.block_size):
        assert run is None
        return
    assert run == Run(len(reader.hashes), sharding(tp_size, block_size), (range(len(reader.hashes)),))
    assert reader.read(run) == run.count
    reader.check_blocks(run.count)


def test_a_run_combines_own_blocks_with_blocks_of_a_peer(store: CountingStore) -> None:
    write(store, 2)
    hashes = store_blocks(own := pool_of(store, OWN), WHOLE, TOKENS)
    own.remove_blocks([hashes[i] for i in (2, 3, 6, 7)])
    pool_of(store, sharding(2, rank=1)).remove_blocks([hashes[7]])
    reader = Reader(store)
    run = reader.look_up()
    assert run == Run(7, sharding(2), (range(2, 4), range(6, 7)))
    assert reader.read(run) == 7
    reader.check_blocks(7)


def test_a_read_may_begin_in_the_middle_of_a_run(store: CountingStore) -> None:
    write(store, 2, 64)
    reader = Reader(store, first=3)
    run = reader.look_up()
    assert run == Run(5, sharding(2, 64), (range(5),))
    assert reader.read(run, begin=2) == 3
    assert [memory.content == WHOLE.block(OWN, 3 + i) for i, memory in enumerate(reader.memories)] == [False] * 2 + [
        True
    ] * 3


def test_a_read_in_the_middle_of_a_run_combines_both_shardings(store: CountingStore) -> None:
    write(store, 2)
    hashes = store_blocks(own := pool_of(store, OWN), WHOLE, TOKENS)
    own.remove_blocks([hashes[i] for i in (3, 4)])
    reader = Reader(store)
    run = reader.look_up()
    assert run == Run(8, sharding(2), (range(3, 5),))
    assert reader.read(run, begin=1) == 7
    assert [memory.content == WHOLE.block(OWN, i) for i, memory in enumerate(reader.memories)] == [False] + [True] * 7


def test_the_sharding_that_adds_the_most_blocks_is_chosen(store: CountingStore) -> None:
    write(store, 2, tokens=64)
    write(store, 4, tokens=96)
    run = Reader(store).look_up()
    assert run is not None
    assert (run.sharding, run.count) == (sharding(4), 6)


def test_a_block_that_is_evicted_after_the_lookup_ends_the_read(store: CountingStore) -> None:
    hashes = write(store, 2)
    reader = Reader(store)
    run = reader.look_up()
    assert run is not None
    pool_of(store, sharding(2, rank=1)).remove_blocks([hashes[4]])
    assert reader.read(run) == 4
    reader.check_blocks(4)


def test_a_rank_without_blocks_makes_its_peers_blocks_unusable(store: CountingStore) -> None:
    write(store, 2)
    pool_of(store, sharding(2, rank=1)).clear()
    assert Reader(store).look_up() is None
    rank = Reader(store, sharding(4, rank=1))  # its heads are rank 0's
    assert (run := rank.look_up()) is not None
    assert rank.read(run) == 8
    rank.check_blocks(8)


def test_peers_are_looked_up_only_rarely_if_there_are_none(store: CountingStore, clock: list[float]) -> None:
    reader = Reader(store)
    for _ in range(3):
        assert reader.look_up() is None
    own, markers, *others = store.lookups
    assert {len(own), *map(len, others)} == {8}
    assert len(others) == 2
    assert set(markers) == {manifest_key(peer.digest) for peer in family().peers}
    clock[0] += 11
    write(store, 2)
    store.lookups.clear()
    assert reader.look_up() is not None
    assert len(store.lookups) == 3


def test_a_complete_prompt_causes_no_lookup_of_peers(store: CountingStore) -> None:
    write(store, 1)
    write(store, 2)
    store.lookups.clear()
    assert Reader(store).look_up() is None
    assert len(store.lookups) == 1


def test_a_sharding_without_a_marker_is_not_found(store: CountingStore) -> None:
    write(store, 2)
    store.remove([manifest_key(sharding(2).digest)])
    assert Reader(store).look_up() is None


def test_another_model_is_no_peer(store: CountingStore) -> None:
    other = replace(sharding(2), model="n")
    store_blocks(pool_of(store, other), WHOLE, TOKENS)
    leave_marker(pool_of(store, other))
    assert Reader(store).look_up() is None


def test_a_pool_with_another_layout_has_no_peers(store: CountingStore) -> None:
    write(store, 2)
    reader = Reader(store)
    pool = pool_of(store, replace(OWN, layout="any as int8"))
    assert PeerShardings(pool, family()).extend_run(pool.exists(reader.hashes), 0, reader.names_of) is None
    assert PeerShardings(reader.pool, family()).extend_run(pool.exists(reader.hashes), 0, reader.names_of) is not None


def test_a_tenants_pool_has_peers_of_that_tenant(store: CountingStore) -> None:
    for rank in range(2):
        store_blocks(pool_of(store, replace(sharding(2, rank=rank), tenant="red")), WHOLE, TOKENS)
    reader = Reader(store)
    assert reader.look_up() is None
    pool = pool_of(store, replace(OWN, tenant="red"))
    run = PeerShardings(pool, family()).extend_run(pool.exists(reader.hashes), 0, reader.names_of)
    assert run == Run(8, replace(sharding(2), tenant="red"), (range(8),))
    assert (
        PeerShardings(pool, family()).reader_of(run, reader.hashes, 0, reader.hashes)(
            0, [memory.value for memory in reader.memories]
        )
        == 8
    )
    reader.check_blocks(8)


def test_a_failed_lookup_causes_no_lookup_of_peers(store: CountingStore) -> None:
    write(store, 2)
    reader = Reader(store)
    store.close()
    store.lookups.clear()
    assert reader.look_up() is None
    assert len(store.lookups) == 1


def test_the_text_of_a_run_names_the_sharding_of_its_blocks(store: CountingStore) -> None:
    write(store, 2, 64)
    assert str(Reader(store).look_up()) == "8 of them from TP 2, blocks of 64 tokens"
