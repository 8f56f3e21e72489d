"""Client of the pool with the calls and codes of Mooncake's client (``mooncake.store.MooncakeDistributedStore``).

This client is safer than Mooncake's client. A failed look-up returns 0, *absent*; Mooncake's client returns -900, which
counts as true. Calls end at a deadline, bytes are checked, and keys belong to a namespace.

The codes are those of Mooncake: 0 for stored, removed or done; 1 and 0 for a look-up; the number of bytes for a read;
-704 for absent, -800 for any other failure. A key is any text. Its value is stored as the block with the hash
SHA-256(key).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry

from kvstore_backend.backend import Span, Status, Value
from kvstore_backend.config import PoolConfig, load_config, names_protocol
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool, open_pool
from kvstore_backend.wrappers.guarded import Deadlines, end_calls_at

__all__ = ["PooledClient"]

logger = logging.getLogger(__name__)

_DONE, _NOT_FOUND, _FAILED = 0, -704, -800
_CODES = {Status.OK: _DONE, Status.ABSENT: _NOT_FOUND, Status.FAILED: _FAILED}
_SIZE = struct.Struct("<Q")
# Suffix of the key under which ``put`` stores a value's size, so that ``get`` can find it.
_SIZE_SUFFIX = "\0size"
# An engine stores a value when it starts, and stops if the put fails. The put fails if the pool is full of leased
# blocks, or assigns the memory of a client that crashed. Both causes end after about 10 s.
_WARM_UP_SECONDS = 15.0
_PAUSE_SECONDS = 0.25
# Deadlines that contain only the time for moving bytes.
_MOVING = Deadlines(transfer_seconds=0.0)


class PooledClient:
    """Client of the pool in place of Mooncake's client, with the calls that the storage classes of engines use.

    A subclass for an engine defines ``namespace``. All calls before ``setup`` and after ``close`` fail.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._warm_up_until = 0.0
        self._patience = 0.0  # seconds for which failed calls are repeated
        self._failing_since: float | None = None  # first failure since the last answer, or None
        self._longest_put = math.inf  # seconds after which the engine may use the memory of waiting puts for others
        self._no_puts_before = 0.0
        self._ends_reads_late = True  # whether a batch read returns only when no call writes to its memory any more
        self._has_late_read = False  # whether a call of an earlier batch read may still write to its memory

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'not set up' if self._pool is None else repr(self._pool)})"

    def namespace(self) -> Namespace:
        """Return the namespace of this process's blocks. ``setup`` calls this once.

        Raises:
            ConfigError: the namespace cannot be determined; the message is one sentence.
        """
        raise NotImplementedError

    def facts(self) -> dict[str, str]:
        """Return the settings of this process for the manifest, the pool's description of the namespace.

        ``kvstore why-miss`` compares the descriptions of two namespaces. ``setup`` calls this once.
        """
        return {}

    def patience(self, config: PoolConfig) -> float:
        """Return the seconds for which calls may wait for a pool that fails; with 0, a failure is a miss immediately.

        The value is more than 0 for an engine that cannot continue without the blocks of the pool. For this time, this
        client waits for the answer to a call, and repeats the call after a failure. A transfer gets additional time for
        its bytes, at most twice as long. The time begins with the first failed call; when it is over, a failure is a
        miss immediately, until a call succeeds. A put is successful only when other instances can read the block.
        ``setup`` calls this method once.

        Raises:
            ConfigError: the engine cannot use a pool with this configuration; the message is one sentence.
        """
        return 0.0

    def _find_pool(self, keys: Sequence[str] = ()) -> BlockPool | None:
        """Return the pool for a call with ``keys``, or None if the call must fail."""
        return self._pool

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "",
    ) -> int:
        """Open the pool with the settings in the arguments (``MooncakeSettings`` describes most of them).

        Other settings (writes in the background, a fast tier) come from the environment, or from the configuration file
        that the environment names. The argument ``engine`` is ignored. If ``master_server_addr`` is the URL of a
        folder, such as ``file:///dev/shm/kvpool?size=4GiB``, the pool is that folder, and the other arguments are
        ignored.

        Returns:
            0. A failure raises an exception, because a code would not show the reason.

        Raises:
            ConfigError: an argument is invalid, or the namespace cannot be determined.
            PoolUnavailable: the pool cannot be opened, for example because no server answers.
        """
        namespace = self.namespace()
        config = load_config(
            "mooncake",
            explicit={
                "local_hostname": local_hostname,
                "metadata_server": metadata_server,
                "global_segment_size": global_segment_size,
                "local_buffer_size": local_buffer_size,
                # If the environment or its file has a protocol, it is read there, because MOONCAKE_PROTOCOL overrides
                # the file. The engine's argument may be the one from the file.
                "protocol": None if names_protocol() else protocol,
                "rdma_devices": rdma_devices,
                "master_server_addr": master_server_addr,
                "enable_ssd_offload": enable_ssd_offload,
                "ssd_offload_path": ssd_offload_path,
                "tenant_id": tenant_id or None,
            },
        ).require_plain("this client for other engines")
        self._patience = self.patience(config)
        # If the engine collects the metrics of its processes (PROMETHEUS_MULTIPROC_DIR), it also collects these.
        registry, facts = CollectorRegistry(), self.facts()
        self._pool = open_pool(config, namespace, registry, background=False, facts=facts)
        # Engines drop a client without ``close``, because Mooncake's client then closes itself.
        weakref.finalize(self, self._pool.close).atexit = False
        self._warm_up_until = time.monotonic() + _WARM_UP_SECONDS
        logger.info("Joined the pool of the master %s with the namespace %s", master_server_addr, namespace)
        return _DONE

    def close(self) -> int:
        """Close the pool, and return 0. A second call does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        return _DONE

    def health_check(self) -> int:
        """Return 0 if calls reach the pool now, otherwise 1."""
        return int(self._pool is None or not self._pool.health().ok)

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory that later puts and reads use; return 0, or -800 before ``setup``."""
        if self._pool is None:
            return _FAILED
        self._pool.register(buffer_ptr, size)
        return _DONE

    def is_exist(self, key: str) -> int:
        """Return 1 if the pool has ``key``; 0 if not, or if the pool did not answer in time."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return 1 for each key that the pool has; 0 if not, or if the pool did not answer in time.

        Mooncake's codes for failures are never returned, because engines take them for a hit.
        """
        pool = self._find_pool(keys)
        if pool is None:
            return [0] * len(keys)
        return [int(status is Status.OK) for status in self._call_patiently(pool.exists, _hash_keys(keys))]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: object = None
    ) -> list[int]:
        """Store ``sizes[i]`` bytes from the address ``buffer_ptrs[i]`` under ``keys[i]``; return a code for each key.

        The argument ``config`` is ignored. The method returns when no call reads the memory any more, even if that
        takes longer than the deadline.

        Raises:
            ValueError: the arguments have different lengths, or a size is not positive.
        """
        return self._put_values(keys, _one_span_each(buffer_ptrs, sizes))

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: object = None,
    ) -> list[int]:
        """Store values like ``batch_put_from``, each from several pieces of memory.

        For key ``i``, ``all_buffer_ptrs[i]`` has the addresses of the pieces, and ``all_sizes[i]`` their sizes.
        """
        return self._put_values(keys, _several_spans_each(all_buffer_ptrs, all_sizes))

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read the value of ``keys[i]``, exactly ``sizes[i]`` bytes, to the address ``buffer_ptrs[i]``.

        The method returns when no call writes to the memory any more, even if that takes longer than the deadline. If a
        subclass has set ``_ends_reads_late`` to False, the method returns at the deadline.

        Returns:
            For each key the number of bytes, or a negative code.

        Raises:
            ValueError: the arguments have different lengths, or a size is not positive.
        """
        return self._get_values(keys, _one_span_each(buffer_ptrs, sizes), wait=self._ends_reads_late)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read values like ``batch_get_into``, each to several pieces of memory.

        ``prefer_alloc_in_same_node`` is ignored.
        """
        return self._get_values(keys, _several_spans_each(all_buffer_ptrs, all_sizes))

    def put_from(self, key: str, buffer_ptr: int, size: int, config: object = None) -> int:
        """Store the value of one key like ``batch_put_from``; return its code."""
        return self.batch_put_from([key], [buffer_ptr], [size])[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read the value of one key like ``batch_get_into``; return its number of bytes, or a negative code."""
        return self._get_values([key], _one_span_each([buffer_ptr], [size]))[0]

    def put(self, key: str, value: bytes, config: object = None) -> int:
        """Store ``value`` under ``key``, and its size under a second key, for ``get``; return 0, or a negative code.

        The first put after ``setup``, which an engine makes when it starts, is repeated for some seconds if it fails.
        """
        if not value:
            return _FAILED
        pieces = {key: bytes(value), key + _SIZE_SUFFIX: _SIZE.pack(len(value))}
        buffers = [ctypes.create_string_buffer(piece, len(piece)) for piece in pieces.values()]
        spans = [Span(ctypes.addressof(buffer), len(buffer)) for buffer in buffers]
        with self._register_temporarily(spans):
            while (code := min(self._put_values(list(pieces), [[span] for span in spans]))) != _DONE:
                if self._pool is None or time.monotonic() > self._warm_up_until:
                    return code
                time.sleep(_PAUSE_SECONDS)
        self._warm_up_until = 0.0
        return code

    def get(self, key: str) -> bytes:
        """Return the bytes that ``put`` stored under ``key``.

        The result is b"" if the pool fails, or lacks the bytes or the second key, which has their size.
        """
        size = self._read_bytes(key + _SIZE_SUFFIX, _SIZE.size)
        return self._read_bytes(key, _SIZE.unpack(size)[0]) if size else b""

    def remove(self, key: str, force: bool = False) -> int:
        """Remove one key; return 0, -704 if the key is absent, or -800 if the pool failed."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Remove keys, and the keys under which ``put`` stored their sizes; return a code for each of ``keys``."""
        pool = self._find_pool(keys)
        if pool is None:
            return [_FAILED] * len(keys)
        hashes = _hash_keys([*keys, *(key + _SIZE_SUFFIX for key in keys)])
        return [_CODES[status] for status in pool.remove_blocks(hashes, force=force)[: len(keys)]]

    def remove_all(self, force: bool = False) -> int:
        """Remove all values of this namespace, also those that a client may be reading now.

        Returns:
            0 (Mooncake's client returns the number of keys), or a negative code if the pool failed.
        """
        pool = self._find_pool()
        return _FAILED if pool is None else _CODES[pool.clear()]

    def _put_values(self, keys: Sequence[str], values: Sequence[Value]) -> list[int]:
        pool, begun = self._find_pool(keys), time.monotonic()
        if pool is None or begun < self._no_puts_before:
            return [_FAILED] * len(keys)
        put = _put_and_look_up(pool) if self._patience else pool.put_blocks
        statuses = self._call_patiently(put, _hash_keys(keys), values)
        seconds = time.monotonic() - begun
        if seconds > self._longest_put:
            # The engine makes the waiting puts now, one after another. Their number grows with the time.
            self._no_puts_before = begun + 1.1 * seconds
            logger.warning("A put took %.0f s; nothing is stored for %.0f s", seconds, 0.1 * seconds)
        return [_CODES[status] for status in statuses]

    def _get_values(self, keys: Sequence[str], targets: Sequence[Value], *, wait: bool = True) -> list[int]:
        pool = self._find_pool(keys)
        if pool is None:
            return [_FAILED] * len(keys)
        get = pool.get_blocks if wait else partial(self._get_if_none_is_late, pool)
        statuses = self._call_patiently(get, _hash_keys(keys), targets)
        return [
            sum(nbytes for _, nbytes in target) if status else _CODES[status]
            for status, target in zip(statuses, targets, strict=True)
        ]

    def _get_if_none_is_late(self, pool: BlockPool, hashes: Sequence[bytes], targets: Sequence[Value]) -> list[Status]:
        """Read blocks, and return at the deadline.

        Return ``FAILED`` for all blocks while a late call of an earlier read may still write to the memory.
        """
        if self._has_late_read and not pool.wait_for_late_calls(0):
            return [Status.FAILED] * len(hashes)
        num_late = pool.count_late_calls()
        statuses = pool.get_blocks(hashes, targets, wait=False)
        self._has_late_read = pool.count_late_calls() != num_late
        return statuses

    def _call_patiently(
        self, ask: Callable[..., list[Status]], hashes: Sequence[bytes], *values: Sequence[Value]
    ) -> list[Status]:
        """Call ``ask`` with ``hashes`` and ``values``; repeat it for failed blocks for up to ``patience`` seconds."""
        if not self._patience or not hashes:
            return ask(hashes, *values)
        columns, left = (hashes, *values), list(range(len(hashes)))
        statuses = [Status.FAILED] * len(hashes)
        begun, since = time.monotonic(), self._failing_since
        until = (begun if since is None else since) + self._patience
        for_bytes = min(sum(map(_MOVING.seconds_for, values)), 2 * self._patience)
        while True:
            is_over = time.monotonic() >= until
            with contextlib.nullcontext() if is_over else end_calls_at(until + for_bytes):
                answers = ask(*([column[i] for i in left] for column in columns))
            for i, status in zip(left, answers, strict=True):
                statuses[i] = status
            left = [i for i in left if statuses[i] is Status.FAILED]
            if not left:
                self._failing_since = None
                return statuses
            if self._failing_since is None:
                self._failing_since = begun
            if time.monotonic() + _PAUSE_SECONDS >= until:
                return statuses
            time.sleep(_PAUSE_SECONDS)

    def _read_bytes(self, key: str, nbytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        span = Span(ctypes.addressof(buffer), nbytes)
        with self._register_temporarily([span]):
            return buffer.raw if self._get_values([key], [[span]]) == [nbytes] else b""

    @contextlib.contextmanager
    def _register_temporarily(self, spans: Sequence[Span]) -> Iterator[None]:
        """Register ``spans``, memory of this object, for the ``with`` block: RDMA needs registered memory."""
        pool = self._pool
        if pool is None:
            yield
            return
        for span in spans:
            pool.register(*span)
        try:
            yield
        finally:
            for span in spans:
                pool.unregister(*span)


def _put_and_look_up(pool: BlockPool) -> Callable[[Sequence[bytes], Sequence[Value]], list[Status]]:
    """Return a function that puts blocks and then looks them up.

    It returns ``FAILED`` for a block that cannot be read yet, for example because another instance is still writing it.
    """

    def put(hashes: Sequence[bytes], values: Sequence[Value]) -> list[Status]:
        stored = pool.put_blocks(hashes, values)
        return [
            status if status is not Status.OK or seen is Status.OK else Status.FAILED
            for status, seen in zip(stored, pool.exists(hashes), strict=True)
        ]

    return put


def _hash_keys(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode(errors="surrogatepass")).digest() for key in keys]


def _one_span_each(addresses: Sequence[int], sizes: Sequence[int]) -> list[Value]:
    return [[Span(int(address), int(size))] for address, size in zip(addresses, sizes, strict=True)]


def _several_spans_each(addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> list[Value]:
    pairs = zip(addresses, sizes, strict=True)
    return [[Span(int(address), int(size)) for address, size in zip(*pair, strict=True)] for pair in pairs]
