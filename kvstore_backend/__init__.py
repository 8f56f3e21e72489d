"""KV blocks in one shared pool: put, get and look up, with honest answers whatever the pool does.

>>> config = load_config("memory")
>>> namespace = Namespace("fingerprint", "float32", 64, 24, 2, 64, "layer,kv,head,token,dim")
>>> with open_pool(config, namespace) as pool:
...     pool.lookup([b"hash of the first block"])
0
"""

from kvstore_backend.backend import (
    ConfigError,
    Health,
    KVStoreError,
    PoolUnavailable,
    Span,
    Status,
    StorageBackend,
    StoreStats,
    Value,
)
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.config import PoolConfig, load_config, read_config
from kvstore_backend.namespace import Namespace, fingerprint_model
from kvstore_backend.pool import BlockPool, default_backend, open_pool

__all__ = [
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
    "StoreStats",
    "Value",
    "default_backend",
    "extend_block_hashes",
    "fingerprint_model",
    "load_config",
    "open_pool",
    "read_config",
    "root_hash",
]
