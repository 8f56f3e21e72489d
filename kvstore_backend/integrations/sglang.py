"""Storage backend for SGLang's hierarchical cache (HiCache), for ``--hicache-storage-backend dynamic``.

SGLang's command line names the class of this module::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvstore",
        "module_path": "kvstore_backend.integrations.sglang", "class_name": "KvstoreHiCache", "interface_v1": 1,
        "pool": "mooncake://127.0.0.1:15001"}'

The members of the extra configuration:

- ``pool``: a URL or a configuration file; without it the pool comes from the environment (``MOONCAKE_CONFIG_PATH``,
  ...).
- ``interface_v1``: with it SGLang passes the addresses of pages, which is fast; without it SGLang passes copies, as
  flat tensors.
- ``model_path``: the folder of the model, if SGLang knows the model only by a name at a hub.
- ``weights_version``: any text. Instances with different texts share no pages. It must change when weights are updated
  in place, because SGLang does not report such updates to a storage backend.
- ``kv_cache_dtype``: type of the KV. It is needed if host memory has the KV as plain bytes, and SGLang's own setting is
  ``auto``.

All settings of the server are read from SGLang's state in this process. The settings that can change KV
(``sglang_settings.py``) are part of the namespace, with the values that SGLang derived for them.

One page is one value in the pool. It has one span if the layout of the host memory stores K and V of all layers of a
page together, two spans with ``page_first``, and two spans per layer with ``layer_first``. The pool reads and writes
the spans where they are; they are not first copied to one place. The layout is part of the namespace, so only instances
with the same layout share pages. If all ranks have the same pages (MLA), they share them in the pool, and SGLang writes
the pages only on one rank.

Only SGLang loads this module, because the class derives from a class of SGLang.
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

from kvcommon.hints import find_nearest
from kvstore_backend.backend import ConfigError, Span, Status, Value
from kvstore_backend.config import PRECISION_VARIABLES, engine_variables, read_config
from kvstore_backend.integrations.settings import digest_settings, is_quantized, list_facts, read_settings
from kvstore_backend.integrations.sglang_settings import (
    CANNOT_CHANGE_KV,
    FILE_SETTINGS,
    IN_OTHER_FIELDS,
    NEUTRAL_VARIABLES,
)
from kvstore_backend.manifest import collect_facts
from kvstore_backend.namespace import Namespace, fingerprint_file, fingerprint_model, mark_changed_weights
from kvstore_backend.pool import BlockPool, count_leading, open_pool
from kvstore_backend.staging.cuda import find_architecture

__all__ = ["KvstoreHiCache"]

logger = logging.getLogger(__name__)

# Members of the extra configuration: ours, and those of SGLang that are similar to them.
_OPTIONS = ("pool", "interface_v1", "model_path", "weights_version", "kv_cache_dtype")
_SGLANGS_OPTIONS = ("backend_name", "module_path", "class_name", "protocol")
# Types that host memory has for KV in one of two fp8 formats, or in a format of four bits.
_PLAIN_BYTES = ("torch.uint8", "torch.int8")
# If the server's pages have this format, SGLang appends its name to the model's name.
_ENVELOPES = "unified-token-major"
_NO_ENVELOPES = (
    "this server has all kinds of state in one memory (--enable-unified-memory), and this backend does not support its "
    "pages; start the server without this option"
)
# Attributes of a host pool that distinguish two kinds of state with one name.
_STATE_ATTRIBUTES = (
    *("layout", "page_size", "size_per_token", "layer_num", "dtype", "conv_dtype", "temporal_dtype", "indexer_dtype"),
    *("head_num", "head_dim", "v_head_dim", "kv_cache_dim", "storage_format_tag"),
)


class KvstoreHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not here when types are checked
    """Storage backend of one rank of SGLang: stores pages in the pool.

    A page that cannot be read is a miss. The methods ignore ``extra_info`` and ``target_sizes``.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``: ranks, model, extra configuration.
        options: further arguments of SGLang's factory; not used.
    """

    def __init__(self, storage_config: Any, options: Any = None) -> None:
        """Read the pool's configuration and the server's settings. ``register_mem_pool_host`` opens the pool.

        Raises:
            ConfigError: a name in the extra configuration is mistyped, or the pool's configuration or the model's
                folder cannot be used.
        """
        self._storage_config = storage_config
        extra = storage_config.extra_config or {}
        for name in extra:
            nearest = find_nearest(name, (*_OPTIONS, *_SGLANGS_OPTIONS))
            if nearest and name != nearest:  # other members may be SGLang's
                raise ConfigError(f'unknown key "{name}" in the extra configuration; did you mean {nearest}?')
        config = read_config(extra.get("pool"))
        if config is None:
            raise ConfigError(
                'the configuration turns the pool off ("backend": ""); start SGLang without a storage backend'
            )
        self._config = config.require_plain("KvstoreHiCache")
        self._weights_version = str(extra.get("weights_version", ""))
        self._comes_by_address = bool(extra.get("interface_v1"))
        server = _read_server(self._weights_version)
        self._kv_dtype = str(extra.get("kv_cache_dtype") or server.get("kv_cache_dtype") or "auto")
        if str(storage_config.model_name).endswith(f"-{_ENVELOPES}"):
            raise ConfigError(_NO_ENVELOPES)
        # storage_config.model_name is --served-model-name, which may be the path of another model.
        model = _find_model(str(extra.get("model_path") or server.get("model_path") or storage_config.model_name or ""))
        checkpoint = fingerprint_model(model)
        has_quantized = is_quantized(model, server.get("quantization"))
        settings = read_settings(
            {**_list_adapters(server), **_name_weights(server), **_read_variables(), **_read_device(has_quantized)},
            {*CANNOT_CHANGE_KV, *IN_OTHER_FIELDS},
            FILE_SETTINGS,
        )
        # SGLang itself downloads the files of models that are not folders.
        folders = [model] if Path(str(server.get("model_path") or model)).is_dir() else []
        draft = server.get("speculative_draft_model_path")
        folders += [str(draft)] if draft and draft != model and Path(str(draft)).is_dir() else []
        for folder in folders:
            self._weights_version = mark_changed_weights(self._weights_version, folder)
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
        """Whether SGLang has registered host memory, and calls reach every pool of this object now."""
        return bool(self._pools) and all(pool.is_ready for pool in self._pools.values())

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the host memory with the pages of KV, and open the pool in the background.

        Raises:
            ConfigError: the host memory contains no KV (it is only logical, as with DeepSeek V4), or the type or shape
                of its KV is not known.
            PoolUnavailable: Mooncake's library is missing.
        """
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is None:
            raise ConfigError(
                "SGLang's host memory for this model contains no KV (a logical pool), which this backend does not "
                "support; start SGLang without a storage backend"
            )
        _check_host(mem_pool_host, self._kv_dtype)
        is_shared = bool(self._storage_config.is_mla_model)
        self._open_pool(mem_pool_host, is_shared=is_shared)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register the host memory of one kind of state: KV, or another kind such as the state of Mamba layers."""
        name = str(host_pool_name)
        if self._host_pools.get(name) is host_pool:
            return
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._host_pools[name] = host_pool
        if name != PoolName.KV.value:
            self._suffixes[name] = f".{name} {_describe_state(host_pool)}"
        config = self._storage_config
        if config.is_mla_model and config.tp_size > 1 and name != PoolName.MAMBA.value and not self._is_shared(name):
            logger.warning(
                "The %d ranks of this server have different pages of %s, and SGLang stores only the first one's, "
                "so nothing is loaded from the pool; start SGLang with --tp-size 1, or without a storage backend",
                *(config.tp_size, name),
            )
        for buffer in _list_buffers(host_pool):
            if buffer is not None and buffer.numel():
                region = Span(buffer.data_ptr(), buffer.numel() * buffer.element_size())
                self._pool_of(name).register(*region)
                self._regions.append(region)

    # SGLang's interface v1: pages of KV, by address.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the number of leading pages of KV that the pool has."""
        return self._pool_of("kv").lookup(self._hash_keys("kv", keys))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages of KV to the indices ``host_indices`` in host memory; return for each page whether it was read.

        All pages after the first missing page count as not read.
        """
        return self._load_pages("kv", keys, self._locate_pages("kv", keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store the missing pages of KV; return for each page whether the pool has it afterwards."""
        return self._save_pages("kv", keys, self._locate_pages("kv", keys, host_indices))

    # SGLang's interface v2: pages of each kind of state, by address. SGLang calls the memory of a kind a pool.

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return the number of leading pages after which a request can resume, and the number for each kind of page.

        KV needs all leading pages. Other kinds, such as Mamba state, need all pages or only the last ones (hit policy).
        """
        leading = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: leading} if leading else {}
        restorable = set(range(1, leading + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # block groups are another form of pages; this backend does not store them
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
        """Read pages of each kind (KV, Mamba state, ...). A page counts as read only if all earlier pages were read."""
        return {each.name: self._move_pages(self._load_pages, each) for each in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Store missing pages of each kind (KV, Mamba state, ...); return for each page whether the pool has it now."""
        return {each.name: self._move_pages(self._save_pages, each) for each in transfers}

    # SGLang's interface without "interface_v1": pages of KV, as flat tensors.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page of KV to the tensor ``target_location``; return the tensor, or None if the page was not read."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Read pages of KV to the tensors in ``target_locations``; return each tensor, or None for a page not read."""
        targets = [_tensor_value(tensor) for tensor in target_locations]
        with self._register_temporarily(targets):
            loaded = self._load_pages("kv", keys, targets)
        return [tensor if is_there else None for tensor, is_there in zip(target_locations, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page of KV from the tensor ``value``; return whether the pool has the page afterwards."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages of KV from the tensors ``values``; return whether the pool has all of them afterwards."""
        kept = [tensor.contiguous() for tensor in values]
        sources = [_tensor_value(tensor) for tensor in kept]
        with self._register_temporarily(sources):
            return all(self._save_pages("kv", keys, sources))

    def exists(self, key: str) -> bool:
        """Return whether the pool has a page of KV."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Remove all pages of this server's namespaces from the pool, also for other instances that share them."""
        for pool in self._pools.values():
            if not pool.clear():
                logger.warning("Not all pages could be removed from the pool: %r", pool)

    def close(self) -> None:
        """Close the pool. Every later call is a miss."""
        for pool in self._pools.values():
            pool.close()

    def _move_pages(self, move: Any, transfer: Any) -> list[bool]:
        name, keys = str(transfer.name), list(transfer.keys or [])
        answers: list[bool] = move(name, keys, self._locate_pages(name, keys, transfer.host_indices))
        return answers

    def _find_pages(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Return for each page whether the pool has it; False for all if SGLang registered no host memory for ``name``.

        Args:
            name: the kind of state in the pages: ``kv``, or another one such as the state of Mamba layers.
            keys: SGLang's keys of the pages.
        """
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
        """Return the spans of each page in host memory; None if SGLang does not report them, which counts as a miss."""
        if not keys:
            return []
        try:
            addresses, sizes = self._host_pools[name].get_page_buffer_meta(host_indices)
            pieces = [Span(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        except Exception as exc:  # any exception that SGLang raises for this layout
            logger.warning(
                "SGLang does not report the addresses of %d pages of %s, so these pages are a miss: %r",
                *(len(keys), name, exc),
            )
            return None
        each, left = divmod(len(pieces), len(keys))
        if left or not each:
            logger.warning(
                "SGLang reports %d pages of %s and %d spans of memory, so the pages are a miss: all pages must have "
                "the same number of spans",
                *(len(keys), name, len(pieces)),
            )
            return None
        return [pieces[i : i + each] for i in range(0, len(pieces), each)]

    @contextlib.contextmanager
    def _register_temporarily(self, values: Sequence[Value]) -> Iterator[None]:
        """Register tensors outside of the registered host memory for the ``with`` block, because RDMA needs this."""
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
        """Return the pool for the pages of the kind ``name`` (KV or, for example, Mamba state); open it if necessary.

        Ranks with the same pages (MLA) share one namespace.
        """
        is_shared = self._is_shared(name)
        if is_shared not in self._pools:
            self._open_pool(self._host_pools["kv"], is_shared=is_shared)
        return self._pools[is_shared]

    def _is_shared(self, name: str) -> bool:
        """Return whether all ranks have the same pages of the kind ``name``.

        With MLA they are the same, except the state of Mamba, and KV with heads (of a draft model without MLA).
        """
        if not self._storage_config.is_mla_model or name == PoolName.MAMBA.value:
            return False
        return name == PoolName.KV.value or not hasattr(self._host_pools.get(name), "head_num")

    def _open_pool(self, host: Any, *, is_shared: bool) -> None:
        # If the engine collects the metrics of its processes (PROMETHEUS_MULTIPROC_DIR), it also collects those of the
        # first pool. The metrics of a second pool would overwrite them.
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
    """Return all settings of the SGLang server in this process, with the values that SGLang derived for them.

    The result is empty if SGLang does not expose the settings, and ``weights_version`` is not empty.

    Raises:
        ConfigError: SGLang does not expose the settings, and ``weights_version`` is empty.
    """
    try:
        from sglang.srt.runtime_context import get_server_args

        settings: Mapping[str, object] = get_server_args().resolved_dict()
    except (ImportError, AttributeError, ValueError) as exc:
        if weights_version:
            return {}
        raise ConfigError(
            f"this version of SGLang does not expose its server's settings ({exc}), so different servers could "
            'read each other\'s KV; set "weights_version" in the extra configuration, to another value for each '
            "version of the weights"
        ) from exc
    return settings


def _list_adapters(server: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings with ``lora_paths`` as a mapping: name of each LoRA adapter -> its path.

    In SGLang's own settings, ``lora_paths`` is a list of mappings with more members.
    """
    adapters = server.get("lora_paths")
    if not isinstance(adapters, list | tuple):
        return server
    return {**server, "lora_paths": {str(each["lora_name"]): str(each["lora_path"]) for each in adapters}}


def _name_weights(server: Mapping[str, object]) -> dict[str, str]:
    """Return which weights SGLang loads if ``model_path`` is not a folder; {} if it is one.

    They can be a file (GGUF), whose content is sampled, or a name at a hub or in an object store.
    """
    path = str(server.get("model_path") or "")
    if Path(path).is_dir():
        return {}
    if Path(path).is_file():
        return {"weights": fingerprint_file(path)}
    return {"weights": f"{path} {server.get('revision') or ''}".strip()}


def _read_defaults() -> Mapping[str, object]:
    """Return the defaults of SGLang's settings, for the manifest; empty if SGLang does not expose them."""
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
    """Return the environment variables of SGLang and its libraries that can change KV."""
    known = engine_variables(("SGLANG_", *PRECISION_VARIABLES))
    return {name: text for name, text in known.items() if not name.startswith(NEUTRAL_VARIABLES)}


def _read_device(has_quantized: bool) -> dict[str, str]:
    """Return the kind of this GPU if the kind decides in which format SGLang calculates; otherwise {}.

    With quantized weights, the kind of GPU decides whether activations are quantized, too. On AMD's GPUs it also
    decides what the bytes of fp8 KV mean: e4m3fnuz on MI300, e4m3fn on later ones, even if the settings name the other
    format.
    """
    architecture = find_architecture()
    is_amds = architecture.startswith("gfx")
    return {"device architecture": architecture} if is_amds or (has_quantized and architecture) else {}


def _find_model(name: str) -> str:
    """Check that ``name`` is the folder of a model, and return ``name``.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not Path(name).is_dir() or not name:
        raise ConfigError(
            f'the model {name!r} is not a folder on this machine; set "model_path" in the extra configuration'
        )
    return name


def _check_host(host: Any, kv_dtype: str) -> None:
    """Check that the type and shape of the pages in SGLang's host memory are known.

    Raises:
        ConfigError: type or shape is not known, or this backend does not support such pages; the message is one
            sentence.
    """
    if getattr(host, "stores_page_envelope", False):
        raise ConfigError(_NO_ENVELOPES)
    if getattr(host, "kv_cache_dim", None) is None and getattr(host, "head_dim", None) is None:
        raise ConfigError(
            f"SGLang's host memory has the class {type(host).__name__}, which this backend does not support, because "
            "the shape of its pages is not known; start SGLang without a storage backend"
        )
    if str(host.dtype) in _PLAIN_BYTES and kv_dtype == "auto":
        raise ConfigError(
            f"this server's KV has the dtype {host.dtype} in host memory, which may mean fp8_e4m3 or fp8_e5m2; start "
            'the server with --kv-cache-dtype, or set "kv_cache_dtype" in the extra configuration'
        )


def _list_buffers(host: Any) -> Sequence[Any]:
    """Return the tensors with the pages of SGLang's object ``host`` (host memory). Some can be None."""
    if hasattr(host, "get_hybrid_pool_buffer"):
        buffers: Sequence[Any] = host.get_hybrid_pool_buffer()
        return buffers
    # MLA on Ascend cards has the last three, too (layout page_first_kv_split).
    return [getattr(host, name, None) for name in ("kv_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer")]


def _describe_state(host: Any) -> str:
    """Return as JSON the attributes of SGLang's object ``host`` (host memory) that describe its pages."""
    known = {name: getattr(host, name, None) for name in _STATE_ATTRIBUTES}
    return json.dumps({name: str(value) for name, value in known.items() if value is not None})


def _tensor_value(tensor: Any) -> Value:
    return [Span(tensor.data_ptr(), tensor.numel() * tensor.element_size())]
