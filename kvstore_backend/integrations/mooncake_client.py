"""A client with the calls and codes of ``mooncake.store.MooncakeDistributedStore``, over our ``BlockPool``.

Engines that use Mooncake's client get more from this one. A look-up without a known answer returns 0, *absent*, where
Mooncake returns -900, which is true; calls end by a deadline; bytes are checked; keys belong to a namespace.

The codes are Mooncake's: 0 for stored, removed or done; 1 and 0 for a look-up; the number of bytes for a read; -704 for
absent, -800 for any other failure. Keys are any text: the value of ``key`` here is the block with hash SHA-256(key) in
the namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry

from kvstore_backend.backend import Span, Status, Value
from kvstore_backend.config import PoolConfig, load_config, names_protocol
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool, open_pool
from kvstore_backend.wrappers.guarded import Deadlines, answered_by

__all__ = ["PooledClient"]

logger = logging.getLogger(__name__)

_DONE, _NOT_FOUND, _FAILED = 0, -704, -800
_CODES = {Status.OK: _DONE, Status.ABSENT: _NOT_FOUND, Status.FAILED: _FAILED}
_SIZE = struct.Struct("<Q")
# Suffix of the key under which ``put`` stores a value's size, so that ``get`` can find it.
_SIZE_SUFFIX = "\0size"
# An engine stores a value when it starts, and stops if that fails. It fails if the pool is full of leased blocks, or
# assigns memory of a client that crashed. Both end after about 10 s.
_WARM_UP_SECONDS = 15.0
_PAUSE_SECONDS = 0.25
# The time for the bytes of a transfer, without the time for an answer.
_MOVING = Deadlines(transfer_seconds=0.0)


class PooledClient:
    """Replacement of the native client, with the calls that the storage classes of engines use.

    Subclasses return the namespace of the blocks from ``namespace``. Any call before ``setup``, and after ``close``,
    fails.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._warm_up_until = 0.0
        self._patience = 0.0  # seconds for which failed calls are repeated
        self._failing_since: float | None = None  # first failure since the last answer; None: no failure

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'not set up' if self._pool is None else repr(self._pool)})"

    def namespace(self) -> Namespace:
        """Return the namespace of the blocks that this process's keys name; ``setup`` calls this once.

        Raises:
            ConfigError: the namespace cannot be determined; the message is one sentence.
        """
        raise NotImplementedError

    def facts(self) -> dict[str, str]:
        """Return facts for the namespace's manifest; ``setup`` calls this once."""
        return {}

    def patience(self, config: PoolConfig) -> float:
        """Return how many seconds calls may wait for the pool, if the engine cannot continue without its blocks.

        For that time a call waits for an answer, and repeats what failed; a transfer also gets the time for its bytes,
        up to twice as long. The time counts from the first call that failed. After it, calls behave as for other
        engines until one is answered. A put succeeds when other instances can read the block. ``setup`` calls this
        once. With 0, a failure is a miss immediately.

        Raises:
            ConfigError: the engine cannot use such a pool; the message is one sentence.
        """
        return 0.0

    def _find_pool(self, keys: Sequence[str] = ()) -> BlockPool | None:
        """Return the pool for a call on these keys; None: the call fails."""
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
        """Join the pool that the arguments name.

        Other settings (asynchronous writes, a fast tier) come from the configuration.

        ``engine`` is a transfer engine that the native client would share; this client ignores it. A
        ``master_server_addr`` such as ``file:///dev/shm/kvpool?size=4GiB`` names a folder of this machine instead; then
        the other arguments are ignored.

        Returns:
            0; a failure raises, because a code would not show the reason.

        Raises:
            ConfigError: an argument is invalid, or the namespace cannot be determined.
            PoolUnavailable: no server answers there.
        """
        namespace = self.namespace()
        config = load_config(
            "mooncake",
            explicit={
                "local_hostname": local_hostname,
                "metadata_server": metadata_server,
                "global_segment_size": global_segment_size,
                "local_buffer_size": local_buffer_size,
                # The engine may have read the protocol from the environment or its file; read it there by our own rule.
                "protocol": None if names_protocol() else protocol,
                "rdma_devices": rdma_devices,
                "master_server_addr": master_server_addr,
                "enable_ssd_offload": enable_ssd_offload,
                "ssd_offload_path": ssd_offload_path,
                "tenant_id": tenant_id or None,
            },
        ).require_plain("this client for other engines")
        self._patience = self.patience(config)
        # Engines may collect their processes' metrics (PROMETHEUS_MULTIPROC_DIR); these metrics are then collected too.
        registry, facts = CollectorRegistry(), self.facts()
        self._pool = open_pool(config, namespace, registry, background=False, facts=facts)
        self._warm_up_until = time.monotonic() + _WARM_UP_SECONDS
        logger.info("Joined the pool of %s as %s", master_server_addr, namespace)
        return _DONE

    def close(self) -> int:
        """Leave the pool; a second call does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        return _DONE

    def health_check(self) -> int:
        """Return 0 if the pool is in use now, otherwise 1."""
        return int(self._pool is None or not self._pool.health().ok)

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory for later puts and reads of blocks."""
        if self._pool is None:
            return _FAILED
        self._pool.register(buffer_ptr, size)
        return _DONE

    def is_exist(self, key: str) -> int:
        """Return 1 if the pool has ``key`` and answered in time, otherwise 0."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return 1 for each key that the pool has, if it answered in time, otherwise 0.

        Engines take any other code for a hit.
        """
        pool = self._find_pool(keys)
        if pool is None:
            return [0] * len(keys)
        return [int(status is Status.OK) for status in self._insist(pool.exists, _hash_keys(keys))]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: object = None
    ) -> list[int]:
        """Store ``sizes[i]`` bytes at ``buffer_ptrs[i]``; the pool decides on replication, so ``config`` is ignored.

        When this returns, no call reads that memory any more, even if that takes longer than the deadline.

        Raises:
            ValueError: lengths differ, or a size is not positive.
        """
        return self._put_values(keys, _one_span_each(buffer_ptrs, sizes))

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: object = None,
    ) -> list[int]:
        """Store values as ``batch_put_from`` does, from several pieces of memory for each key."""
        return self._put_values(keys, _several_spans_each(all_buffer_ptrs, all_sizes))

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read exactly ``sizes[i]`` bytes to ``buffer_ptrs[i]``; return their number, or a negative code.

        When this returns, no call writes to that memory any more, even if that takes longer than the deadline.

        Raises:
            ValueError: lengths differ, or a size is not positive.
        """
        return self._get_values(keys, _one_span_each(buffer_ptrs, sizes))

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read values as ``batch_get_into`` does, to several pieces of memory for each key."""
        return self._get_values(keys, _several_spans_each(all_buffer_ptrs, all_sizes))

    def put_from(self, key: str, buffer_ptr: int, size: int, config: object = None) -> int:
        """Store one key as ``batch_put_from`` does."""
        return self.batch_put_from([key], [buffer_ptr], [size])[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read one key as ``batch_get_into`` does."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def put(self, key: str, value: bytes, config: object = None) -> int:
        """Store bytes that ``get`` returns without knowing their number; -800 for an empty value.

        The first value after ``setup``, an engine's warm-up, is tried again for some seconds.
        """
        if not value:
            return _FAILED
        pieces = {key: bytes(value), key + _SIZE_SUFFIX: _SIZE.pack(len(value))}
        buffers = [ctypes.create_string_buffer(piece, len(piece)) for piece in pieces.values()]
        spans = [Span(ctypes.addressof(buffer), len(buffer)) for buffer in buffers]
        with self._announce(spans):
            while (code := min(self._put_values(list(pieces), [[span] for span in spans]))) != _DONE:
                if self._pool is None or time.monotonic() > self._warm_up_until:
                    return code
                time.sleep(_PAUSE_SECONDS)
        self._warm_up_until = 0.0
        return code

    def get(self, key: str) -> bytes:
        """Return the bytes that ``put`` stored under ``key``; b"" if the value is absent or incomplete."""
        size = self._read_bytes(key + _SIZE_SUFFIX, _SIZE.size)
        return self._read_bytes(key, _SIZE.unpack(size)[0]) if size else b""

    def remove(self, key: str, force: bool = False) -> int:
        """Remove one key; -704 if it is absent."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Remove keys, and the sizes that ``put`` stored for them."""
        pool = self._find_pool(keys)
        if pool is None:
            return [_FAILED] * len(keys)
        hashes = _hash_keys([*keys, *(key + _SIZE_SUFFIX for key in keys)])
        return [_CODES[status] for status in pool.remove_blocks(hashes, force=force)[: len(keys)]]

    def remove_all(self, force: bool = False) -> int:
        """Remove everything in this namespace, in use or not; other namespaces do not change.

        Returns:
            0 (Mooncake returns the number of keys); negative if it failed.
        """
        pool = self._find_pool()
        return _FAILED if pool is None else _CODES[pool.clear()]

    def _put_values(self, keys: Sequence[str], values: Sequence[Value]) -> list[int]:
        pool = self._find_pool(keys)
        if pool is None:
            return [_FAILED] * len(keys)
        put = _put_visibly(pool) if self._patience else pool.put_blocks
        return [_CODES[status] for status in self._insist(put, _hash_keys(keys), values)]

    def _get_values(self, keys: Sequence[str], targets: Sequence[Value]) -> list[int]:
        pool = self._find_pool(keys)
        if pool is None:
            return [_FAILED] * len(keys)
        statuses = self._insist(pool.get_blocks, _hash_keys(keys), targets)
        return [
            sum(nbytes for _, nbytes in target) if status else _CODES[status]
            for status, target in zip(statuses, targets, strict=True)
        ]

    def _insist(
        self, ask: Callable[..., list[Status]], hashes: Sequence[bytes], *values: Sequence[Value]
    ) -> list[Status]:
        """Return the answers of ``ask``, which takes hashes and ``values``; repeat failed ones while patience lasts."""
        if not self._patience or not hashes:
            return ask(hashes, *values)
        columns, left = (hashes, *values), list(range(len(hashes)))
        statuses = [Status.FAILED] * len(hashes)
        begun, since = time.monotonic(), self._failing_since
        until = (begun if since is None else since) + self._patience
        for_bytes = min(sum(map(_MOVING.seconds_for, values)), 2 * self._patience)
        while True:
            is_over = time.monotonic() >= until
            with contextlib.nullcontext() if is_over else answered_by(until + for_bytes):
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
        with self._announce([span]):
            return buffer.raw if self._get_values([key], [[span]]) == [nbytes] else b""

    @contextlib.contextmanager
    def _announce(self, spans: Sequence[Span]) -> Iterator[None]:
        """Register our own memory while calls use it: RDMA reaches no other memory."""
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


def _put_visibly(pool: BlockPool) -> Callable[[Sequence[bytes], Sequence[Value]], list[Status]]:
    """Return a put that fails for blocks that are not readable yet.

    For example, another instance may still write them.
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
