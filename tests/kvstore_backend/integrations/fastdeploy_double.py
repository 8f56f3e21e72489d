"""FastDeploy's side of its storage contract, call by call as its source makes them, on host memory instead of a GPU.

``OneClass`` and ``SchedulerAndWorker`` are the two shapes of its Mooncake storage: they import Mooncake's client when
they are built, as FastDeploy's do, and so get whatever stands in its place. ``TransferProcess`` is what calls them:
the staging memory [block, layer, head, token, head_dim], the keys, and how answers are counted.
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
    """An engine that serves ``model`` with these arguments; without a model, one that names none."""
    return Engine({**({"model": str(model)} if model else {}), **arguments}, environ=environ or {})


def start_under(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Have this process take itself for one that ``engine`` started."""
    patch.setattr(fastdeploy, "find_engine", lambda: engine)


def block_hashes(token_blocks: Sequence[Sequence[int]]) -> list[str]:
    """FastDeploy's prefix hashes: each block's tokens, with the hash before it as an extra key."""
    hashes: list[str] = []
    for tokens in token_blocks:
        extra_keys = (hashes[-1],) if hashes else ()
        hashes.append(hashlib.sha256(pickle.dumps((list(tokens), extra_keys))).hexdigest())
    return hashes


class Storage(Protocol):
    """What the transfer process needs, whichever shape gives it."""

    client: Any

    def register_buffer(self, ptr: int, size: int) -> None: ...

    def query(self, k: Keys, v: Keys, k_scale: Keys | None, v_scale: Keys | None, timeout: float) -> int: ...

    def batch_get(self, keys: Keys, target_locations: Sequence[int], target_sizes: Sequence[int]) -> list[int]: ...

    def batch_set(self, keys: Keys, target_locations: Sequence[int], target_sizes: Sequence[int]) -> list[int]: ...


def joined(settings: dict[str, Any], segment: int) -> Any:
    """A client, imported, set up and warmed up as both shapes do it."""
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


def flat(kinds: Sequence[Keys]) -> list[str]:
    """All K, all V, all K scales, all V scales."""
    return [key for kind in kinds for key in kind]


def leading(results: Sequence[Sequence[Any]]) -> int:
    """How many leading blocks have a truthy answer for all they consist of: FastDeploy takes the codes for booleans."""
    count = 0
    for answers in zip(*results, strict=True):
        if not all(answers):
            break
        count += 1
    return count


class _Transfers:
    """Reads and writes, which both shapes leave to their client alike."""

    client: Any

    def batch_get(self, keys: Keys, target_locations: Sequence[int], target_sizes: Sequence[int]) -> list[int]:
        answers: list[int] = self.client.batch_get_into(keys, target_locations, target_sizes)
        return answers

    def batch_set(self, keys: Keys, target_locations: Sequence[int], target_sizes: Sequence[int]) -> list[int]:
        answers: list[int] = self.client.batch_put_from(keys, target_locations, target_sizes)
        return answers


class OneClass(_Transfers):
    """The older shape: one class a rank, for look-ups and transfers."""

    def __init__(self, settings: dict[str, Any], segment: int = 64 << 20) -> None:
        self.client = joined(settings, segment)

    def register_buffer(self, ptr: int, size: int) -> None:
        assert self.client.register_buffer(ptr, size) == 0

    def exists(self, keys: Keys) -> dict[str, int]:
        return dict(zip(keys, self.client.batch_is_exist(list(keys)), strict=True))

    def query(self, k: Keys, v: Keys, k_scale: Keys | None, v_scale: Keys | None, timeout: float) -> int:
        kinds = [kind for kind in (k, v, k_scale, v_scale) if kind is not None]
        found = self.exists(flat(kinds))
        return leading([[found[key] for key in kind] for kind in kinds])

    def get(self, key: str, target_location: int, target_size: int) -> int:
        return self.batch_get([key], [target_location], [target_size])[0]

    def delete(self, key: str, timeout: int = 5) -> bool:
        return bool(self.client.remove(key) == 0)

    def clear(self) -> bool:
        self.client.remove_all()
        return True


class SchedulerAndWorker(_Transfers):
    """The newer shape: a client in the engine's process that only looks up, and one in the worker's that transfers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.scheduler = joined(settings, 64 << 20)
        self.client = joined(settings, 64 << 20)

    def register_buffer(self, ptr: int, size: int) -> None:
        if self.client.register_buffer(ptr, size) != 0:
            raise RuntimeError("MooncakeDistributedStore.register_buffer() failed")

    def batch_exists(self, keys: Keys) -> list[bool]:
        return [answer == 1 for answer in self.scheduler.batch_is_exist(list(keys))]

    def query(self, k: Keys, v: Keys, k_scale: Keys | None, v_scale: Keys | None, timeout: float) -> int:
        """``query_prefix_count``, which takes the codes for booleans as the older shape does."""
        kinds = [kind for kind in (k, v, k_scale, v_scale) if kind is not None]
        keys = flat(kinds)
        found = dict(zip(keys, self.scheduler.batch_is_exist(keys), strict=True))
        return leading([[found[key] for key in kind] for kind in kinds])


class TransferProcess:
    """Reads and writes blocks through staging memory, one buffer for each direction, K before V.

    Args:
        storage: either shape.
        block_bytes: of one block's K, or V: layers * heads * tokens * head_dim * element size.
        scale_bytes: of one block's K scales where the cache is block_wise_fp8, else 0.
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
        return [[f"prefix_{each}_{self.rank}_{kind}" for each in hashes] for kind in kinds]

    def match(self, hashes: Sequence[str]) -> int:
        """``query`` as a read task asks it."""
        k, v, *scales = self.keys(hashes)
        k_scale, v_scale = scales or (None, None)
        return self.storage.query(k, v, k_scale, v_scale, 30.0)

    def write(self, hashes: Sequence[str], contents: Sequence[bytes]) -> list[int]:
        """A write task: block ``i`` of every kind gets ``contents[i]`` repeated."""
        for buffer, size in zip(self.write_buffers, self.sizes, strict=True):
            for i, content in enumerate(contents):
                ctypes.memmove(buffer.address + i * size, (content * (size // len(content) + 1))[:size], size)
        return self.storage.batch_set(
            keys=flat(self.keys(hashes)),
            target_locations=self._locations(self.write_buffers, len(hashes)),
            target_sizes=[size for size in self.sizes for _ in hashes],
        )

    def read(self, hashes: Sequence[str]) -> list[list[bytes]]:
        """A read task: of what ``query`` matched and is then read, the leading blocks that arrived whole."""
        matched = hashes[: self.match(hashes)]
        if not matched:
            return []
        result = self.storage.batch_get(
            keys=flat(self.keys(matched)),
            target_locations=self._locations(self.read_buffers, len(matched)),
            target_sizes=[size for size in self.sizes for _ in matched],
        )
        number = len(matched)
        kinds = [[code > 0 for code in result[i : i + number]] for i in range(0, len(result), number)]
        return [self._block(i) for i in range(leading(kinds))]

    def _block(self, i: int) -> list[bytes]:
        pairs = zip(self.read_buffers, self.sizes, strict=True)
        return [ctypes.string_at(buffer.address + i * size, size) for buffer, size in pairs]

    def _locations(self, buffers: Sequence[Memory], number: int) -> list[int]:
        pairs = zip(buffers, self.sizes, strict=True)
        return [buffer.address + i * size for buffer, size in pairs for i in range(number)]
