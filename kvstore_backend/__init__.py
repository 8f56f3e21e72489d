"""Stores KV blocks in one shared pool, and reads them. Answers are reliable even if the pool fails.

>>> config = load_config("memory")
>>> namespace = Namespace("fingerprint", "float32", 64, 24, 2, 64, "layer,kv,head,token,dim")
>>> with open_pool(config, namespace) as pool:
...     pool.lookup([b"hash of the first block"])
0

An engine uses a ``BlockPool``. Its calls pass through several wrappers, each around the next one, to a store. The
files:

pool.py        BlockPool: looks up, loads and saves blocks by their hashes; open_pool opens the store with its wrappers
block_hash.py  computes block hashes from token ids
groups.py      KV cache groups of a model: finds the longest prefix at which all groups can resume
namespace.py   Namespace: everything that can change the bytes of blocks; only this module builds and parses keys
manifest.py    Manifest: a small JSON object in the pool with the fields of a namespace
manifest_keeper.py  writes the manifest on its own thread, and writes it again if the pool loses it
backend.py     StorageBackend, the interface of stores and wrappers; Status, its three answers; Span; the errors
threads.py     daemon threads, which do not delay the end of the process; changes of objects after a fork
transfers.py   Transfers: asynchronous loads and saves, for engines that do not wait for the pool
staging/       moves KV between a device's memory and the pool through host memory; needs torch
resharding/    reads blocks of the same model with another tensor-parallel size or block size
load_or_compute.py  decides for a request whether loading blocks is faster than computing them
pool_timing.py  measures whether loading is faster than computing, for kvstore doctor --instance
refill.py      saves blocks again that the pool has lost, from an instance that still has them
clear_marks.py  marks of an operator's clear, after which no instance saves older blocks again
wrappers/      backends around a backend: headers, deadlines, writes in the background, tiers, metrics
stores/        stores of bytes: a Mooncake cluster, a folder, this process's memory
config/        reads the configuration of a pool in every dialect, and returns a PoolConfig
integrations/  adapters that let other engines use the pool
why_miss.py    explains why blocks were not shared: compares two configurations, or two prompts
cli/           kvstore doctor, bench, stats, master, certify, and for operators: ls, pin, clear, why-miss
"""

from kvstore_backend.backend import (
    ConfigError,
    Health,
    KVStoreError,
    PoolUnavailable,
    Span,
    Status,
    StorageBackend,
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
    "Value",
    "default_backend",
    "extend_block_hashes",
    "fingerprint_model",
    "load_config",
    "open_pool",
    "read_config",
    "root_hash",
]
