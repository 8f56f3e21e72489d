"""Pool of KV blocks, as engines use it: ``BlockPool``; and the functions that open it.

Only ``open_store`` selects the store, and only ``open_backend`` adds wrappers to it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from prometheus_client import CollectorRegistry, Info

from kvstore_backend.backend import Health, Status, StorageBackend, Value, check_values
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
    """Looks up, loads and saves the KV blocks of one namespace in a pool.

    A block is identified by its hash (``block_hash.extend_block_hashes``). The hashes in a call have the order of the
    sequence, so only the *leading* blocks that the pool has are useful. A failure of the pool never raises an
    exception; a block that fails its check counts as absent. Several threads may call the methods. After ``close``
    every call is a miss.

    **When a call returns, the caller owns the memory again.** A native call cannot be interrupted: after its deadline,
    it may still read or write the memory (it is *late*). So ``get_blocks``, ``save`` and ``put_blocks`` wait until the
    late call has ended; its blocks still have the status ``FAILED``. The wait has no limit, because the caller uses the
    memory for other blocks after the call, and a late read would overwrite them. The process can end during the wait
    (``threads.py``).

    Calls could return at the deadline if all bytes were copied through the pool's own memory, but copies make every
    call slower: on 2 cores, 32 reads of 1 MiB from a Mooncake client's own memory reached 6.4 GB/s without a copy, and
    3.8 GB/s with a copy. Without late calls there is no wait. A late call ends after 2 s if the master was stopped, and
    after 60 s if the process with the bytes was stopped. So these methods are for threads that can wait. An engine that
    cannot wait uses ``transfers.Transfers``, which reports the result at the deadline and releases the blocks later.
    Look-ups use no memory of the caller, and never take longer than their deadline.
    """

    def __init__(self, backend: StorageBackend, namespace: Namespace, keeper: ManifestKeeper | None = None) -> None:
        """Use a backend for the blocks of a namespace.

        Args:
            backend: a store, with or without wrappers; ``close`` closes it.
            namespace: the namespace of the blocks.
            keeper: writer of the namespace's manifest; ``close`` closes it. None if no manifest is written.
        """
        self.namespace = namespace
        self._stack = backend
        self._keeper = keeper
        self._watch: ClearWatch | None = None
        self._on_move: Callable[[Namespace], None] = lambda _: None

    def __repr__(self) -> str:
        return f"BlockPool({self._stack!r}, namespace={self.namespace.digest})"

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of ``hashes`` the pool has now.

        A later ``get_blocks`` may find fewer blocks, because blocks can be evicted.
        """
        if not self._stack.is_ready:
            return 0  # without building the keys
        return count_leading(self._stack.exists(self._build_keys(hashes)))

    def exists(self, hashes: Sequence[bytes], *, for_all: bool = False) -> list[Status]:
        """Return for each block whether the pool has the block now. (``lookup`` counts only leading blocks.)

        With ``for_all``, return whether other instances can read the block, so that copies that only this instance has
        do not count.
        """
        exists = self._stack.exists_for_all if for_all else self._stack.exists
        return exists(self._build_keys(hashes))

    def get_blocks(self, hashes: Sequence[bytes], targets: Sequence[Value], *, wait: bool = True) -> list[Status]:
        """Read block ``i`` to ``targets[i]``. If its status is not ``OK``, the contents of the target are not defined.

        Args:
            hashes: hashes of the blocks.
            targets: memory for each block.
            wait: return only when no call can write to the targets any more. If False, return at the deadline: the
                caller must not use the targets before ``wait_for_late_calls`` has returned True (``transfers.py`` does
                this).

        Returns:
            A status for each block. Only the leading blocks with ``OK`` are useful (``count_leading``).

        Raises:
            ValueError: the numbers of hashes and targets differ, or a target is empty or has a negative size.
        """
        keys = self._build_keys(hashes)
        check_values(keys, targets)
        num_late = self.count_late_calls()
        return self._wait_out_late_calls(self._stack.get(keys, targets), num_late, wait=wait)

    def save(self, hashes: Sequence[bytes], sources: Sequence[Value], *, wait: bool = True) -> list[Status]:
        """Store block ``i`` from ``sources[i]``, if the pool does not have it already.

        The blocks are looked up first, and only the missing blocks are sent. If the look-up of a block fails, the block
        is not sent and has the status ``FAILED``, because its put would wait for the same unavailable pool.
        ``get_blocks`` describes ``wait``.

        Raises:
            ValueError: the numbers of hashes and sources differ, or a source is empty or has a negative size.
        """
        keys = self._build_keys(hashes)
        check_values(keys, sources)
        num_late = self.count_late_calls()
        statuses = self._stack.exists_for_all(keys)
        missing = [i for i, status in enumerate(statuses) if status is Status.ABSENT]
        stored = self._stack.put([keys[i] for i in missing], [sources[i] for i in missing])
        for i, status in zip(missing, stored, strict=True):
            statuses[i] = status
        if keys and logger.isEnabledFor(logging.DEBUG):
            present = statuses.count(Status.OK) - stored.count(Status.OK)
            counts = (len(keys), hashes[0].hex()[:12], present, len(missing), stored.count(Status.OK))
            logger.debug("save of %d blocks from hash %s on: the pool had %d, %d were sent, %d were stored", *counts)
        return self._wait_out_late_calls(statuses, num_late, wait=wait)

    def put_blocks(
        self,
        hashes: Sequence[bytes],
        sources: Sequence[Value],
        *,
        keep_seconds: float | None = None,
        wait: bool = True,
    ) -> list[Status]:
        """Store block ``i`` from ``sources[i]``. Unlike ``save``, this does not look the blocks up first.

        With ``keep_seconds``, also write blocks that the pool has already, and pin all blocks for this time. A pinned
        block is evicted only if the pool has no other block to evict. ``get_blocks`` describes ``wait``.

        Raises:
            ValueError: the numbers of hashes and sources differ, a source is empty or has a negative size, or
                ``keep_seconds`` is negative.
        """
        if keep_seconds is not None and keep_seconds < 0:
            raise ValueError(f"keep_seconds is {keep_seconds}; it must not be negative")
        keys = self._build_keys(hashes)
        check_values(keys, sources)
        num_late = self.count_late_calls()
        if keep_seconds is None:
            statuses = self._stack.put(keys, sources)
        else:
            statuses = self._stack.keep(keys, sources, keep_seconds)
        return self._wait_out_late_calls(statuses, num_late, wait=wait)

    def remove_blocks(self, hashes: Sequence[bytes], *, force: bool = False) -> list[Status]:
        """Remove blocks; the status is ``ABSENT`` for a block that the pool does not have.

        With ``force``, blocks that a client may be reading now are removed, too.
        """
        return self._stack.remove(self._build_keys(hashes), force=force)

    @property
    def stack(self) -> StorageBackend:
        """Backend of the pool with its wrappers, for callers that use keys of other namespaces."""
        return self._stack

    @property
    def manifest(self) -> Manifest:
        """Manifest of the namespace, with the ``facts`` that ``open_pool`` got."""
        return self._keeper.manifest if self._keeper is not None else Manifest(self.namespace.fields)

    @property
    def is_ready(self) -> bool:
        """Whether calls reach the pool now. While this is False, every call is a miss and returns immediately."""
        return self._stack.is_ready

    def wait_for_late_calls(self, seconds: float) -> bool:
        """Wait until no call that missed its deadline can use the callers' memory; return False after ``seconds``.

        Only callers of methods with ``wait=False`` need this, such as ``transfers.py``.
        """
        return self._stack.wait_for_late_calls(seconds)

    def count_late_calls(self) -> int:
        """Return how many calls have missed their deadline until now; see ``StorageBackend.count_late_calls``."""
        return self._stack.count_late_calls()

    def flush_writes(self, seconds: float) -> bool:
        """Wait until the writes of all saved blocks have ended; return False after ``seconds``.

        After the writes, other clients can read the blocks, except blocks that could not be written.
        """
        return self._stack.flush_writes(seconds)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Register memory that later sources and targets use. Call this once for each allocation, before its first use.

        With ``headroom``, each source and target has ``HEADROOM_BYTES`` free bytes before it, and calls may overwrite
        these bytes. Small blocks then move up to twice as fast (``StorageBackend.register``).
        """
        self._stack.register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo ``register`` for the same memory. The caller must do this before it frees the memory."""
        self._stack.unregister(address, nbytes)

    def health(self) -> Health:
        """Return whether the pool works now, and a sentence about its state for an operator."""
        return self._stack.health()

    def clear(self) -> Status:
        """Remove all blocks of this namespace, also for other instances; return ``FAILED`` if some may be left."""
        return self._stack.clear(self.namespace.prefix)

    def move_to(self, namespace: Namespace) -> None:
        """Use the blocks of another namespace from the next call on, for example after the weights have changed."""
        self.namespace = namespace
        self._on_move(namespace)
        if self._keeper is not None:
            self._keeper.manifest = replace(self._keeper.manifest, fields=namespace.fields)

    def watch_clears(self) -> None:
        """Start a thread that drops this process's own copies of blocks after an operator has cleared the pool."""
        self._watch = ClearWatch(self)

    def close(self) -> None:
        """Close the pool. A second call does nothing."""
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

    def _wait_out_late_calls(self, statuses: list[Status], num_late: int, *, wait: bool) -> list[Status]:
        """Return ``statuses``. With ``wait``, first wait until all calls that missed their deadlines have returned.

        Only a block with the status ``FAILED`` can have such a call, and only if more calls have missed their deadlines
        than before the call (``num_late``).
        """
        wait = wait and Status.FAILED in statuses and self.count_late_calls() != num_late
        while wait and not self._stack.wait_for_late_calls(_WARN_AFTER_SECONDS):
            logger.warning(
                "A call to the pool that missed its deadline still runs, so the memory of its blocks cannot be used yet"
            )
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
    """Open the configured store with its wrappers, for the blocks of one namespace.

    Args:
        config: configuration of the pool.
        namespace: the namespace; the configured tenant is added to it.
        registry: registry for the pool's metrics, as in ``open_backend``; None for no metrics.
        background: whether to open the store in the background, as in ``open_backend``.
        facts: facts for the manifest of the namespace, which is stored in the pool; they help an operator who compares
            two namespaces. If it is None, no manifest is stored, as for a namespace that is used only for a short time.
        is_summed: whether blocks have checksums, as in ``open_backend``.

    Raises:
        PoolUnavailable: the store cannot be opened, as in ``open_backend``.
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

        def set_info(now: Namespace) -> None:
            info.info({"backend": config.backend, "tenant": now.tenant, "namespace": now.digest})

        set_info(namespace)
        pool._on_move = set_info
    if config.fast is not None or config.async_write:
        pool.watch_clears()
    return pool


def name_tenant(config: PoolConfig, namespace: Namespace) -> Namespace:
    """Return ``namespace`` with the tenant in ``config``; unchanged if the tenant is the default one."""
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
    """Open the configured store with its wrappers: deadlines, checks, and others that the configuration adds.

    Args:
        config: configuration of the pool.
        registry: registry for the pool's metrics; it can have the metrics of one pool only. None for no metrics.
        background: if True, return immediately, and open the store on another thread, which tries again until the
            store is open; until then every call is a miss. If False, open the store before returning.
        on_open: called with the store, without wrappers, each time the store was opened.
        is_summed: whether blocks have checksums. It must be False if this process cannot read the memory of the values,
            such as the memory of a GPU.

    Raises:
        PoolUnavailable: Mooncake's library or a part of it is missing, or the fast tier cannot be opened. If
            ``background`` is False, also if the store cannot be opened for another reason: the master cannot be
            reached, the folder is not writable.
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
            tier = PoolConfig(config.fast)
            fast = _guard_store(lambda: CheckedBackend(open_store(tier), rejected))
            undo.callback(fast.close)
        guarded = GuardedBackend(open_with_checks) if background else _guard_store(open_with_checks)
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
    """Return ``mooncake`` if Mooncake's library can be loaded, otherwise ``file``."""
    return "mooncake" if is_installed() else "file"


def _guard_store(open_it: Callable[[], StorageBackend]) -> GuardedBackend:
    """Open a store; return a wrapper with deadlines, which opens another store if this one cannot be used any more."""
    with contextlib.ExitStack() as undo:
        opened = [open_it()]
        undo.callback(opened[0].close)
        guarded = GuardedBackend(lambda: opened.pop() if opened else open_it())
        undo.pop_all()
    guarded.wait_ready(None)
    return guarded


def count_leading(statuses: Sequence[Status]) -> int:
    """Return the number of statuses before the first one that is not ``OK``."""
    if statuses.count(Status.OK) == len(statuses):
        return len(statuses)  # the usual case, which this line finds ten times as fast
    return next(i for i, status in enumerate(statuses) if status is not Status.OK)
