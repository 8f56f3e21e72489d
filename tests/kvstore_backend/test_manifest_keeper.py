"""The manifest is written when a pool is opened, and again after a loss; a failed write raises nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore_backend import Namespace, open_pool
from kvstore_backend.backend import Status, StorageBackend, Value
from kvstore_backend.config import load_config
from kvstore_backend.manifest import MANIFEST_BYTES, Manifest, decode_manifest, manifest_key
from kvstore_backend.manifest_keeper import ManifestKeeper, write_manifest
from kvstore_backend.pool import open_store
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.memory import MemoryStore
from tests.support.memory import Memory
from tests.support.mooncake import MooncakeMaster
from tests.support.waiting import wait_until

NAMESPACE = Namespace("manifest", "float32", 64, 24, 2, 64, "layer,kv,head,token,dim")
MANIFEST = Manifest(NAMESPACE.fields, {"name": "qwen"})
KEY = manifest_key(NAMESPACE.digest)


class Broken(MemoryStore):
    """A store in which every put raises, which a store must not do."""

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        raise RuntimeError("the pool is broken")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1 << 20)


def read_manifest(store: StorageBackend) -> Manifest | None:
    """Read the manifest of ``NAMESPACE``; None if the store does not have it."""
    memory = Memory(MANIFEST_BYTES)
    store.register(memory.address, memory.nbytes)
    (status,) = store.get([KEY], [memory.value])
    store.unregister(memory.address, memory.nbytes)
    assert status is not Status.FAILED
    return decode_manifest(memory.content, NAMESPACE.digest) if status is Status.OK else None


def test_opening_a_pool_writes_the_manifest_of_the_namespace(tmp_path: Path) -> None:
    config = load_config("file", explicit={"path": str(tmp_path), "size": "1MiB"}, environ={})
    with open_pool(config, NAMESPACE, background=False, facts={"name": "qwen"}) as pool:
        assert pool.manifest.facts == {"name": "qwen"}
        store = FileStore(tmp_path, 1 << 20)
        wait_until(lambda: store.exists([KEY]) == [Status.OK], "the manifest")
        found = read_manifest(store)
        store.close()
    assert found is not None
    assert (found.fields, found.facts) == (NAMESPACE.fields, {"name": "qwen"})
    (file,) = tmp_path.glob("blocks/*/kvstore-manifest*")
    assert json.loads(file.read_bytes())["fields"]["kv_dtype"] == "float32"


def test_a_pool_that_is_opened_without_facts_writes_no_manifest(tmp_path: Path) -> None:
    config = load_config("file", explicit={"path": str(tmp_path), "size": "1MiB"}, environ={})
    with open_pool(config, NAMESPACE, background=False) as pool:
        assert pool.manifest.digest == NAMESPACE.digest
    assert list(tmp_path.glob("blocks/*/*")) == []


def test_a_mooncake_pool_stores_the_manifest(mooncake_master: MooncakeMaster) -> None:
    store = open_store(mooncake_master.config())
    try:
        assert read_manifest(store) is None
        assert write_manifest(store, MANIFEST)
        found = read_manifest(store)
        assert found is not None
        assert found.facts == {"name": "qwen"}
        store.remove([KEY], force=True)
    finally:
        store.close()


def test_a_manifest_that_was_lost_is_written_again(store: MemoryStore) -> None:
    keeper = ManifestKeeper(MANIFEST, period=0.01)
    keeper.attach_store(store)
    try:
        for _ in range(2):
            wait_until(lambda: store.exists([KEY]) == [Status.OK], "the manifest")
            store.remove([KEY])
        other = MemoryStore(1 << 20)
        keeper.attach_store(other)
        wait_until(lambda: other.exists([KEY]) == [Status.OK], "the manifest in the other store")
    finally:
        keeper.close()


def test_nothing_is_written_while_the_pool_is_not_ready(store: MemoryStore) -> None:
    keeper, checks = ManifestKeeper(MANIFEST, period=0.01), [0]

    def is_ready() -> bool:
        checks.append(1)
        return False

    keeper.watch_readiness(is_ready)
    keeper.attach_store(store)
    wait_until(lambda: store.exists([KEY]) == [Status.OK], "the manifest in the store that was just opened")
    store.remove([KEY])
    wait_until(lambda: len(checks) > 2, "further checks")
    assert store.exists([KEY]) == [Status.ABSENT]
    keeper.close()


def test_a_stored_manifest_is_not_replaced(store: MemoryStore) -> None:
    assert write_manifest(store, MANIFEST)
    first = read_manifest(store)
    assert write_manifest(store, Manifest(MANIFEST.fields, {"name": "other"}))
    assert read_manifest(store) == first


@pytest.mark.parametrize("store", [Broken(1 << 20), MemoryStore(16)], ids=["raises", "too small"])
def test_a_write_that_fails_raises_nothing(store: MemoryStore) -> None:
    assert not write_manifest(store, MANIFEST)
