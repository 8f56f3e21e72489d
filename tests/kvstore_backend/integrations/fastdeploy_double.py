"""FastDeploy's side of its storage contract, with the same calls as in its source, on host memory instead of a GPU.

``OneClass`` and ``SchedulerAndWorker`` are the two shapes of its Mooncake storage. Like FastDeploy's classes, they
import Mooncake's client when they are built, so they get its replacement. ``TransferProcess`` calls them: it has the
staging memory [block, layer, head, token, head_dim] and the keys, and it counts results.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvstore_backend.integrations import fastdeploy
from kvstore_backend.integrations.fastdeploy_engine import Engine
from tests.support.memory import Memory

__all__ = [
    "OneClass",
    "SchedulerAndWorker",
    "Storage",
    "TransferProcess",
    "block_hashes",
    "engine_of",
    "start_under",
]

Keys = Sequence[str]


def engine_of(model: Path | str = "", environ: dict[str, str] | None = None, **arguments: Any) -> Engine:
    """Return an engine with these arguments. It serves ``model`` if one is given."""
    return Engine({**({"model": str(model)} if model else {}), **arguments}, environ=environ or {})


def start_under(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Make this process find ``engine`` as its engine."""
    patch.setattr(fastdeploy, "find_engine", lambda: engine)


def block_hashes(token_blocks: Sequence[Sequence[int]]) -> list[str]:
    """Return FastDeploy's prefix hashes: of each block's tokens, with the preceding hash as an extra key."""
    hashes: list[str] = []
    for tokens in token_blocks:
        extra_keys = (hashes[-1],) if hashes else ()
        hashes.append(hashlib.sha256(pickle.dumps((list(tokens), extra_keys))).hexdigest())
    return hashes


class Storage(Protocol):
    """The methods that the transfer process calls in both shapes."""

    client: Any

    def register_buffer(self, ptr: int, size: int) -> None: ...

    def query(self, k: Keys, v: Keys, k_scale: Keys | None, v_scale: Keys | None, timeout: float) -> int: ...

    def batch_get(self, keys: Keys, target_locations: Sequence[int], target_sizes: Sequence[int]) -> list[int]: ...

    def batch_set(self, keys: Keys, target_locations: Sequence[int], target_sizes: Sequence[int]) -> list[int]: ...


def open_client(settings: dict[str, Any], segment: int) -> Any:
    """Import, set up and warm up a client, as both shapes do."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    code = client.setup(
        local_hostname=settings["local_hostname"],
        metadata_server=settings["metadata_server"],
        global_segment_size=segment,
        local_buffer_size=16 << 20,
        protocol=settings["protocol"],
        rdma_devices="",
        master_server_addr=settings["master_server_addr"],
    )
    if code != 0:
        raise RuntimeError(f"failed to setup mooncake store, error code: {code}")
    key, value = f"fastdeploy_mooncake_store_warmup_key{uuid.uuid4()}", bytes(1 << 20)
    assert client.put(key, value) == 0
    assert client.is_exist(key) == 1
    assert client.get(key) == value
    client.remove(key)
    return client


def flatten(kinds: Sequence[Keys]) -> list[str]:
    """Return the keys in the order all K, all V, all K scales, all V scales."""
    return [key for kind in kinds for key in kind]


def count_leading(results: Sequence[Sequence[Any]]) -> int:
    """Return how many leading blocks have true results for all their parts. FastDeploy uses the codes as booleans."""
    count = 0
    for answers in zip(*results, strict=True):
        if not all(answers):
            break
        count += 1
    return count


class _Transfers:
    """The reads and writes, which are the same in both shapes."""

    client: Any

    def batch_get(self, keys: Keys, target_locations: Sequence[int], target_sizes: Sequence[int]) -> list[int]:
        answers: list[int] = self.client.batch_get_into(keys, target_locations, target_sizes)
        return answers

    def batch_set(self, keys: Keys, target_locations: Sequence[int], target_sizes: Sequence[int]) -> list[int]:
        answers: list[int] = self.client.batch_put_from(keys, target_locations, target_sizes)
        return answers


class OneClass(_Transfers):
    """The older shape: each rank has one class for look-ups and transfers."""

    def __init__(self, settings: dict[str, Any], segment: int = 64 << 20) -> None:
        self.client = open_client(settings, segment)

    def register_buffer(self, ptr: int, size: int) -> None:
        assert self.client.register_buffer(ptr, size) == 0

    def exists(self, keys: Keys) -> dict[str, int]:
        return dict(zip(keys, self.client.batch_is_exist(list(keys)), strict=True))

    def query(self, k: Keys, v: Keys, k_scale: Keys | None, v_scale: Keys | None, timeout: float) -> int:
        kinds = [kind for kind in (k, v, k_scale, v_scale) if kind is not None]
        found = self.exists(flatten(kinds))
        return count_leading([[found[key] for key in kind] for kind in kinds])

    def get(self, key: str, target_location: int, target_size: int) -> int:
        return self.batch_get([key], [target_location], [target_size])[0]

    def delete(self, key: str, timeout: int = 5) -> bool:
        return bool(self.client.remove(key) == 0)

    def clear(self) -> bool:
        self.client.remove_all()
        return True


class SchedulerAndWorker(_Transfers):
    """The newer shape: a client for look-ups in the engine's process, and one for transfers in the worker's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.scheduler = open_client(settings, 64 << 20)
        self.client = open_client(settings, 64 << 20)

    def register_buffer(self, ptr: int, size: int) -> None:
        if self.client.register_buffer(ptr, size) != 0:
            raise RuntimeError("MooncakeDistributedStore.register_buffer() failed")

    def batch_exists(self, keys: Keys) -> list[bool]:
        return [answer == 1 for answer in self.scheduler.batch_is_exist(list(keys))]

    def query(self, k: Keys, v: Keys, k_scale: Keys | None, v_scale: Keys | None, timeout: float) -> int:
        """Simulate ``query_prefix_count``, which uses the codes as booleans, as the older shape does."""
        kinds = [kind for kind in (k, v, k_scale, v_scale) if kind is not None]
        keys = flatten(kinds)
        found = dict(zip(keys, self.scheduler.batch_is_exist(keys), strict=True))
        return count_leading([[found[key] for key in kind] for kind in kinds])


class TransferProcess:
    """Reads and writes blocks through staging memory, with one buffer for each direction, K before V.

    Args:
        storage: either shape.
        block_bytes: size of K, or of V, of a block: layers * heads * tokens * head_dim * element size.
        scale_bytes: size of the K scales of a block with block_wise_fp8, else 0.
    """

    def __init__(self, storage: Storage, block_bytes: int, scale_bytes: int = 0, *, blocks: int = 8, rank: int = 0):
        self.storage = storage
        self.rank = rank
        self.sizes = [block_bytes, block_bytes] + [scale_bytes, scale_bytes] * bool(scale_bytes)
        self.read_buffers = [Memory(size * blocks) for size in self.sizes]
        self.write_buffers = [Memory(size * blocks) for size in self.sizes]
        for buffer in (*self.read_buffers, *self.write_buffers):
            storage.register_buffer(buffer.address, buffer.nbytes)

    def keys(self, hashes: Sequence[str]) -> list[list[str]]:
        kinds = ("key", "value", "key_scale", "value_scale")[: len(self.sizes)]
        return [[f"prefix_{block_hash}_{self.rank}_{kind}" for block_hash in hashes] for kind in kinds]

    def match(self, hashes: Sequence[str]) -> int:
        """Call ``query`` as a read task does."""
        k, v, *scales = self.keys(hashes)
        k_scale, v_scale = scales or (None, None)
        return self.storage.query(k, v, k_scale, v_scale, 30.0)

    def write(self, hashes: Sequence[str], contents: Sequence[bytes]) -> list[int]:
        """Run a write task. Block ``i`` of each kind contains ``contents[i]``, repeated."""
        for buffer, size in zip(self.write_buffers, self.sizes, strict=True):
            for i, content in enumerate(contents):
                ctypes.memmove(buffer.address + i * size, (content * (size // len(content) + 1))[:size], size)
        return self.storage.batch_set(
            keys=flatten(self.keys(hashes)),
            target_locations=self._locations(self.write_buffers, len(hashes)),
            target_sizes=[size for size in self.sizes for _ in hashes],
        )

    def read(self, hashes: Sequence[str]) -> list[list[bytes]]:
        """Run a read task; return the leading blocks that were matched and completely read."""
        matched = hashes[: self.match(hashes)]
        if not matched:
            return []
        result = self.storage.batch_get(
            keys=flatten(self.keys(matched)),
            target_locations=self._locations(self.read_buffers, len(matched)),
            target_sizes=[size for size in self.sizes for _ in matched],
        )
        number = len(matched)
        kinds = [[code > 0 for code in result[i : i + number]] for i in range(0, len(result), number)]
        return [self._block(i) for i in range(count_leading(kinds))]

    def _block(self, i: int) -> list[bytes]:
        pairs = zip(self.read_buffers, self.sizes, strict=True)
        return [ctypes.string_at(buffer.address + i * size, size) for buffer, size in pairs]

    def _locations(self, buffers: Sequence[Memory], number: int) -> list[int]:
        pairs = zip(buffers, self.sizes, strict=True)
        return [buffer.address + i * size for buffer, size in pairs for i in range(number)]
