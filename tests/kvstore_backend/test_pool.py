from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvstore_backend.backend import ConfigError, PoolUnavailable, Span, Status, Value
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.config import FileSettings, MemorySettings, PoolConfig, load_config
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool, count_leading, default_backend, name_tenant, open_pool, open_store
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.guarded import Deadlines, GuardedBackend
from tests.faults.injector import Fault, FaultInjector
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster
from tests.support.mooncake import mooncake_master as running_mooncake_master
from tests.support.waiting import wait_until
from tests.support.watched_store import WatchedStore

OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED
NBYTES = 64
NAMESPACE = Namespace("model", "float32", 4, 2, 2, 2, "layer,kv,head,token,dim")


def test_a_namespace_has_the_tenant_that_the_configuration_names() -> None:
    url = "mooncake://h:1?protocol=tcp"
    assert name_tenant(load_config(url, environ={}), NAMESPACE) is NAMESPACE
    named = name_tenant(load_config(url, environ={"MOONCAKE_TENANT_ID": "team-a"}), NAMESPACE)
    assert named == replace(NAMESPACE, tenant="team-a")
    assert named.digest != NAMESPACE.digest
    assert "tenant" not in NAMESPACE.fields
    with pytest.raises(
        ConfigError, match="MOONCAKE_TENANT_ID is '_a'; a tenant's name must have only printable characters"
    ):
        load_config(url, environ={"MOONCAKE_TENANT_ID": "_a"})


class Recorder(MemoryStore):
    """A memory store that records its calls; a test can make its lookups fail."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.calls: list[tuple[str, list[str]]] = []
        self.exists_fails_for: set[str] = set()

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        self.calls.append(("put", list(keys)))
        return super().put(keys, values)

    def exists(self, keys: Sequence[str]) -> list[Status]:
        self.calls.append(("exists", list(keys)))
        answers = super().exists(keys)
        return [FAILED if key in self.exists_fails_for else answer for key, answer in zip(keys, answers, strict=True)]


@pytest.fixture
def store() -> Recorder:
    return Recorder()


@pytest.fixture
def pool(store: Recorder) -> BlockPool:
    return BlockPool(store, NAMESPACE)


def hashes(count: int) -> list[bytes]:
    return extend_block_hashes([], range(4 * count), 4, root_hash())


def save(pool: BlockPool, blocks: Sequence[bytes]) -> list[Status]:
    sources = [Memory(block[:1] * NBYTES) for block in blocks]
    return pool.save(blocks, [source.value for source in sources])


def load(pool: BlockPool, blocks: Sequence[bytes], targets: Sequence[Memory]) -> int:
    return count_leading(pool.get_blocks(blocks, [target.value for target in targets]))


def load_contents(pool: BlockPool, blocks: Sequence[bytes]) -> list[bytes]:
    """Return the contents of the leading blocks that can be read."""
    targets = [Memory(NBYTES) for _ in blocks]
    return [target.content for target in targets[: load(pool, blocks, targets)]]


def test_saved_blocks_are_found_and_loaded(pool: BlockPool) -> None:
    blocks = hashes(3)
    assert save(pool, blocks) == [OK] * 3
    assert pool.lookup(blocks) == 3
    assert load_contents(pool, blocks) == [block[:1] * NBYTES for block in blocks]


@given(st.sets(st.integers(0, 9)))
def test_lookup_and_load_count_leading_blocks_only(present: set[int]) -> None:
    pool, blocks = BlockPool(MemoryStore(1 << 20), NAMESPACE), hashes(10)
    save(pool, [blocks[i] for i in sorted(present)])
    leading = next(i for i in range(11) if i not in present)
    assert pool.lookup(blocks) == len(load_contents(pool, blocks)) == leading


def test_a_lookup_makes_one_call_for_all_blocks(pool: BlockPool, store: Recorder) -> None:
    blocks = hashes(50)
    pool.lookup(blocks)
    assert store.calls == [("exists", [NAMESPACE.key(block) for block in blocks])]


def test_calls_without_blocks_return_empty_results(pool: BlockPool) -> None:
    assert (pool.lookup([]), pool.get_blocks([], []), pool.save([], [])) == (0, [], [])


def test_a_failed_answer_counts_as_absent(pool: BlockPool, store: Recorder) -> None:
    blocks = hashes(3)
    save(pool, blocks)
    store.exists_fails_for = {NAMESPACE.key(blocks[1])}
    assert pool.lookup(blocks) == 1


def test_a_save_puts_only_blocks_that_the_pool_lacks(pool: BlockPool, store: Recorder) -> None:
    blocks = hashes(4)
    save(pool, blocks[1:3])
    store.calls.clear()
    assert save(pool, blocks) == [OK] * 4
    keys = [NAMESPACE.key(block) for block in blocks]
    assert store.calls == [("exists", keys), ("put", [keys[0], keys[3]])]


def test_a_save_does_not_put_a_block_if_its_lookup_failed(pool: BlockPool, store: Recorder) -> None:
    blocks = hashes(3)
    store.exists_fails_for = {NAMESPACE.key(blocks[1])}
    assert save(pool, blocks) == [OK, FAILED, OK]
    assert pool.lookup(blocks) == 1


def test_a_save_reports_blocks_that_did_not_fit() -> None:
    pool, blocks = BlockPool(MemoryStore(NBYTES - 1), NAMESPACE), hashes(2)
    assert save(pool, blocks) == [FAILED, FAILED]


def test_a_block_of_another_size_ends_the_load(pool: BlockPool, store: Recorder) -> None:
    blocks = hashes(3)
    save(pool, blocks)
    store.remove([NAMESPACE.key(blocks[1])])
    short = Memory(NBYTES - 1)
    store.put([NAMESPACE.key(blocks[1])], [short.value])
    assert len(load_contents(pool, blocks)) == 1


@pytest.mark.parametrize("call", ["get_blocks", "put_blocks", "save"])
def test_a_mistake_of_the_caller_raises(pool: BlockPool, call: str) -> None:
    memory = Memory(NBYTES)
    with pytest.raises(ValueError, match="2 keys but 1 values"):
        getattr(pool, call)(hashes(2), [memory.value])
    with pytest.raises(ValueError, match=r"values\[0\] is empty"):
        getattr(pool, call)(hashes(1), [[]])
    for span in (Span(4096, 0), Span(4096, -1), Span(0, 5)):
        with pytest.raises(ValueError, match=r"values\[0\]"):
            getattr(pool, call)(hashes(1), [[span]])


def test_two_models_on_one_real_mooncake_pool_never_read_each_others_blocks(mooncake_master: MooncakeMaster) -> None:
    config = mooncake_master.config()
    blocks = hashes(8)
    with (
        open_pool(config, replace(NAMESPACE, model="qwen"), background=False) as qwen,
        open_pool(config, replace(NAMESPACE, model="llama"), background=False) as llama,
    ):
        assert save(qwen, blocks[:5]) == [OK] * 5
        assert llama.lookup(blocks) == 0
        assert load_contents(llama, blocks) == []
        sources = [Memory(b"L" * NBYTES) for _ in blocks]
        assert llama.save(blocks, [source.value for source in sources]) == [OK] * 8
        assert qwen.lookup(blocks) == 5
        assert load_contents(qwen, blocks) == [block[:1] * NBYTES for block in blocks[:5]]
        assert load_contents(llama, blocks) == [b"L" * NBYTES] * 8


def test_a_closed_pool_is_a_miss(pool: BlockPool) -> None:
    blocks = hashes(2)
    save(pool, blocks)
    with pool:
        assert pool.health().ok
    assert pool.lookup(blocks) == 0
    assert load_contents(pool, blocks) == []
    assert save(pool, blocks) == [FAILED, FAILED]
    assert not pool.health().ok


def test_memory_is_registered_with_the_store(pool: BlockPool, monkeypatch: pytest.MonkeyPatch, store: Recorder) -> None:
    registered: list[tuple[int, int]] = []
    monkeypatch.setattr(store, "register", lambda address, nbytes, headroom: registered.append((address, nbytes)))
    monkeypatch.setattr(store, "unregister", lambda address, nbytes: registered.remove((address, nbytes)))
    pool.register(4096, 100)
    assert registered == [(4096, 100)]
    pool.unregister(4096, 100)
    assert registered == []


def test_each_backend_opens_its_store(tmp_path: Path, mooncake_master: MooncakeMaster) -> None:
    for config in (
        load_config("memory", environ={}),
        load_config("file", explicit={"path": str(tmp_path), "size": "1MiB"}, environ={}),
        mooncake_master.config(),
    ):
        store = open_store(config)
        assert type(store).__name__.lower() == f"{config.backend}store"
        store.close()


def test_mooncake_is_the_default_if_it_can_be_loaded() -> None:
    assert default_backend() == "mooncake"


def test_file_is_the_default_if_mooncake_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    assert default_backend() == "file"


def test_the_error_without_mooncake_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, mooncake_master: MooncakeMaster
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(PoolUnavailable, match="pip install mooncake-transfer-engine-non-cuda"):
        open_pool(mooncake_master.config(), NAMESPACE)


@pytest.mark.parametrize("async_write", [False, True], ids=["through", "back"])
def test_a_fast_tier_is_read_before_the_shared_store(tmp_path: Path, async_write: bool) -> None:
    shared = FileSettings(tmp_path / "shared", 64 << 20)
    config = PoolConfig(shared, async_write=async_write, fast=MemorySettings(1 << 20))
    blocks = hashes(3)
    with open_pool(config, NAMESPACE, background=False) as pool:
        assert save(pool, blocks) == [OK, OK, OK]
        with open_pool(PoolConfig(shared), NAMESPACE, background=False) as elsewhere:
            wait_until(lambda: elsewhere.lookup(blocks) == 3, "the shared store to have the blocks")
        with contextlib.closing(open_store(PoolConfig(shared))) as bare:
            assert bare.remove([NAMESPACE.key(block) for block in blocks]) == [OK, OK, OK]
        assert load_contents(pool, blocks) == [block[:1] * NBYTES for block in blocks]


@pytest.mark.parametrize("async_write", [False, True], ids=["through", "back"])
def test_blocks_that_only_the_fast_tier_has_are_saved_again(tmp_path: Path, async_write: bool) -> None:
    shared = FileSettings(tmp_path / "shared", 64 << 20)
    config = PoolConfig(shared, async_write=async_write, fast=MemorySettings(1 << 20))
    blocks = hashes(3)
    with (
        open_pool(config, NAMESPACE, background=False) as pool,
        open_pool(PoolConfig(shared), NAMESPACE, background=False) as elsewhere,
    ):
        for _ in range(2):
            assert save(pool, blocks) == [OK, OK, OK]
            assert pool.flush_writes(10)
            assert elsewhere.lookup(blocks) == 3
            assert elsewhere.clear() is OK


@pytest.mark.parametrize(
    "more", [{}, {"async_write": True}, {"fast": "memory:?size=1MiB"}], ids=["plain", "async", "fast"]
)
def test_the_metrics_of_lookups_count_only_those_of_readers(more: dict[str, object]) -> None:
    registry, blocks = CollectorRegistry(), hashes(4)
    config = load_config("memory", explicit={"size": "1MiB", **more}, environ={})
    with open_pool(config, NAMESPACE, registry, background=False) as pool:
        assert pool.lookup(blocks) == 0
        assert save(pool, blocks) == [OK] * 4
        assert pool.flush_writes(10)
        assert pool.lookup(blocks) == 4
        assert len(load_contents(pool, blocks)) == 4
    counted = {
        status: registry.get_sample_value("kvstore_blocks_total", {"operation": "exists", "status": status})
        for status in ("ok", "absent", "failed")
    }
    assert counted == {"ok": 4, "absent": 4, "failed": 0}


class TestOpening:
    def test_a_pool_opens_in_the_background_and_is_a_miss_until_then(self, tmp_path: Path) -> None:
        with running_mooncake_master(tmp_path / "master.log") as master:
            master.process.signal(signal.SIGSTOP)  # it accepts connections and answers nothing
            with open_pool(master.config(), NAMESPACE) as pool:
                blocks = hashes(2)
                assert not pool.is_ready
                assert pool.lookup(blocks) == 0
                assert load_contents(pool, blocks) == []
                assert save(pool, blocks) == [FAILED, FAILED]
                assert pool.wait_for_late_calls(0)
                master.process.signal(signal.SIGCONT)
                wait_until(lambda: pool.is_ready, "the pool to be joined")
                assert save(pool, blocks) == [OK, OK]
                assert load_contents(pool, blocks) == [block[:1] * NBYTES for block in blocks]

    def test_a_pool_opened_in_the_foreground_is_ready(self) -> None:
        with open_pool(load_config("memory", environ={}), NAMESPACE, background=False) as pool:
            assert pool.is_ready
            assert save(pool, hashes(2)) == [OK, OK]

    def test_an_error_of_an_opening_in_the_foreground_is_raised(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        config = replace(load_config("memory", environ={}), store=FileSettings(tmp_path / "file" / "pool", 1000))
        with pytest.raises(PoolUnavailable, match="cannot be used as a store"):
            open_pool(config, NAMESPACE, background=False)

    def test_blocks_from_the_pool_are_checked(self, tmp_path: Path) -> None:
        config = load_config("file", explicit={"path": str(tmp_path), "size": "1MiB"}, environ={})
        with open_pool(config, NAMESPACE, background=False) as pool:
            blocks = hashes(1)
            save(pool, blocks)
            (stored,) = tmp_path.glob("blocks/*/*.block")
            stored.write_bytes(stored.read_bytes()[:-1] + b"?")
            assert pool.lookup(blocks) == 1
            assert load_contents(pool, blocks) == []
            assert pool.lookup(blocks) == 0

    def test_a_pool_with_a_registry_has_metrics(self) -> None:
        registry = CollectorRegistry()
        with open_pool(load_config("memory", environ={}), NAMESPACE, registry, background=False) as pool:
            save(pool, hashes(3))
            assert registry.get_sample_value("kvstore_bytes_total", {"operation": "put"}) == 3 * NBYTES
            assert registry.get_sample_value("kvstore_breaker_open") == 0
        assert registry.get_sample_value("kvstore_breaker_open") == 1
        labels = {"backend": "memory", "tenant": "", "namespace": NAMESPACE.digest}
        assert registry.get_sample_value("kvstore_pool_info", labels) == 1

    def test_asynchronous_writes_are_readable_at_once_and_counted(self) -> None:
        registry = CollectorRegistry()
        config = replace(load_config("memory", environ={}), async_write=True)
        with open_pool(config, NAMESPACE, registry, background=False) as pool:
            blocks = hashes(3)
            assert save(pool, blocks) == [OK] * 3
            assert load_contents(pool, blocks) == [block[:1] * NBYTES for block in blocks]
            wait_until(lambda: registry.get_sample_value("kvstore_write_queue_blocks") == 0, "the writes")
            assert registry.get_sample_value("kvstore_blocks_total", {"operation": "put", "status": "ok"}) == 3


def test_a_pool_may_move_to_another_namespace_with_its_manifest(tmp_path: Path) -> None:
    old, memory = Memory(bytes(NBYTES)), Memory(NBYTES)
    config = load_config(f"file://{tmp_path}?size=1MiB", environ={})
    with open_pool(config, NAMESPACE, background=False, facts={"name": "model"}) as pool:
        assert pool.put_blocks([bytes(32)], [old.value]) == [OK]
        pool.move_to(replace(NAMESPACE, weights_version="2"))
        assert pool.get_blocks([bytes(32)], [memory.value]) == [ABSENT]
        assert (pool.manifest.digest, pool.manifest.facts) == (pool.namespace.digest, {"name": "model"})
        pool.move_to(NAMESPACE)
        assert pool.get_blocks([bytes(32)], [memory.value]) == [OK]


def test_keep_seconds_may_be_any_time_that_is_not_negative() -> None:
    store, source = WatchedStore(), Memory(NBYTES)
    pool = BlockPool(store, NAMESPACE)
    for seconds in (0.0, 0.5, 60.0):
        assert pool.put_blocks(hashes(1), [source.value], keep_seconds=seconds) == [OK]
    assert store.kept == [(1, 0.0), (1, 0.5), (1, 60.0)]
    with pytest.raises(ValueError, match=r"keep_seconds is -0.5; it must not be negative"):
        pool.put_blocks(hashes(1), [source.value], keep_seconds=-0.5)


class TestLateCalls:
    """A call returns only after its late calls have ended, so that the caller owns the memory again."""

    @pytest.mark.parametrize("call", ["get_blocks", "put_blocks", "save"])
    def test_a_failed_call_returns_after_its_late_call_has_ended(
        self, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("kvstore_backend.pool._WARN_AFTER_SECONDS", 0.01)
        store = FaultInjector(MemoryStore(1 << 20))
        guard = GuardedBackend(lambda: store, Deadlines(0.1, 0.1))
        assert guard.wait_ready(30)
        pool, memory = BlockPool(guard, NAMESPACE), Memory(NBYTES)
        store.faults = [*[Fault.NOTHING] * (call == "save"), Fault.HANGS]
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(getattr(pool, call), hashes(1), [memory.value])
            wait_until(lambda: caplog.text.count("still runs") > 1, "several warnings")
            assert not future.done()
            store.go_on()
            assert future.result(30) == [FAILED]
        pool.close()

    @pytest.mark.parametrize("call", ["get_blocks", "put_blocks", "save"])
    def test_a_call_does_not_wait_for_the_late_call_of_another_thread(self, call: str) -> None:
        store = FaultInjector(MemoryStore(1 << 20))
        guard = GuardedBackend(lambda: store, Deadlines(0.1, 0.1))
        assert guard.wait_ready(30)
        pool, late, memory = BlockPool(guard, NAMESPACE), Memory(NBYTES), Memory(NBYTES)
        store.faults = [Fault.HANGS]
        with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as end:
            end.callback(store.go_on)
            hanging = threads.submit(pool.get_blocks, hashes(1), [late.value])
            wait_until(lambda: not guard.is_ready, "the late call")
            other = threads.submit(getattr(pool, call), hashes(1), [memory.value])
            wait_until(other.done, "the other call", 10)
            assert not hanging.done()
        pool.close()
