"""SGLang's module ``sglang.srt.mem_cache.hicache_storage``: the module of an installed SGLang, or a double.

In both cases, the settings of the server are a double of ``ServerArgs`` with the fields of SGLang 0.5.23
(``sglang_fields.txt``).

To import all of SGLang needs its GPU kernels, but this module needs little more than torch. So the packages above the
module are replaced by empty ones, also for an SGLang that is only unpacked in a folder on the path. ``import_hybrid``
imports SGLang's host pools of hybrid models.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["FIELDS", "import_hybrid", "is_installed", "read_installed_fields", "set_settings", "sglang_module"]

NAME = "sglang.srt.mem_cache.hicache_storage"
_PARENTS = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
# Packages and modules that need GPU kernels or models. The modules of the hybrid pools use almost nothing of them.
_MORE_PARENTS = ("sglang.srt.configs", "sglang.srt.layers", "sglang.srt.layers.quantization")
_UNUSED = ("sglang.srt.observability.metrics_collector", "sglang.srt.session.streaming_session")
_CONTEXT = "sglang.srt.runtime_context"
_RECORDS = "sglang.srt.arg_groups.arg_utils"

FIELDS = (Path(__file__).parent / "sglang_fields.txt").read_text().split()
"""The fields of ``ServerArgs`` in SGLang 0.5.23."""

_ServerArgs = dataclasses.make_dataclass(
    "_ServerArgs", [(name, object, dataclasses.field(default=None)) for name in FIELDS]
)


def is_installed() -> bool:
    """Return whether SGLang's own module is installed."""
    return find_spec("sglang") is not None


def read_installed_fields() -> set[str]:
    """Read the fields of the installed SGLang's ``ServerArgs`` from its source: to import it needs GPU kernels."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    sources = Path(spec.origin).parent.joinpath("srt", "arg_groups", "fields").glob("*.py")
    return {
        line.target.id
        for source in sources
        for group in ast.parse(source.read_text()).body
        if isinstance(group, ast.ClassDef)
        for line in group.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def set_settings(settings: dict[str, Any] | None) -> None:
    """Set the settings of SGLang's server, with defaults for the others; None: there are none, as in old versions."""

    server = _ServerArgs()
    vars(server)["resolved_dict"] = lambda: dict.fromkeys(FIELDS) | (settings or {})

    def get_server_args() -> Any:
        if settings is None:
            raise ValueError("Global server args is not set yet!")
        return server

    sys.modules[_CONTEXT].get_server_args = get_server_args  # type: ignore[attr-defined]


def import_hybrid() -> dict[str, Any]:
    """Import the installed SGLang's classes for caches of hybrid models, within ``sglang_module(real=True)``."""
    srt = Path(sys.modules["sglang.srt"].__path__[0])
    for name in _MORE_PARENTS:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(srt.joinpath(*name.split(".")[2:]))]
    for name in _UNUSED:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = _make_class  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for name in (
        *("device_pool_info", "pool_host", "pool_host.base", "pool_host.mha", "pool_host.mamba", "base_prefix_cache"),
        *("hybrid_cache.hybrid_cache_controller", "unified_radix_cache", "utils"),
    ):
        found |= vars(importlib.import_module(f"sglang.srt.mem_cache.{name}"))
    return found


def _make_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


@contextmanager
def sglang_module(*, real: bool) -> Iterator[Any]:
    """Yield our integration, loaded with SGLang's module or the double. Afterwards, unload both."""
    before = set(sys.modules)
    root = find_spec("sglang") if real else None
    try:
        for name in _PARENTS:
            parent = types.ModuleType(name)
            if root is not None and root.origin is not None:
                parent.__path__ = [str(Path(root.origin).parent.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = parent
        if not real:
            sys.modules[NAME] = _make_double()
            for name, members in _OTHER_DOUBLES.items():
                sys.modules[name] = types.ModuleType(name)
                vars(sys.modules[name]).update(members)
        importlib.import_module(NAME)
        importlib.import_module(_CONTEXT)
        set_settings({})
        yield importlib.import_module("kvstore_backend.integrations.sglang")
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(("sglang", "kvstore_backend.integrations.sglang")):
                del sys.modules[name]


_OTHER_DOUBLES: dict[str, dict[str, Any]] = {
    "sglang.version": {"__version__": "0.5.23"},
    _CONTEXT: {},
    "sglang.srt.arg_groups": {},
    _RECORDS: {"record_fields": dataclasses.fields},
}


def _make_double() -> types.ModuleType:
    """Make the part of SGLang 0.5.23's module that the integration uses."""

    class PoolName(str, enum.Enum):
        KV = "kv"
        MAMBA = "mamba"
        INDEXER = "indexer"

        def __str__(self) -> str:
            return self.value

    class PoolHitPolicy(str, enum.Enum):
        ALL_PAGES = "all_pages"
        TRAILING_PAGES = "trailing_pages"
        BLOCK_GROUPS = "block_groups"

    @dataclass
    class PoolTransfer:
        name: PoolName
        host_indices: Any = None
        keys: list[str] | None = None
        hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES

    @dataclass
    class PoolTransferResult:
        kv_hit_pages: int
        extra_pool_hit_pages: dict[str, int]
        restorable_prefix_pages: list[int] | None = None

    class HiCacheStorage(ABC):
        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            self.mem_pool_host = mem_pool_host

        def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
            self.last_registered = host_pool_name

        def on_host_pools_registered(self) -> None:
            self.all_registered = True

        @abstractmethod
        def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

        @abstractmethod
        def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any: ...

        @abstractmethod
        def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

        @abstractmethod
        def batch_set(
            self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
        ) -> bool: ...

        @abstractmethod
        def exists(self, key: str) -> bool: ...

    module = types.ModuleType(NAME)
    for kind in (PoolName, PoolHitPolicy, PoolTransfer, PoolTransferResult, HiCacheStorage):
        setattr(module, kind.__name__, kind)
    return module
