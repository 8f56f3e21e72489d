"""SGLang joins the pool with ``--hicache-storage-backend dynamic``, as the storage tier of its hierarchical cache.

Its configuration names this class::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvstore",
        "module_path": "kvstore_backend.integrations.sglang", "class_name": "KvstoreHiCache", "interface_v1": 1,
        "pool": "mooncake://127.0.0.1:15001"}'

``pool`` is a URL or a configuration file; without it the environment decides (``MOONCAKE_CONFIG_PATH`` and so on). With
``interface_v1`` SGLang passes addresses instead of copies, which makes this quick; without it pages come as flat
tensors. The model's folder is SGLang's own; if SGLang has only a name, ``model_path`` here gives the folder.
``weights_version``, any text, separates instances with one folder and different KV: SGLang does not notify a storage
class of weights that are updated in place. All settings of the server are read from SGLang's state in this process;
those that determine KV (``sglang_settings.py``) are part of the namespace, as SGLang resolved them. ``kv_cache_dtype``
here names the type of KV that is stored as plain bytes in host memory if SGLang's setting leaves it to the checkpoint.

One page is one object. It has one span if the host memory's layout stores K and V of a page together in all layers, two
with ``page_first``, and two per layer with ``layer_first``: no pieces are copied together. The layout and the form in
which pages come are part of the namespace, so only instances with the same layout share pages. If all ranks hold the
same pages of a model (MLA), they share them; SGLang writes such pages on one rank only.

Only SGLang loads this module: its class derives from SGLang's own class.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.version import __version__ as sglang_version

from kvstore_backend.backend import ConfigError, Span, Status, Value
from kvstore_backend.config import engine_variables, read_config
from kvstore_backend.integrations.settings import digest_settings, list_facts, read_settings
from kvstore_backend.integrations.sglang_settings import (
    CANNOT_CHANGE_KV,
    NAMES_OF_FILES,
    NEUTRAL_VARIABLES,
    TOLD_OTHERWISE,
    VARIABLES_ON_NUMBERS,
)
from kvstore_backend.manifest import collect_facts
from kvstore_backend.namespace import Namespace, fingerprint_model
from kvstore_backend.pool import BlockPool, count_leading, open_pool

__all__ = ["KvstoreHiCache"]

logger = logging.getLogger(__name__)

# Host memory has two types of fp8, and types of four bits, as these.
_PLAIN_BYTES = ("torch.uint8", "torch.int8")
_ENVELOPES = "unified-token-major"
_NO_ENVELOPES = (
    "this server keeps all kinds of state in one memory (--enable-unified-memory), whose pages this backend does not "
    "serve; start it without that"
)
# Attributes of a host pool that distinguish two kinds of state with one name.
_STATE_ATTRIBUTES = (
    *("layout", "page_size", "size_per_token", "layer_num", "dtype", "conv_dtype", "temporal_dtype", "indexer_dtype"),
    *("head_num", "head_dim", "v_head_dim", "kv_cache_dim", "storage_format_tag"),
)


class KvstoreHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not here when types are checked
    """Pool as one rank of SGLang sees it. A page that cannot be read is a miss, and never an error.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``: ranks, the model, the extra configuration.
        options: further arguments of its factory; none today.
    """

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        """Read the configuration and the server's settings; the pool is opened later, with the host memory.

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
        server = _read_server(self._weights_version)
        self._kv_dtype = str(extra.get("kv_cache_dtype") or server.get("kv_cache_dtype") or "auto")
        model = _find_model(extra.get("model_path") or storage_config.model_name or "")
        settings = read_settings(
            {**_list_adapters(server), **_read_variables()},
            {*CANNOT_CHANGE_KV, *TOLD_OTHERWISE},
            NAMES_OF_FILES,
        )
        checkpoint = fingerprint_model(model)
        self._model = digest_settings(checkpoint, settings)
        self._facts = {
            **collect_facts(model, f"SGLang {sglang_version}", "SGLang", checkpoint=checkpoint),
            **list_facts(settings, read_settings(_read_defaults())),
        }
        self._host_pools: dict[str, Any] = {}
        self._pools: dict[bool, BlockPool] = {}
        self._regions: list[Span] = []  # host memory that is registered with the pool
        self._suffixes: dict[str, str] = {"kv": ""}  # suffix of the keys for each kind of state

    def __repr__(self) -> str:
        return f"KvstoreHiCache({', '.join(map(repr, self._pools.values())) or 'no host memory registered'})"

    @property
    def is_ready(self) -> bool:
        """Whether host memory was registered, and every pool for it is in use now."""
        return bool(self._pools) and all(pool.is_ready for pool in self._pools.values())

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the host memory of the pages, and open the pool in the background.

        Raises:
            ConfigError: the memory has no KV of its own (a logical anchor, as with DeepSeek V4), or its contents are
                not known.
            PoolUnavailable: Mooncake's library is missing.
        """
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is None:
            raise ConfigError("this model's KV pool is only logical in SGLang, which this backend does not serve")
        _check_host(mem_pool_host, self._kv_dtype)
        is_shared = bool(self._storage_config.is_mla_model)
        self._open_pool(mem_pool_host, is_shared=is_shared)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register the host memory of one more kind of state."""
        name = str(host_pool_name)
        if self._host_pools.get(name) is host_pool:
            return
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._host_pools[name] = host_pool
        if name != PoolName.KV.value:
            self._suffixes[name] = f".{name} {_describe_state(host_pool)}"
        buffers = getattr(host_pool, "get_hybrid_pool_buffer", lambda: [host_pool.kv_buffer])()
        for buffer in buffers:
            if buffer is not None and buffer.numel():
                region = Span(buffer.data_ptr(), buffer.numel() * buffer.element_size())
                self._pool_of(name).register(*region)
                self._regions.append(region)

    # Version 1: pages of KV, by address.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages the pool has."""
        return self._pool_of("kv").lookup(self._hash_keys("kv", keys))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages to the places that ``host_indices`` name; no page after the first missing one is read."""
        return self._load_pages("kv", keys, self._locate_pages("kv", keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store the pages that the pool lacks."""
        return self._save_pages("kv", keys, self._locate_pages("kv", keys, host_indices))

    # Version 2: pages of any state of a model, by address.

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return how many leading pages are present in every pool, by each pool's own rule."""
        leading = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: leading} if leading else {}
        restorable = set(range(1, leading + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # block groups are another form of the pages; they never prevent a hit, and are not stored
            present = self._find_pages(str(transfer.name), keys[:leading])
            needed = (
                max(1, len(transfer.keys or [])) if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES else leading
            )
            usable = {end for end in range(1, leading + 1) if all(present[max(0, end - needed) : end])}
            if usable:
                hits[transfer.name] = max(usable)
            restorable &= usable
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Read each pool's pages; no page after the first missing one is read."""
        return {each.name: self._move_pages(self._load_pages, each) for each in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Store each pool's pages that are absent."""
        return {each.name: self._move_pages(self._save_pages, each) for each in transfers}

    # Pages as flat tensors, if SGLang was not started with "interface_v1".

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read the page to the tensor ``target_location`` and return it, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Read each page to its tensor; return the tensors, with None for a page that was not read."""
        targets = [_tensor_value(tensor) for tensor in target_locations]
        with self._announce(targets):
            loaded = self._load_pages("kv", keys, targets)
        return [tensor if is_there else None for tensor, is_there in zip(target_locations, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages; return whether all are in the pool."""
        kept = [tensor.contiguous() for tensor in values]
        sources = [_tensor_value(tensor) for tensor in kept]
        with self._announce(sources):
            return all(self._save_pages("kv", keys, sources))

    def exists(self, key: str) -> bool:
        """Return whether the pool has this page."""
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

    def _find_pages(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Return which pages of one pool are present; none for a pool without registered memory."""
        if name not in self._host_pools:
            return [False] * len(keys)
        return [status is Status.OK for status in self._pool_of(name).exists(self._hash_keys(name, keys))]

    def _load_pages(self, name: str, keys: Sequence[str], targets: Sequence[Value] | None) -> list[bool]:
        if targets is None:
            return [False] * len(keys)
        number = count_leading(self._pool_of(name).get_blocks(self._hash_keys(name, keys), targets))
        return [i < number for i in range(len(keys))]

    def _save_pages(self, name: str, keys: Sequence[str], sources: Sequence[Value] | None) -> list[bool]:
        if sources is None:
            return [False] * len(keys)
        return [bool(status) for status in self._pool_of(name).save(self._hash_keys(name, keys), sources)]

    def _locate_pages(self, name: str, keys: Sequence[str], host_indices: Any) -> list[Value] | None:
        """Return where each page is in memory; None if that is not known, which is a miss for this pool only."""
        if not keys:
            return []
        try:
            addresses, sizes = self._host_pools[name].get_page_buffer_meta(host_indices)
            pieces = [Span(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        except Exception as exc:  # any exception that SGLang's pool raises for this layout
            logger.warning("The memory of %d pages of %s is not known: %r", len(keys), name, exc)
            return None
        each, left = divmod(len(pieces), len(keys))
        if left or not each:
            logger.warning(
                "%d pages of %s, but %d pieces of memory: the numbers do not agree", len(keys), name, len(pieces)
            )
            return None
        return [pieces[i : i + each] for i in range(0, len(pieces), each)]

    @contextlib.contextmanager
    def _announce(self, values: Sequence[Value]) -> Iterator[None]:
        """Register tensors outside host memory while a call uses them: RDMA needs that."""
        pool = self._pool_of("kv")
        spans = [span for span in dict.fromkeys(span for value in values for span in value) if not self._holds(span)]
        for span in spans:
            pool.register(*span)
        try:
            yield
        finally:
            for span in spans:
                pool.unregister(*span)

    def _holds(self, span: Span) -> bool:
        end = span.address + span.nbytes
        return any(region.address <= span.address and end <= region.address + region.nbytes for region in self._regions)

    def _pool_of(self, name: str) -> BlockPool:
        """Return the pool for a kind of state: Mamba's state differs on each rank even if the KV is shared."""
        is_shared = bool(self._storage_config.is_mla_model) and name != PoolName.MAMBA.value
        if is_shared not in self._pools:
            self._open_pool(self._host_pools["kv"], is_shared=is_shared)
        return self._pools[is_shared]

    def _open_pool(self, host: Any, *, is_shared: bool) -> None:
        # Engines may collect their processes' metrics (PROMETHEUS_MULTIPROC_DIR); the metrics of the first pool are
        # then collected too. Those of a second pool would overwrite them.
        registry = None if self._pools else CollectorRegistry()
        namespace = self._build_namespace(host, is_shared=is_shared)
        self._pools[is_shared] = open_pool(self._config, namespace, registry, facts=self._facts)

    def _hash_keys(self, name: str, keys: Sequence[str]) -> list[bytes]:
        suffix = self._suffixes[name]
        return [hashlib.sha256(f"{key}{suffix}".encode()).digest() for key in keys]

    def _build_namespace(self, host: Any, *, is_shared: bool) -> Namespace:
        config = self._storage_config
        layout = [
            f"sglang {sglang_version} {host.layout}",
            getattr(host, "storage_format_tag", None),
            "pages" if self._comes_by_address else "flat",
            f"pp={config.pp_rank}/{config.pp_size}",
            f"cp={config.attn_cp_rank}/{config.attn_cp_size}",
            f"dcp={getattr(config, 'dcp_rank', 0)}/{getattr(config, 'dcp_size', 1)}",
        ]
        return Namespace(
            model=self._model,
            kv_dtype=f"{host.dtype} {self._kv_dtype}",
            block_size=host.page_size,
            num_layers=host.layer_num,
            num_kv_heads=getattr(host, "head_num", 1),
            head_size=getattr(host, "kv_cache_dim", None) or host.head_dim,
            layout=" ".join(filter(None, layout)),
            tp_size=1 if is_shared else config.tp_size,
            tp_rank=0 if is_shared else config.tp_rank,
            weights_version=self._weights_version,
        )


def _read_server(weights_version: str) -> Mapping[str, object]:
    """Return all settings of this process's server, as SGLang resolved them.

    Raises:
        ConfigError: SGLang does not expose them, and there is no ``weights_version`` to replace them.
    """
    try:
        from sglang.srt.runtime_context import get_server_args

        settings: Mapping[str, object] = get_server_args().resolved_dict()
    except (ImportError, AttributeError, ValueError) as exc:
        if weights_version:
            return {}
        raise ConfigError(
            f"this version of SGLang does not expose its server's settings ({exc}), and servers that differ would "
            'read each other\'s KV: say "weights_version" in the extra configuration, another for each set'
        ) from exc
    return settings


def _list_adapters(server: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings with the path of each adapter by its name; SGLang resolves the setting to its ``LoRARef``."""
    adapters = server.get("lora_paths")
    if not isinstance(adapters, list | tuple):
        return server
    return {**server, "lora_paths": {str(each.lora_name): str(each.lora_path) for each in adapters}}


def _read_defaults() -> Mapping[str, object]:
    """Return the defaults of the server's settings, as far as they are available: they only help operators."""
    try:
        from sglang.srt.arg_groups.arg_utils import record_fields
        from sglang.srt.runtime_context import get_server_args

        fields = record_fields(type(get_server_args()))
        return {
            each.name: each.default_factory() if callable(each.default_factory) else each.default for each in fields
        }
    except (ImportError, AttributeError, ValueError):
        return {}


def _read_variables() -> dict[str, str]:
    """Return the environment variables of SGLang and its libraries that may change KV.

    These are SGLang's, without those for places, times and reports, and its libraries' variables on calculation.
    """
    known = engine_variables(("SGLANG_", *VARIABLES_ON_NUMBERS))
    return {name: text for name, text in known.items() if not name.startswith(NEUTRAL_VARIABLES)}


def _find_model(name: str) -> str:
    """Return the model's folder; SGLang appends the format of pages to its name if they have a special one.

    Raises:
        ConfigError: there is no such folder.
    """
    if name.endswith(f"-{_ENVELOPES}"):
        raise ConfigError(_NO_ENVELOPES)
    if not Path(name).is_dir() or not name:
        raise ConfigError(f'the model {name!r} is no folder here; say "model_path" in the extra configuration')
    return name


def _check_host(host: Any, kv_dtype: str) -> None:
    """Refuse host memory with pages that cannot be distinguished from others.

    Raises:
        ConfigError: the memory is refused; the message is one sentence.
    """
    if getattr(host, "stores_page_envelope", False):
        raise ConfigError(_NO_ENVELOPES)
    if getattr(host, "kv_cache_dim", None) is None and getattr(host, "head_dim", None) is None:
        raise ConfigError(f"a host pool of the kind {type(host).__name__} has no known shape; it cannot be served")
    if str(host.dtype) in _PLAIN_BYTES and kv_dtype == "auto":
        raise ConfigError(
            f"this server's KV is in host memory as {host.dtype}, which may be fp8_e4m3 or fp8_e5m2: start "
            'it with --kv-cache-dtype, or say "kv_cache_dtype" in the extra configuration'
        )


def _describe_state(host: Any) -> str:
    """Describe the parts of a side pool's page, as far as its host memory shows them."""
    known = {name: getattr(host, name, None) for name in _STATE_ATTRIBUTES}
    return json.dumps({name: str(value) for name, value in known.items() if value is not None})


def _tensor_value(tensor: Any) -> Value:
    return [Span(tensor.data_ptr(), tensor.numel() * tensor.element_size())]
