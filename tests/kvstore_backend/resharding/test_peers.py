"""Another sharding's blocks are found behind one's own, are read with them, and cost nothing where there are none."""

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
    """Counts look-ups, and the keys of the last one."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.looked_up: list[Sequence[str]] = []

    def exists(self, keys: Sequence[str]) -> list[Status]:
        self.looked_up.append(keys)
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
    """Someone of TP 1 and blocks of 16 tokens, or of ``own``."""

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

    def holds(self, count: int) -> None:
        for i, memory in enumerate(self.memories):
            is_right = memory.content == WHOLE.block(self.own, self.first + i)
            assert is_right if i < count else memory.content == b"\xee" * memory.nbytes


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("own", [sharding(1), sharding(2, 16, 1), sharding(4, 64, 2)], ids=["tp1", "tp2", "tp4"])
def test_a_prompt_that_another_cut_has_is_read_whole(
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
    reader.holds(run.count)


def test_own_blocks_come_first_and_in_between(store: CountingStore) -> None:
    write(store, 2)
    hashes = store_blocks(own := pool_of(store, OWN), WHOLE, TOKENS)
    own.remove_blocks([hashes[i] for i in (2, 3, 6, 7)])
    pool_of(store, sharding(2, rank=1)).remove_blocks([hashes[7]])
    reader = Reader(store)
    run = reader.look_up()
    assert run == Run(7, sharding(2), (range(2, 4), range(6, 7)))
    assert reader.read(run) == 7
    reader.holds(7)


def test_reading_goes_on_in_the_middle(store: CountingStore) -> None:
    write(store, 2, 64)
    reader = Reader(store, first=3)
    run = reader.look_up()
    assert run == Run(5, sharding(2, 64), (range(5),))
    assert reader.read(run, begin=2) == 3
    assert [memory.content == WHOLE.block(OWN, 3 + i) for i, memory in enumerate(reader.memories)] == [False] * 2 + [
        True
    ] * 3


def test_the_cut_that_adds_most_is_taken(store: CountingStore) -> None:
    write(store, 2, tokens=64)
    write(store, 4, tokens=96)
    run = Reader(store).look_up()
    assert run is not None
    assert (run.sharding, run.count) == (sharding(4), 6)


def test_a_block_evicted_after_the_look_up_ends_the_read(store: CountingStore) -> None:
    hashes = write(store, 2)
    reader = Reader(store)
    run = reader.look_up()
    assert run is not None
    pool_of(store, sharding(2, rank=1)).remove_blocks([hashes[4]])
    assert reader.read(run) == 4
    reader.holds(4)


def test_a_rank_whose_blocks_are_gone_makes_none_of_use(store: CountingStore) -> None:
    write(store, 2)
    pool_of(store, sharding(2, rank=1)).clear()
    assert Reader(store).look_up() is None
    rank = Reader(store, sharding(4, rank=1))  # its heads are rank 0's
    assert (run := rank.look_up()) is not None
    assert rank.read(run) == 8
    rank.holds(8)


def test_without_peers_nobody_is_asked_but_now_and_then(store: CountingStore, clock: list[float]) -> None:
    reader = Reader(store)
    for _ in range(3):
        assert reader.look_up() is None
    own, markers, *others = store.looked_up
    assert {len(own), *map(len, others)} == {8}
    assert len(others) == 2
    assert set(markers) == {manifest_key(peer.digest) for peer in family().peers}
    clock[0] += 11
    write(store, 2)
    store.looked_up.clear()
    assert reader.look_up() is not None
    assert len(store.looked_up) == 3


def test_a_prompt_that_is_there_whole_asks_nobody_else(store: CountingStore) -> None:
    write(store, 1)
    write(store, 2)
    store.looked_up.clear()
    assert Reader(store).look_up() is None
    assert len(store.looked_up) == 1


def test_a_cut_that_left_no_marker_is_not_found(store: CountingStore) -> None:
    write(store, 2)
    store.remove([manifest_key(sharding(2).digest)])
    assert Reader(store).look_up() is None


def test_another_model_is_no_peer(store: CountingStore) -> None:
    other = replace(sharding(2), model="n")
    store_blocks(pool_of(store, other), WHOLE, TOKENS)
    leave_marker(pool_of(store, other))
    assert Reader(store).look_up() is None


def test_a_pool_of_other_bytes_has_no_peers(store: CountingStore) -> None:
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
    reader.holds(8)


def test_a_pool_that_fails_is_not_asked_further(store: CountingStore) -> None:
    write(store, 2)
    reader = Reader(store)
    store.close()
    store.looked_up.clear()
    assert reader.look_up() is None
    assert len(store.looked_up) == 1


def test_a_run_says_where_its_blocks_come_from(store: CountingStore) -> None:
    write(store, 2, 64)
    assert str(Reader(store).look_up()) == "8 of them from TP 2, blocks of 64 tokens"
