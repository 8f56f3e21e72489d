"""vLLM's KV connector over the pool; ``connector.py`` says how it is configured.

vLLM finds ``KVStoreConnector`` here with its ``kv_connector_module_path``; an import of this package loads vLLM only
then.

connector.py  KVStoreConnector, the class that vLLM loads: configuration, and calls to one of the two halves
scheduler.py  the half in vLLM's scheduler process: decides which blocks to load and to save
hybrid.py     the same half for models with several KV cache groups
groups.py     those groups, and the longest prefix at which every group can resume
worker.py     the half in a worker: moves blocks between vLLM's memory and the pool
messages.py   the messages between the halves, once a step
memory.py     the addresses of a vLLM block's bytes
route.py      the route of blocks to the pool: through host buffers, or direct
clock.py      the duration of steps, on the host and on a GPU
cached.py     vLLM's cached blocks that were saved to the pool, to put them again if the pool loses them
fields.py     which of vLLM's settings are part of the namespace, and why the others are not
settings.py   those settings of one instance
adapters.py   LoRA adapters: which bytes vLLM computes with
counts.py     counters of a half, by name, which add up over workers
"""

from typing import Any

__all__ = ["KVStoreConnector", "KVStoreMetrics", "KVStoreStats"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore_backend.integrations.vllm import connector

    return getattr(connector, name)
