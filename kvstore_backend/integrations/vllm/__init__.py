"""vLLM's KV connector over the pool; ``connector.py`` says how it is configured.

vLLM finds ``KVStoreConnector`` here by its ``kv_connector_module_path``; importing this package loads vLLM only then.
"""

from typing import Any

__all__ = ["KVStoreConnector", "KVStoreMetrics", "KVStoreStats"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore_backend.integrations.vllm import connector

    return getattr(connector, name)
