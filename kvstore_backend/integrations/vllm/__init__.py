"""KV connector for vLLM. ``connector.py`` describes its configuration.

vLLM loads ``KVStoreConnector`` from this package, by ``kv_connector_module_path``. The connector has two *halves*: one
in vLLM's scheduler process, and one in each worker. Other users can import modules of the package without vLLM.

connector.py  KVStoreConnector, the class that vLLM loads: reads the configuration, and calls one of the two halves
scheduler.py  the half in vLLM's scheduler process: decides which blocks to load and to save
hybrid.py     the same half for models with several KV cache groups
worker.py     the half in a worker: moves blocks between vLLM's memory and the pool
messages.py   the messages between the halves, once per step
memory.py     finds the addresses of a vLLM block's bytes
route.py      selects the route between vLLM's memory and the pool: through host buffers, or direct
clock.py      measures the duration of steps, on the host and on a GPU
cached.py     vLLM's cached blocks that were saved to the pool: saves them again if the pool has lost them
fields.py     lists vLLM's settings that are part of the namespace, and the reasons why others are not
support.py    checks which models and settings of vLLM the connector supports, and reads the groups of layers
namespace.py  the namespace of a worker's blocks, the shardings that it can read, and facts for the manifest
settings.py   collects the settings of one instance for the namespace
adapters.py   checks which files of a LoRA adapter vLLM has loaded
counts.py     counters of one half, by name
metrics.py    the counts in vLLM's log and metrics
"""

from typing import Any

__all__ = ["KVStoreConnector", "KVStoreMetrics", "KVStoreStats"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore_backend.integrations.vllm import connector

    return getattr(connector, name)
