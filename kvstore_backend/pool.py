"""The engine's view of the pool: block hashes in, block bytes out.

Only ``open_store`` chooses a store, and only ``open_backend`` adds wrappers to it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from prometheus_client import CollectorRegistry, Info

from kvstore_backend.backend import Health, Status, StorageBackend, StoreStats, Value, check_values
from kvstore_backend.clear_marks import ClearWatch
from kvstore_backend.config import DEFAULT_TENANT, FileSettings, MemorySettings, MooncakeSettings, PoolConfig
from kvstore_backend.manifest import Manifest
from kvstore_backend.manifest_keeper import ManifestKeeper
from kvstore_backend.namespace import Namespace
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.stores.mooncake import MooncakeStore
from kvstore_backend.stores.mooncake_joining import is_installed, require_library
from kvstore_backend.wrappers.checked import CheckedBackend
from kvstore_backend.wrappers.guarded import GuardedBackend
from kvstore_backend.wrappers.metered import MeteredBackend, StateCollector
from kvstore_backend.wrappers.tiered import TieredBackend
from kvstore_backend.wrappers.write_behind import WriteBehindBackend

__all__ = ["BlockPool", "count_leading", "default_backend", "name_tenant", "open_backend", "open_pool", "open_store"]

logger = logging.getLogger(__name__)

_WARN_AFTER_SECONDS = 30.0


class BlockPool:
    """Look up, load and save the KV blocks of one namespace in one backend.

    Blocks are named by their chained hashes (``block_hash.extend_block_hashes``), in the order of the sequence, so only
    a *leading* run of them is useful. A failure of the pool never raises: a block that cannot be verified counts
    as absent. Several threads may call it; after ``close`` every call is a miss.

    **When a call returns, the caller owns the memory again.** A native call cannot be interrupted: a call that is given
    up at its deadline may still read or write there. So ``get_blocks``, ``save`` and ``put_blocks`` then wait until
    it has ended, and return the answer from the deadline.

    That wait has no limit, and can have none: a caller puts other blocks in memory that it owns again, and a late read
    would overwrite them. The process can end meanwhile (``threads.py``).

    The alternative, to copy all bytes through the pool's own memory, would make every call slower for the sake of very
    few: on 2 cores, 32 reads of 1 MiB from a Mooncake client's own memory came at 6.4 GB/s directly and at 3.8 GB/s
    through a copy. Waiting costs nothing if no call is late. Otherwise it takes as long as the native client: 2 s if
    the master was stopped, 30 s if the process with the bytes was. So these calls are for threads that can wait. An
    engine that cannot wait uses ``transfers.Transfers``, which answers at the deadline and releases blocks later.
    Look-ups touch no memory, and never wait beyond their deadline.
    """

    def __init__(self, backend: StorageBackend, namespace: Namespace, keeper: ManifestKeeper | None = None) -> None:
        """Take over ``backend``, with or without wrappers, and the writer of the namespace's manifest, if there is one.

        ``close`` closes both.
        """
        self.namespace = namespace
        self._stack = backend
        self._keeper = keeper
        self._watch: ClearWatch | None = None
        self._on_move: Callable[[Namespace], None] = lambda _: None

    def __repr__(self) -> str:
        return f"BlockPool({self._stack!r}, namespace={self.namespace.digest})"

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks the pool has now.

        A later ``get_blocks`` may find fewer, because blocks can be evicted.
        """
        if not self._stack.is_ready:
            return 0  # avoids making the keys
        return count_leading(self._stack.exists(self._build_keys(hashes)))

    def exists(self, hashes: Sequence[bytes], *, for_all: bool = False) -> list[Status]:
        """Return which blocks the pool has now, at any place in the sequence; ``lookup`` counts only leading blocks.

        With ``for_all`` return what another instance would get: without the copies that only this instance has.
        """
        exists = self._stack.exists_for_all if for_all else self._stack.exists
        return exists(self._build_keys(hashes))

    def get_blocks(self, hashes: Sequence[bytes], targets: Sequence[Value], *, wait: bool = True) -> list[Status]:
        """Read block ``i`` into ``targets[i]``; ``count_leading`` of the answers is useful to a prefix.

        The contents of a target are unspecified unless its answer is ``OK``.

        Args:
            hashes: the blocks' names.
            targets: memory for each block.
            wait: return only when no late call can touch the targets. Without it the answer comes at the deadline, and
                the caller does not use the targets until ``wait_for_late_calls``, as ``transfers.py``.

        Raises:
            ValueError: numbers of hashes and targets differ, or a target is empty or has a negative size.
        """
        keys = self._build_keys(hashes)
        check_values(keys, targets)
        return self._wait_out_late_calls(self._stack.get(keys, targets), wait=wait)

    def save(self, hashes: Sequence[bytes], sources: Sequence[Value], *, wait: bool = True) -> list[Status]:
        """Store block ``i`` from ``sources[i]``; send only the blocks that the pool lacks.

        If the pool does not answer whether it has a block, nothing is sent and the answer is ``FAILED``: a put would
        wait for the same unavailable pool again.

        Raises:
            ValueError: as ``get_blocks``.
        """
        keys = self._build_keys(hashes)
        check_values(keys, sources)
        statuses = self._stack.exists_for_all(keys)
        missing = [i for i, status in enumerate(statuses) if status is Status.ABSENT]
        stored = self._stack.put([keys[i] for i in missing], [sources[i] for i in missing])
        for i, status in zip(missing, stored, strict=True):
            statuses[i] = status
        if keys and logger.isEnabledFor(logging.DEBUG):
            present = statuses.count(Status.OK) - stored.count(Status.OK)
            counts = (len(keys), hashes[0].hex()[:12], present, len(missing), stored.count(Status.OK))
            logger.debug("save of %d blocks from %s: %d were there, %d sent, %d stored", *counts)
        return self._wait_out_late_calls(statuses, wait=wait)

    def put_blocks(
        self,
        hashes: Sequence[bytes],
        sources: Sequence[Value],
        *,
        keep_seconds: float | None = None,
        wait: bool = True,
    ) -> list[Status]:
        """Store block ``i`` from ``sources[i]`` without the look-up of ``save`` for blocks that the pool lacks.

        With ``keep_seconds`` store blocks that the pool has, too, and protect all of them from eviction for that time
        from now: a protected block is evicted only if there is nothing else to evict.

        Raises:
            ValueError: as ``get_blocks``, or ``keep_seconds`` is negative.
        """
        if keep_seconds is not None and keep_seconds < 0:
            raise ValueError(f"keep_seconds is {keep_seconds}; it must not be negative")
        keys = self._build_keys(hashes)
        check_values(keys, sources)
        if keep_seconds is None:
            statuses = self._stack.put(keys, sources)
        else:
            statuses = self._stack.keep(keys, sources, keep_seconds)
        return self._wait_out_late_calls(statuses, wait=wait)

    def remove_blocks(self, hashes: Sequence[bytes], *, force: bool = False) -> list[Status]:
        """Remove blocks; ``ABSENT`` where there was nothing to remove.

        ``force`` also removes blocks that a client may be reading now.
        """
        return self._stack.remove(self._build_keys(hashes), force=force)

    @property
    def stack(self) -> StorageBackend:
        """Backend with its wrappers, for callers that need the keys of other namespaces."""
        return self._stack

    @property
    def manifest(self) -> Manifest:
        """Manifest of the namespace, with the facts that were given to ``open_pool``."""
        return self._keeper.manifest if self._keeper is not None else Manifest(self.namespace.fields)

    @property
    def is_ready(self) -> bool:
        """Whether the pool is in use now; while it is not, every call is a miss that costs almost nothing."""
        return self._stack.is_ready

    def wait_for_late_calls(self, seconds: float) -> bool:
        """Wait until no call that was given up touches callers' memory; return False after ``seconds``.

        This is for ``transfers.py``; the calls that wait themselves leave nothing to wait for.
        """
        return self._stack.wait_for_late_calls(seconds)

    def flush_writes(self, seconds: float) -> bool:
        """Wait until others can read all saved blocks, or they were given up; return False after ``seconds``."""
        return self._stack.flush_writes(seconds)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Register memory that later sources and targets will be in; call it once per allocation, before its first use.

        With ``headroom``, each value is preceded by ``HEADROOM_BYTES`` bytes of that memory that calls may overwrite;
        small blocks then move up to twice as fast (``StorageBackend.register``).
        """
        self._stack.register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo a ``register``, before that memory is freed."""
        self._stack.unregister(address, nbytes)

    def health(self) -> Health:
        """Return whether the pool works now, and one sentence of detail."""
        return self._stack.health()

    def stats(self) -> StoreStats:
        """Return the store's own measurements."""
        return self._stack.stats()

    def clear(self) -> Status:
        """Remove every block of this namespace, for all instances that share it; ``FAILED`` if some may be left."""
        return self._stack.clear(self.namespace.prefix)

    def move_to(self, namespace: Namespace) -> None:
        """Use another namespace from the next call on, for example after the weights changed.

        The manifest changes too.
        """
        self.namespace = namespace
        self._on_move(namespace)
        if self._keeper is not None:
            self._keeper.manifest = replace(self._keeper.manifest, fields=namespace.fields)

    def watch_clears(self) -> None:
        """Drop the copies that only this process has whenever an operator clears the pool, until ``close``."""
        self._watch = ClearWatch(self)

    def close(self) -> None:
        """Close the backend; a second call does nothing."""
        if self._watch is not None:
            self._watch.close()
        if self._keeper is not None:
            self._keeper.close()
        self._stack.close()

    def __enter__(self) -> BlockPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_out_late_calls(self, statuses: list[Status], *, wait: bool) -> list[Status]:
        """Return the statuses; with ``wait`` once no call is left that may touch their memory."""
        while wait and Status.FAILED in statuses and not self._stack.wait_for_late_calls(_WARN_AFTER_SECONDS):
            logger.warning("A call that was given up has not come back; its memory cannot be given back yet")
        return statuses

    def _build_keys(self, hashes: Sequence[bytes]) -> list[str]:
        prefix = self.namespace.prefix
        return [prefix + digits for digits in map(bytes.hex, hashes)]


def open_pool(
    config: PoolConfig,
    namespace: Namespace,
    registry: CollectorRegistry | None = None,
    *,
    background: bool = True,
    facts: Mapping[str, str] | None = None,
    is_summed: bool = True,
) -> BlockPool:
    """Open the configured store for one namespace, with its wrappers.

    Args:
        facts: help for an operator who asks why two namespaces differ; they are part of the namespace's manifest, which
            is stored in the pool. None: there is no manifest, as for a namespace with a short life.

    Other arguments and errors are those of ``open_backend``.
    """
    namespace = name_tenant(config, namespace)
    keeper = None if facts is None else ManifestKeeper(Manifest(namespace.fields, dict(facts)))
    on_open = None if keeper is None else keeper.attach_store
    stack = open_backend(config, registry, background=background, on_open=on_open, is_summed=is_summed)
    if keeper is not None:
        keeper.watch_readiness(lambda: stack.is_ready)
    pool = BlockPool(stack, namespace, keeper)
    if registry is not None:
        info = Info("kvstore_pool", "The namespace and tenant of the pool's blocks", registry=registry)

        def tell_namespace(now: Namespace) -> None:
            info.info({"backend": config.backend, "tenant": now.tenant, "namespace": now.digest})

        tell_namespace(namespace)
        pool._on_move = tell_namespace
    if config.fast is not None or config.async_write:
        pool.watch_clears()
    return pool


def name_tenant(config: PoolConfig, namespace: Namespace) -> Namespace:
    """Return ``namespace`` with the tenant of ``config``; unchanged if that names none."""
    tenant = config.store.tenant_id if isinstance(config.store, MooncakeSettings) else DEFAULT_TENANT
    return namespace if tenant == DEFAULT_TENANT else replace(namespace, tenant=tenant)


def open_backend(
    config: PoolConfig,
    registry: CollectorRegistry | None = None,
    *,
    background: bool = True,
    on_open: Callable[[StorageBackend], None] | None = None,
    is_summed: bool = True,
) -> StorageBackend:
    """Open the configured store: guarded, checked, and with the other wrappers of the configuration.

    Args:
        config: the configuration.
        registry: registry for the pool's metrics; None: there are none. One registry takes one pool.
        background: return immediately and open the store on another thread, which tries until it succeeds; until then
            the pool is not ready and everything is a miss. Otherwise open it now.
        on_open: called with the bare store each time that it has been opened.
        is_summed: whether blocks have checksums; False if this process cannot read the memory of values, such as a
            GPU's.

    Raises:
        PoolUnavailable: the library or a part of it is missing, which waiting would not change; without ``background``
            also any other reason why the store cannot be opened: master unreachable, folder not writable. A fast tier
            that cannot be opened always raises immediately.
    """
    if isinstance(config.store, MooncakeSettings):
        require_library(config.store)
    rejected: Counter[str] = Counter()

    def open_with_checks() -> StorageBackend:
        with contextlib.ExitStack() as undo:
            store = open_store(config)
            undo.callback(store.close)
            if on_open is not None:
                on_open(store)
            checked = CheckedBackend(store, rejected, is_summed=is_summed)
            undo.pop_all()
        return checked

    with contextlib.ExitStack() as undo:
        fast = None
        if config.fast is not None:
            fast = _guard_store(CheckedBackend(open_store(PoolConfig(config.fast)), rejected))
            undo.callback(fast.close)
        guarded = GuardedBackend(open_with_checks) if background else _guard_store(open_with_checks())
        undo.callback(guarded.close)
        whole: StorageBackend = guarded
        write_behind = None
        if fast is not None:
            whole = tiered = TieredBackend(fast, whole, "back" if config.async_write else "through")
            write_behind = tiered.write_behind
        elif config.async_write:
            whole = write_behind = WriteBehindBackend(whole)
        undo.callback(whole.close)
        if registry is not None:
            whole = MeteredBackend(whole, registry)
            registry.register(StateCollector(guarded, rejected, write_behind))
        undo.pop_all()
    return whole


def open_store(config: PoolConfig) -> StorageBackend:
    """Open the configured store without wrappers.

    Raises:
        PoolUnavailable: the store cannot be opened; the message is one sentence.
    """
    match config.store:
        case MooncakeSettings():
            return MooncakeStore(config.store)
        case FileSettings():
            return FileStore(config.store.path, config.store.size)
        case MemorySettings():
            return MemoryStore(config.store.size)


def default_backend() -> str:
    """Return ``mooncake`` if its library can be loaded, otherwise ``file``, which needs no library."""
    return "mooncake" if is_installed() else "file"


def _guard_store(opened: StorageBackend) -> GuardedBackend:
    with contextlib.ExitStack() as undo:
        undo.callback(opened.close)
        guarded = GuardedBackend(lambda: opened)
        undo.pop_all()
    guarded.wait_ready(None)
    return guarded


def count_leading(statuses: Sequence[Status]) -> int:
    """Return how many of the first statuses are ``OK`` without a gap."""
    if statuses.count(Status.OK) == len(statuses):
        return len(statuses)  # the usual answer, found in a tenth of the time
    return next(i for i, status in enumerate(statuses) if status is not Status.OK)
