from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
import types

import kvstore_backend

MODULES = ["kvstore_backend"] + [
    module.name for module in pkgutil.walk_packages(kvstore_backend.__path__, "kvstore_backend.")
]

# Integrations may derive from a class of another engine, which is usually not installed here.
OTHER_ENGINES = {"sglang", "vllm"}


def test_the_package_exports_these_names() -> None:
    assert sorted(kvstore_backend.__all__) == [
        "BlockPool",
        "ConfigError",
        "Health",
        "KVStoreError",
        "Namespace",
        "PoolConfig",
        "PoolUnavailable",
        "Span",
        "Status",
        "StorageBackend",
        "Value",
        "default_backend",
        "extend_block_hashes",
        "fingerprint_model",
        "load_config",
        "open_pool",
        "read_config",
        "root_hash",
    ]


def test_all_lists_the_public_names_of_a_module() -> None:
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if (exc.name or "").split(".")[0] not in OTHER_ENGINES:
                raise
            continue
        if module.__doc__ and not hasattr(module, "__all__"):
            assert not _defined_in(module), name
            continue
        if not hasattr(module, "__path__"):
            assert _defined_in(module) <= set(module.__all__), name
        if name.rpartition(".")[2] not in OTHER_ENGINES:  # its names come with the engine
            assert all(hasattr(module, public) for public in module.__all__), name


def test_importing_the_package_loads_neither_mooncake_nor_an_engine_nor_a_router() -> None:
    code = (
        "import sys, kvstore_backend; print([m for m in ('mooncake', 'torch', 'engine', 'router') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_example_in_the_packages_documentation_works() -> None:
    assert doctest.testmod(kvstore_backend).failed == 0


def _defined_in(module: types.ModuleType) -> set[str]:
    """Return the public classes and functions that the module defines."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
