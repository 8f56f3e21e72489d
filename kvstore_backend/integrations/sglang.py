"""SGLang joins the pool by ``--hicache-storage-backend dynamic``, as the storage tier of its hierarchical cache.

Its configuration names this class::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvstore",
        "module_path": "kvstore_backend.integrations.sglang", "class_name": "KvstoreHiCache", "interface_v1": 1,
        "pool": "mooncake://127.0.0.1:15001"}'

``pool`` is a URL or a configuration file; without it the environment decides (``MOONCAKE_CONFIG_PATH`` and so on).
``interface_v1`` asks SGLang to hand over addresses instead of copies, which makes this quick; without it
pages come as flat tensors. The model's folder is SGLang's own, or ``model_path`` here where that is a name.
``weights_version``, any text, sets instances apart whose KV differs for one folder: SGLang does not tell a storage
class of ``--json-model-override-args``, ``--quantization``, ``--load-format`` or weights updated in place.

One page is one object, of one span where the host memory's layout keeps K and V of a page together in all layers, of
two with ``page_first``, of two a layer with ``layer_first``: nothing is copied together. The layout is part of the
namespace, as is how pages come, so that only instances that lay pages out alike share them. Pages of a model whose KV
all ranks hold alike (MLA) are shared by them, which is how SGLang writes them: on one rank only.

Loaded by SGLang alone: it derives from SGLang's own class.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvstore_backend.backend import ConfigError, Span, Status, Value
from kvstore_backend.config import read_config
from kvstore_backend.manifest import collect_facts
from kvstore_backend.namespace import Namespace, fingerprint_model
from kvstore_backend.pool import BlockPool, open_pool

__all__ = ["KvstoreHiCache"]

logger = logging.getLogger(__name__)


class KvstoreHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not here when types are checked
    """The pool as one rank of SGLang sees it. A page that cannot be had is a miss, and never an error.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``: ranks, the model, the extra configuration.
        options: further arguments of its factory; none today.
    """

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        """
        Raises:
            ConfigError: the pool's configuration, or the model's folder, cannot be used.
        """
        self._storage_config = storage_config
        extra = storage_config.extra_config or {}
        config = read_config(extra.get("pool"))
        if config is None:
            raise ConfigError('the configuration says that there is no pool ("backend": ""); start SGLang without one')
        self._config = config.require_plain("KvstoreHiCache")
        self._weights_version = str(extra.get("weights_version", ""))
        self._comes_by_address = bool(extra.get("interface_v1"))
        model = extra.get("model_path") or storage_config.model_name or ""
        if not Path(model).is_dir():
            raise ConfigError(f'the model {model!r} is no folder here; say "model_path" in the extra configuration')
        self._fingerprint = fingerprint_model(model)
        self._facts = collect_facts(model, "SGLang", "SGLang")
        self._host_pools: dict[str, Any] = {}
        self._pools: dict[bool, BlockPool] = {}

    def __repr__(self) -> str:
        return f"KvstoreHiCache({', '.join(map(repr, self._pools.values())) or 'no host memory registered'})"

    @property
    def is_ready(self) -> bool:
        """Whether host memory was registered, and every pool for it is in use now."""
        return bool(self._pools) and all(pool.is_ready for pool in self._pools.values())

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host memory that pages lie in, and open the pool in the background.

        Raises:
            ConfigError: the memory has no KV of its own (a logical anchor, as with DeepSeek V4).
            PoolUnavailable: Mooncake's library is missing.
        """
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is None:
            raise ConfigError("this model's KV pool is only logical in SGLang, which this backend does not serve")
        is_shared = bool(self._storage_config.is_mla_model)
        self._open_pool(mem_pool_host, is_shared=is_shared)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take the host memory of one more kind of state."""
        name = str(host_pool_name)
        if self._host_pools.get(name) is host_pool:
            return
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._host_pools[name] = host_pool
        buffers = getattr(host_pool, "get_hybrid_pool_buffer", lambda: [host_pool.kv_buffer])()
        for buffer in buffers:
            if buffer is not None and buffer.numel():
                self._pool_of(name).register(buffer.data_ptr(), buffer.numel() * buffer.element_size())

    # Pages by address, of KV: version 1.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages the pool has."""
        return self._pool_of("kv").lookup(self._hash_keys("kv", keys))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages to where ``host_indices`` say; from the first that is missing on, none."""
        return self._load_pages("kv", keys, self._locate_pages("kv", keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store the pages that the pool lacks."""
        return self._save_pages("kv", keys, self._locate_pages("kv", keys, host_indices))

    # Pages by address, of any state that a model keeps: version 2.

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """How many leading pages are there in every pool, by each pool's own rule."""
        leading = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: leading} if leading else {}
        restorable = set(range(1, leading + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # block groups are a second form of the pages; they never gate a hit, and are not stored here
            name = str(transfer.name)
            present = [
                status is Status.OK for status in self._pool_of(name).exists(self._hash_keys(name, keys[:leading]))
            ]
            needed = (
                max(1, len(transfer.keys or [])) if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES else leading
            )
            usable = {end for end in range(1, leading + 1) if all(present[max(0, end - needed) : end])}
            if usable:
                hits[transfer.name] = max(usable)
            restorable &= usable
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Read each pool's pages; from the first that is missing on, none."""
        return {each.name: self._move_pages(self._load_pages, each) for each in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Store each pool's pages that are not there."""
        return {each.name: self._move_pages(self._save_pages, each) for each in transfers}

    # Pages as flat tensors, where SGLang was not told "interface_v1".

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page in the tensor ``target_location``, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Each page in its tensor, or None."""
        loaded = self._load_pages("kv", keys, [_tensor_value(tensor) for tensor in target_locations])
        return [tensor if is_there else None for tensor, is_there in zip(target_locations, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages; whether all are in the pool."""
        kept = [tensor.contiguous() for tensor in values]
        return all(self._save_pages("kv", keys, [_tensor_value(tensor) for tensor in kept]))

    def exists(self, key: str) -> bool:
        """Whether the pool has this page."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Remove this namespace's pages, for all instances that share it."""
        for pool in self._pools.values():
            if not pool.clear():
                logger.warning("The pages of %r could not all be removed", pool)

    def close(self) -> None:
        """Leave the pool; every later call is a miss."""
        for pool in self._pools.values():
            pool.close()

    def _move_pages(self, move: Any, transfer: Any) -> list[bool]:
        name, keys = str(transfer.name), list(transfer.keys or [])
        answers: list[bool] = move(name, keys, self._locate_pages(name, keys, transfer.host_indices))
        return answers

    def _load_pages(self, name: str, keys: Sequence[str], targets: Sequence[Value]) -> list[bool]:
        number = self._pool_of(name).load(self._hash_keys(name, keys), targets)
        return [i < number for i in range(len(keys))]

    def _save_pages(self, name: str, keys: Sequence[str], sources: Sequence[Value]) -> list[bool]:
        return [bool(status) for status in self._pool_of(name).save(self._hash_keys(name, keys), sources)]

    def _locate_pages(self, name: str, keys: Sequence[str], host_indices: Any) -> list[Value]:
        """Where each page lies."""
        if not keys:
            return []
        addresses, sizes = self._host_pools[name].get_page_buffer_meta(host_indices)
        pieces = [Span(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        each, left = divmod(len(pieces), len(keys))
        if left or not each:
            raise ValueError(
                f"{len(keys)} pages of {name}, but {len(pieces)} pieces of memory; they must be told alike"
            )
        return [pieces[i : i + each] for i in range(0, len(pieces), each)]

    def _pool_of(self, name: str) -> BlockPool:
        """Mamba's state is each rank's own even where the KV is shared."""
        is_shared = bool(self._storage_config.is_mla_model) and name != PoolName.MAMBA.value
        if is_shared not in self._pools:
            self._open_pool(self._host_pools["kv"], is_shared=is_shared)
        return self._pools[is_shared]

    def _open_pool(self, host: Any, *, is_shared: bool) -> None:
        # Where SGLang gathers its processes' metrics (PROMETHEUS_MULTIPROC_DIR), those of the first pool are gathered
        # too; a second one's would be written over them.
        registry = None if self._pools else CollectorRegistry()
        namespace = self._build_namespace(host, is_shared=is_shared)
        self._pools[is_shared] = open_pool(self._config, namespace, registry, facts=self._facts)

    def _hash_keys(self, name: str, keys: Sequence[str]) -> list[bytes]:
        suffix = "" if name == "kv" else f".{name}"
        return [hashlib.sha256(f"{key}{suffix}".encode()).digest() for key in keys]

    def _build_namespace(self, host: Any, *, is_shared: bool) -> Namespace:
        config = self._storage_config
        layout = [
            f"sglang {host.layout} {'pages' if self._comes_by_address else 'flat'}",
            f"pp={config.pp_rank}/{config.pp_size}",
            f"cp={config.attn_cp_rank}/{config.attn_cp_size}",
            f"dcp={getattr(config, 'dcp_rank', 0)}/{getattr(config, 'dcp_size', 1)}",
        ]
        return Namespace(
            model=self._fingerprint,
            kv_dtype=str(host.dtype),
            block_size=host.page_size,
            num_layers=host.layer_num,
            num_kv_heads=getattr(host, "head_num", 1),
            head_size=getattr(host, "kv_cache_dim", None) or host.head_dim,
            layout=" ".join(layout),
            tp_size=1 if is_shared else config.tp_size,
            tp_rank=0 if is_shared else config.tp_rank,
            weights_version=self._weights_version,
        )


def _tensor_value(tensor: Any) -> Value:
    return [Span(tensor.data_ptr(), tensor.numel() * tensor.element_size())]
