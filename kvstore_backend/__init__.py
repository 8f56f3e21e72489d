"""KV blocks in one shared pool: put, get and look up. Answers are reliable even if the pool fails.

>>> config = load_config("memory")
>>> namespace = Namespace("fingerprint", "float32", 64, 24, 2, 64, "layer,kv,head,token,dim")
>>> with open_pool(config, namespace) as pool:
...     pool.lookup([b"hash of the first block"])
0

An engine uses a ``BlockPool``. Below it are wrappers, one around the other, and at the bottom a store:

pool.py        BlockPool: the engine's view, block hashes in and block bytes out; open_pool puts the parts together
block_hash.py  token ids -> chained block hashes
namespace.py   Namespace: everything that makes blocks interchangeable; only this file builds and parses keys
manifest.py    the manifest of a namespace: a small JSON object in the pool that explains the namespace's digest
manifest_keeper.py  writes the manifest on its own thread, and writes it again if the pool loses it
backend.py     StorageBackend, the interface of stores and wrappers; Status, its three answers; Span; the errors
threads.py     threads that the end of the process does not wait for; the state of a process after a fork
transfers.py   asynchronous loads and saves, for engines that do not wait for the pool
staging/       KV in a device's memory, copied through host memory; needs torch, so only its users import it
resharding/    blocks of the same model under another tensor-parallel size or block size: found, and gathered
load_or_compute.py  whether loading blocks from the pool is quicker than computing them
pool_timing.py  the same decision for a whole pool and an instance, measured: kvstore doctor --instance
refill.py      puts blocks that the pool has lost again, from an instance that still has them
clear_marks.py  marks that an operator's clear leaves; no instance puts older blocks again after it
wrappers/      backends around a backend, one concern each: headers, deadlines, writes in the background, tiers, metrics
stores/        where bytes are stored: a Mooncake cluster, a folder, this process's memory
config/        every dialect of configuration -> one PoolConfig
integrations/  adapters that let other engines use this pool
why_miss.py    why blocks were not shared: compares two configurations, or two prompts
cli/           kvstore doctor, bench, stats, master, and for operators: ls, pin, clear, why-miss
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
