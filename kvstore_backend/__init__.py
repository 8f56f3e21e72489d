"""KV blocks in one shared pool: put, get and look up, with honest answers however the pool fails.

>>> config = load_config("memory")
>>> namespace = Namespace("fingerprint", "float32", 64, 24, 2, 64, "layer,kv,head,token,dim")
>>> with open_pool(config, namespace) as pool:
...     pool.lookup([b"hash of the first block"])
0

An engine sees a ``BlockPool``; under it stand wrappers, one around the other, and at the bottom a store:

pool.py        BlockPool: the engine's view, block hashes in and block bytes out; open_pool puts the parts together
block_hash.py  token ids -> chained block hashes
namespace.py   Namespace: everything that makes blocks interchangeable; a key is built and parsed here alone
manifest.py    the manifest of a namespace: a small JSON object in the pool, the meaning of its digest
manifest_keeper.py  writes it, on a thread of its own, and again where the pool lost it
backend.py     StorageBackend, the interface of stores and wrappers; Status, its three answers; Span; the errors
threads.py     threads that the end of the process does not wait for; what a fork leaves
transfers.py   loads and saves on their way, for engines that do not wait for the pool
staging/       by way of host memory, for KV in a device's memory; needs torch, and is imported by those who do
cuts/          blocks of the same model under another tensor-parallel size or block size: found, and gathered
load_or_compute.py  whether loading blocks from the pool is quicker than computing them
pool_timing.py  the same for a whole pool and an instance, measured: kvstore doctor --instance
refill.py      blocks that the pool has lost are put again by an instance that still holds them
clear_marks.py  marks of an operator's clear, after which nothing is put again that was saved before
wrappers/      backends around a backend, one concern each: headers, deadlines, writes in the background, tiers, metrics
stores/        where bytes live: a Mooncake cluster, a folder, this process's memory
config/        every dialect of configuration -> one PoolConfig
integrations/  other engines' contracts, met by this pool
why_miss/      why blocks were not there: two set-ups, or a prompt and the pool, beside each other
cli/           kvstore doctor, bench, stats, master, and an operator's: ls, pin, clear, warm, export, import, why-miss
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
