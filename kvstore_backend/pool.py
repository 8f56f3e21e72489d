"""The engine's view of the pool: block hashes in, block bytes out.

``open_store`` is the one place where a store is chosen, ``open_backend`` the one where it is wrapped.
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
from kvstore_backend.stores import mooncake
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.stores.mooncake import MooncakeStore
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

    Blocks are named by their chained hashes (``block_hash.extend_block_hashes``), in the order of the sequence, so
    a *leading* run of them is of use, and no other. Nothing a pool does raises: a block that cannot be vouched for
    counts as not there. Calls may come from several threads; ``close`` makes every later call a miss.

    **When a call returns, the memory that it was given is the caller's again.** A native call cannot be interrupted:
    one that is given up at its deadline may still read or write there. So ``load``, ``save``, ``get_blocks`` and
    ``put_blocks`` then wait until it has ended, and answer as they would have at the deadline.

    That wait has no limit, and can have none: whoever is given memory back puts other blocks there, and a late read
    would write into those. The process can end meanwhile (``threads.py``).

    The other way, to move all bytes through memory of the pool's own, costs every call for the sake of very few: 32
    reads of 1 MiB from a Mooncake client's own memory, on 2 cores, came at 6.4 GB/s directly and at 3.8 GB/s by way of
    a copy. Waiting costs nothing where no call is late, and else as long as the native client takes: 2 s where the
    master was stopped, 30 s where the process that holds the bytes was. So these are for threads that can wait; an
    engine that cannot has its blocks moved by ``transfers.Transfers``, which answers at the deadline and gives blocks
    back later. Look-ups touch no memory, and never wait beyond their deadline.
    """

    def __init__(self, backend: StorageBackend, namespace: Namespace, keeper: ManifestKeeper | None = None) -> None:
        """Take over ``backend``, a stack or a store alone, and the keeper of the namespace's manifest, if there is one.

        Closing this pool closes both.
        """
        self.namespace = namespace
        self._stack = backend
        self._keeper = keeper
        self._watch: ClearWatch | None = None
        self._on_move: Callable[[Namespace], None] = lambda _: None

    def __repr__(self) -> str:
        return f"BlockPool({self._stack!r}, namespace={self.namespace.digest})"

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks the pool has now. A ``load`` may still find fewer: blocks are evicted meanwhile."""
        if not self._stack.is_ready:
            return 0  # which spares making the keys
        return count_leading(self._stack._exists(self._build_keys(hashes)))

    def exists(self, hashes: Sequence[bytes]) -> list[Status]:
        """Which blocks the pool has now, wherever in the sequence; ``lookup`` counts those of use to a whole prefix."""
        return self._stack._exists(self._build_keys(hashes))

    def exists_for_all(self, hashes: Sequence[bytes]) -> list[Status]:
        """``exists`` as another instance would be answered: without the copies that only this one has."""
        return self._stack._exists_for_all(self._build_keys(hashes))

    def load(self, hashes: Sequence[bytes], targets: Sequence[Value]) -> int:
        """Read block ``i`` into ``targets[i]``; how many leading blocks arrived whole.

        The contents of every target from the returned number on are unspecified.

        Raises:
            ValueError: numbers of hashes and targets differ, or a target is empty or has a negative size.
        """
        return count_leading(self.get_blocks(hashes, targets))

    def save(self, hashes: Sequence[bytes], sources: Sequence[Value]) -> list[Status]:
        """Store block ``i`` from ``sources[i]``, sending only those the pool says it lacks.

        Where the pool could not even say whether it has a block, nothing is sent and the answer is ``FAILED``: a put
        would wait for the same dead pool once more.

        Raises:
            ValueError: as ``load``.
        """
        return self._wait_out_late_calls(self._save_missing(hashes, sources))

    def get_blocks(self, hashes: Sequence[bytes], targets: Sequence[Value]) -> list[Status]:
        """Read block ``i`` into ``targets[i]``, wherever in the sequence; ``load`` counts those of use to a prefix.

        Raises:
            ValueError: as ``load``.
        """
        return self._wait_out_late_calls(self._get_statuses(hashes, targets))

    def put_blocks(self, hashes: Sequence[bytes], sources: Sequence[Value]) -> list[Status]:
        """Store block ``i`` from ``sources[i]`` without asking first which the pool lacks, as ``save`` does.

        Raises:
            ValueError: as ``load``.
        """
        keys = self._build_keys(hashes)
        check_values(keys, sources)
        return self._wait_out_late_calls(self._stack._put(keys, sources))

    def keep_blocks(self, hashes: Sequence[bytes], sources: Sequence[Value], seconds: float) -> list[Status]:
        """Store block ``i`` from ``sources[i]``, also where the pool has it, and have it kept from eviction so long.

        For as long as there is something else to evict; the time begins anew for blocks that are kept already.

        Raises:
            ValueError: as ``load``, or ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; it must not be negative")
        return self._wait_out_late_calls(self.keep_by_deadline(hashes, sources, seconds))

    def load_by_deadline(self, hashes: Sequence[bytes], targets: Sequence[Value]) -> int:
        """``load`` for ``transfers.py``, which keeps the targets from others until ``wait_for_late_calls``."""
        return count_leading(self._get_statuses(hashes, targets))

    def save_by_deadline(self, hashes: Sequence[bytes], sources: Sequence[Value]) -> list[Status]:
        """``save`` for ``transfers.py``, which keeps the sources as they are until ``wait_for_late_calls``."""
        return self._save_missing(hashes, sources)

    def keep_by_deadline(self, hashes: Sequence[bytes], sources: Sequence[Value], seconds: float) -> list[Status]:
        """``keep_blocks`` for ``transfers.py``, which keeps the sources as they are until ``wait_for_late_calls``."""
        keys = self._build_keys(hashes)
        check_values(keys, sources)
        return self._stack._keep(keys, sources, seconds)

    def remove_blocks(self, hashes: Sequence[bytes], *, force: bool = False) -> list[Status]:
        """Remove blocks; ``ABSENT`` where there was nothing to remove.

        With ``force`` also those that somebody may be reading now.
        """
        return self._stack._remove(self._build_keys(hashes), force=force)

    @property
    def stack(self) -> StorageBackend:
        """The store in its wrappers, for who has to do with the keys of other namespaces."""
        return self._stack

    @property
    def manifest(self) -> Manifest:
        """The namespace in words, with the facts that were given to ``open_pool``."""
        return self._keeper.manifest if self._keeper is not None else Manifest(self.namespace.fields)

    @property
    def is_ready(self) -> bool:
        """Whether the pool is in use now; while it is not, every call is a miss that costs next to nothing."""
        return self._stack.is_ready

    def wait_for_late_calls(self, seconds: float) -> bool:
        """Wait until no call that was given up touches callers' memory; False if one still does after ``seconds``.

        For ``transfers.py``; after the calls that return memory there is nothing to wait for.
        """
        return self._stack.wait_for_late_calls(seconds)

    def flush_writes(self, seconds: float) -> bool:
        """Wait until others can read all blocks saved so far, or they were given up; False: ``seconds`` ran out."""
        return self._stack.flush_writes(seconds)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Announce memory that sources and targets will lie in; call it once per allocation, before using it.

        With ``headroom``, each value is preceded by ``HEADROOM_BYTES`` bytes of that memory that calls may overwrite;
        small blocks then move up to twice as fast (``StorageBackend.register``).
        """
        self._stack.register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        """Take back a ``register``, before that memory is freed."""
        self._stack.unregister(address, nbytes)

    def health(self) -> Health:
        """Whether the pool works now, and one sentence on it."""
        return self._stack.health()

    def stats(self) -> StoreStats:
        """The store's own figures."""
        return self._stack.stats()

    def clear(self) -> Status:
        """Remove every block of this namespace, for all who share it; ``FAILED`` where that cannot be said."""
        return self._stack.clear(self.namespace.prefix)

    def move_to(self, namespace: Namespace) -> None:
        """Use another namespace from the next call on, as where the weights have changed; its manifest follows."""
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

    def _get_statuses(self, hashes: Sequence[bytes], targets: Sequence[Value]) -> list[Status]:
        keys = self._build_keys(hashes)
        check_values(keys, targets)
        return self._stack._get(keys, targets)

    def _save_missing(self, hashes: Sequence[bytes], sources: Sequence[Value]) -> list[Status]:
        keys = self._build_keys(hashes)
        check_values(keys, sources)
        statuses = self._stack._exists_for_all(keys)
        missing = [i for i, status in enumerate(statuses) if status is Status.ABSENT]
        stored = self._stack._put([keys[i] for i in missing], [sources[i] for i in missing])
        for i, status in zip(missing, stored, strict=True):
            statuses[i] = status
        if keys and logger.isEnabledFor(logging.DEBUG):
            present = statuses.count(Status.OK) - stored.count(Status.OK)
            counts = (len(keys), hashes[0].hex()[:12], present, len(missing), stored.count(Status.OK))
            logger.debug("save of %d blocks from %s: %d were there, %d sent, %d stored", *counts)
        return statuses

    def _wait_out_late_calls(self, statuses: list[Status]) -> list[Status]:
        """The statuses, once no call is left that may touch the memory they are about."""
        while Status.FAILED in statuses and not self._stack.wait_for_late_calls(_WARN_AFTER_SECONDS):
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
    """Open the configured store for one namespace, in its wrappers.

    Args:
        facts: help a person who asks why two namespaces differ; they go into the namespace's manifest, which is
            kept in the pool. None: there is no manifest, as for a namespace that is gone soon.

    Other arguments and errors are ``open_backend``'s.
    """
    namespace = name_tenant(config, namespace)
    keeper = None if facts is None else ManifestKeeper(Manifest(namespace.fields, dict(facts)))
    on_open = None if keeper is None else keeper.attach_store
    stack = open_backend(config, registry, background=background, on_open=on_open, is_summed=is_summed)
    if keeper is not None:
        keeper.watch_readiness(lambda: stack.is_ready)
    pool = BlockPool(stack, namespace, keeper)
    if registry is not None:
        info = Info("kvstore_pool", "Whose blocks the pool is asked for", registry=registry)

        def tell_namespace(now: Namespace) -> None:
            info.info({"backend": config.backend, "tenant": now.tenant, "namespace": now.digest})

        tell_namespace(namespace)
        pool._on_move = tell_namespace
    if config.fast is not None or config.async_write:
        pool.watch_clears()
    return pool


def name_tenant(config: PoolConfig, namespace: Namespace) -> Namespace:
    """``namespace`` with the tenant that ``config`` names; where that names none, as it is."""
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
    """Open the configured store: guarded, checked, and in the other wrappers that the configuration asks for.

    Args:
        config: which store.
        registry: where the pool's metrics are registered; none: there are none. One registry takes one pool.
        background: return at once and open the store on another thread, trying until it can be opened; the pool is
            not ready and everything a miss until then. Else open it now.
        on_open: called with the bare store each time that it has been opened.
        is_summed: whether blocks have checksums; without where this process cannot read the memory that values will lie
            in, as a GPU's.

    Raises:
        PoolUnavailable: the library or a part of it is missing, which waiting would not change; with ``background``
            false any other reason why the store cannot be opened: master unreachable, folder not writable. That a fast
            tier cannot be opened is said at once, too.
    """
    if isinstance(config.store, MooncakeSettings):
        mooncake.require_library(config.store)
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
    """Open the configured store, bare.

    Raises:
        PoolUnavailable: it cannot be opened, in one sentence.
    """
    match config.store:
        case MooncakeSettings():
            return MooncakeStore(config.store)
        case FileSettings():
            return FileStore(config.store.path, config.store.size)
        case MemorySettings():
            return MemoryStore(config.store.size)


def default_backend() -> str:
    """``mooncake`` where its library can be loaded, else ``file``, which needs nothing."""
    return "mooncake" if mooncake.is_installed() else "file"


def _guard_store(opened: StorageBackend) -> GuardedBackend:
    with contextlib.ExitStack() as undo:
        undo.callback(opened.close)
        guarded = GuardedBackend(lambda: opened)
        undo.pop_all()
    guarded.wait_ready(None)
    return guarded


def count_leading(statuses: Sequence[Status]) -> int:
    """How many of the first statuses are ``OK`` without a gap."""
    if statuses.count(Status.OK) == len(statuses):
        return len(statuses)  # the usual answer, found in a tenth of the time
    return next(i for i, status in enumerate(statuses) if status is not Status.OK)
