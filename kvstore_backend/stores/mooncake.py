"""Store in a Mooncake cluster: ``mooncake.store.MooncakeDistributedStore`` with reliable answers.

The native client returns one number (code) for each key, or fewer codes than keys if a call is invalid. This module
converts each code to a ``Status``; only a code that is known to mean success becomes ``OK``. In this package only this
module, ``mooncake_joining.py`` and ``kvstore doctor`` import mooncake.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore_backend.backend import (
    Health,
    PoolUnavailable,
    Status,
    StorageBackend,
    Value,
    split_by_size,
)
from kvstore_backend.config import MooncakeSettings
from kvstore_backend.stores.mooncake_joining import connect_to_master, join_cluster
from kvstore_backend.stores.ssd_folder import SsdFolder

__all__ = ["MooncakeStore"]

logger = logging.getLogger(__name__)

_NOT_FOUND, _UNREACHABLE = -704, -800
# Code of a read with an invalid argument. This package checks its arguments, so the target is smaller than the value.
_TOO_SMALL = -600
# The codes with a known meaning; every other code is a failure.
_STORED: dict[int | None, Status] = {0: Status.OK}
_EXISTS: dict[int | None, Status] = {1: Status.OK, 0: Status.ABSENT}
_REMOVED: dict[int | None, Status] = {0: Status.OK, _NOT_FOUND: Status.ABSENT}
# After a client crashes, the master assigns its memory to puts for 10 s more (--client_ttl). These puts fail: after 1 s
# with a metadata server, immediately without one.
_ORPHANED_SECONDS = 15.0
# If a put fails after a longer time than this, a client of the cluster hangs; the next put might hang as well.
_MAX_FAILING_SECONDS = 2.0
# If one client of two has crashed, each try uses its memory with probability 1/2, so all 31 tries fail once in 2^31
# puts. (With 11 tries, one batch of 12 blocks in 170 failed.) A try takes 0.3 ms, and up to 20 ms with 24 processes on
# two processors; callers of put wait for 1 s.
_MAX_RETRIES = 30
_RETRY_SECONDS = 0.5
# Mooncake waits 60 s for a transfer. Then it returns _UNREACHABLE, but the transfer continues, and may still use the
# memory of the call, for example when a process that was stopped continues.
_GIVEN_UP_SECONDS = 59.0
# Longer than a native call without a transfer (30 s, after a user raised MC_RPC_TIMEOUT_MS to Mooncake's default).
_MAX_CALL_SECONDS = 40.0
# Bytes that ``keep`` copies at a time, for values that consist of several spans.
_STAGING_BYTES = 16 << 20
_HEALTH_KEY = "kvstore-health"
# Seconds between two tries to reach the master.
_PAUSE_SECONDS = 1.0
# Native clients that must stay open. Python closes a client when its last reference is dropped.
_LEFT_OPEN: list[Any] = []


class MooncakeStore(StorageBackend):
    """Store in a Mooncake cluster: a client that also gives the cluster ``global_segment_size`` bytes of memory.

    ``remove`` returns ``FAILED`` while a client has a lease on the key (by default 10 s after each look-up or read).
    With ``force``, ``remove`` frees the memory even during a read, and the reader may then get other bytes.

    A call to the native client after it was closed crashes the process. So this class counts the running calls, and
    ``close`` waits for them. Closing the native client takes one to two seconds and holds Python's global lock (GIL).
    If no master answers, it would take about 15 s; so ``close`` then leaves the native client open until the process
    ends.

    Mooncake gives up a transfer after 60 s without ending it. Then this class closes the native client, which ends the
    transfer. The call and all later calls raise ``PoolUnavailable``: another ``MooncakeStore`` must be opened.

    ``put`` returns ``OK`` as soon as another client has *begun* to write the same key, as Mooncake does: the value may
    become readable only a moment later.

    A put writes to the memory of any client. Puts prefer this client's own memory for some time after it joined, and
    after a transfer failed, because the master may still assign the memory of a crashed client. After a failed
    transfer, a value is put again immediately, up to ``_MAX_RETRIES`` times.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        """Join the Mooncake cluster that ``settings`` names.

        Raises:
            PoolUnavailable: the library cannot be loaded, no server answers at the master's or the metadata server's
                address (detected within two seconds), or the cluster refuses this client.
        """
        self._settings = settings
        self._calls = threading.Condition()
        self._running = 0
        self.raised_calls = 0
        """Number of native calls that raised an exception. The first one is logged as an error."""
        self._closed = False
        self._leaving = threading.RLock()  # held while the native client is closed
        self._has_left = False
        self._is_lost = False
        self._ssd = SsdFolder(settings.ssd_offload_path) if settings.enable_ssd_offload else None
        with contextlib.ExitStack() as undo:
            if self._ssd is not None:
                undo.callback(self._ssd.remove_mark)
            self._native = join_cluster(settings)
            undo.callback(self._native.close)
            self._own_memory = _prefer_memory_of(self._native) if settings.global_segment_size else None
            undo.pop_all()
        self._prefer_own_until = time.monotonic() + _ORPHANED_SECONDS

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"MooncakeStore({self._settings.master_server_addr}, {self._settings.protocol}{state})"

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        addresses, sizes = _addresses_and_sizes(values)
        begun = time.monotonic()
        codes = self._put_once(keys, addresses, sizes)
        if _UNREACHABLE in codes and time.monotonic() - begun < _MAX_FAILING_SECONDS:
            self._put_again(keys, addresses, sizes, codes)
        return [_STORED.get(code, Status.FAILED) for code in codes]

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        """Write the values again in the same place, because Mooncake changes the end of a pin only in a write.

        During the write, other clients do not find the values.
        """
        pin = _pin_for(seconds)
        statuses: list[Status] = []
        for part in split_by_size([sum([nbytes for _, nbytes in value]) for value in values], _STAGING_BYTES):
            with self._stage_values(values[part]) as (addresses, sizes):
                codes = self._call_native(keys[part], self._native.batch_upsert_from, addresses, sizes, pin)
            statuses += [_STORED.get(code, Status.FAILED) for code in codes]
        return statuses

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        addresses, sizes = _addresses_and_sizes(targets)
        codes = self._call_native(keys, self._native.batch_get_into_multi_buffers, addresses, sizes)
        wanted = [sum(nbytes) for nbytes in sizes]
        statuses = [_status_of_read(code, nbytes) for code, nbytes in zip(codes, wanted, strict=True)]
        if _UNREACHABLE in codes:
            self._find_larger_targets(keys, wanted, codes, statuses)
        return statuses

    def exists(self, keys: Sequence[str]) -> list[Status]:
        codes = self._call_native(keys, self._native.batch_is_exist)
        if codes.count(codes[0] if codes else None) == len(codes):  # the usual case, and quick to detect
            return [_EXISTS.get(code, Status.FAILED) for code in codes[:1]] * len(codes)
        return list(map(_EXISTS.get, codes, repeat(Status.FAILED)))

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return [_REMOVED.get(code, Status.FAILED) for code in self._call_native(keys, self._native.batch_remove, force)]

    def clear(self, prefix: str) -> Status:
        return Status.OK if self.clear_and_count(prefix) is not None else Status.FAILED

    def clear_and_count(self, prefix: str) -> int | None:
        """Remove all keys that begin with ``prefix``; return the number of removed keys, or None if the call failed."""
        pattern = f"^{re.escape(prefix)}.*"
        removed = self._call_native([prefix], lambda _: [self._native.remove_by_regex(pattern, True)])[0]
        return removed if removed is not None and removed >= 0 else None

    def measure_values(self, keys: Sequence[str]) -> list[int | None]:
        """Return the size of each key's value in bytes; None for a key without a value.

        Like a read, this call grants a lease, so the values that it found are not evicted for some time.

        Raises:
            PoolUnavailable: the cluster does not answer.
        """
        sizes = self._call_native(keys, lambda asked: [self._native.get_size(key) for key in asked])
        for size in sizes:
            if size is None or (size <= 0 and size != _NOT_FOUND):
                address = self._settings.master_server_addr
                raise PoolUnavailable(
                    f"the Mooncake master at {address} returned {size}, not a valid size, for a block"
                )
        return [None if size == _NOT_FOUND else size for size in sizes]

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        with self._enter_call() as may_call:
            if may_call and (code := self._native.register_buffer(address, nbytes)):
                logger.warning(
                    "Mooncake cannot register %d bytes at %#x: code %d; with RDMA, check the limit of locked memory "
                    "(ulimit -l)",
                    *(nbytes, address, code),
                )

    def unregister(self, address: int, nbytes: int) -> None:
        with self._enter_call() as may_call:
            if may_call and (code := self._native.unregister_buffer(address)):
                logger.warning("Mooncake cannot unregister %d bytes at %#x: code %d", nbytes, address, code)

    def health(self) -> Health:
        """Report whether the master answers a look-up of a key.

        The native client's own health check cannot be used: it reports a healthy state after the master has died.
        """
        if self._closed:
            return Health(False, "closed")
        try:
            with connect_to_master(self._settings):
                pass
        except PoolUnavailable as exc:
            return Health(False, str(exc))
        code = self._call_native([_HEALTH_KEY], self._native.batch_is_exist)[0]
        ok = code in _EXISTS
        return Health(
            ok, f"the Mooncake master at {self._settings.master_server_addr} answers a look-up with the code {code}"
        )

    def close(self) -> None:
        health = self.health()
        with self._calls:
            if self._closed:
                return
            self._closed = True
            idle = self._calls.wait_for(lambda: self._running == 0, _MAX_CALL_SECONDS)
        if idle and health.ok:
            self._leave_cluster()
        else:
            _LEFT_OPEN.append(self._native)
            logger.warning(
                "The Mooncake client stays open until the process ends: %s",
                health.detail if idle else f"some of its calls still run after {_MAX_CALL_SECONDS:g} s",
            )

    def _leave_cluster(self) -> None:
        with self._leaving:
            if not self._has_left:
                self._has_left = True
                self._native.close()
                if self._ssd is not None:
                    self._ssd.leave()

    def _end_transfers(self) -> None:
        """Close the native client. This ends a transfer that it gave up, and that may still use its call's memory."""
        with self._calls:
            self._closed = self._is_lost = True
            self._calls.wait_for(lambda: self._running == 0)
        while not self._has_left:
            with self._leaving:
                if self._has_left or self._is_master_answering():
                    self._leave_cluster()
                    return
            time.sleep(_PAUSE_SECONDS)

    def _is_master_answering(self) -> bool:
        """Return whether the native client, which is not closed, reaches the master now.

        If the master does not answer, closing the native client would hold Python's lock for 15 s.
        """
        try:
            with connect_to_master(self._settings):
                return self._native.batch_is_exist([_HEALTH_KEY])[0] in _EXISTS
        except PoolUnavailable:
            return False

    def _put_once(self, keys: Sequence[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int | None]:
        # The native call with one buffer per value is not used: it fails if another writer has begun with the same key.
        put = self._native.batch_put_from_multi_buffers
        if self._own_memory is not None and time.monotonic() < self._prefer_own_until:
            return self._call_native(keys, put, addresses, sizes, self._own_memory)
        return self._call_native(keys, put, addresses, sizes)

    def _put_again(
        self, keys: Sequence[str], addresses: list[list[int]], sizes: list[list[int]], codes: list[int | None]
    ) -> None:
        """Put the values again that have the code ``_UNREACHABLE``, and write the new codes to ``codes``."""
        self._prefer_own_until = time.monotonic() + _ORPHANED_SECONDS
        give_up_at = time.monotonic() + _RETRY_SECONDS
        for _ in range(_MAX_RETRIES):
            lost = [i for i, code in enumerate(codes) if code == _UNREACHABLE]
            if not lost or time.monotonic() > give_up_at:
                return
            again = self._put_once([keys[i] for i in lost], [addresses[i] for i in lost], [sizes[i] for i in lost])
            for i, code in zip(lost, again, strict=True):
                codes[i] = code

    def _find_larger_targets(
        self, keys: Sequence[str], wanted: list[int], codes: list[int | None], statuses: list[Status]
    ) -> None:
        """Set ``statuses`` to ``ABSENT`` for values that are smaller than their targets, or were removed meanwhile.

        Mooncake returns ``_UNREACHABLE`` in two cases: the value is smaller than its target, or the owner of the value
        has crashed. The size shows which case it is, so this method queries one size after another. It stops at the
        first value that has the wanted size, or whose size cannot be queried: then an owner has crashed or the store
        fails, and the remaining values keep the status ``FAILED``.
        """
        for i in (i for i, code in enumerate(codes) if code == _UNREACHABLE):
            size = self._call_native([keys[i]], lambda asked: [self._native.get_size(asked[0])])[0]
            if size is None or size == wanted[i] or (size < 0 and size != _NOT_FOUND):
                return
            statuses[i] = Status.ABSENT

    @contextlib.contextmanager
    def _stage_values(self, values: Sequence[Value]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield address and size of each value. If a value has several spans, first copy all values to a buffer."""
        sizes = [sum([nbytes for _, nbytes in value]) for value in values]
        if all(len(value) == 1 for value in values):
            yield [value[0].address for value in values], sizes
            return
        staging: NDArray[np.uint8] = np.empty(sum(sizes), dtype=np.uint8)
        address: int = staging.ctypes.data
        addresses = [address + before for before in accumulate(sizes[:-1], initial=0)]
        for span in chain.from_iterable(values):
            ctypes.memmove(address, span.address, span.nbytes)
            address += span.nbytes
        self.register(staging.ctypes.data, staging.nbytes)
        try:
            yield addresses, sizes
        finally:
            self.unregister(staging.ctypes.data, staging.nbytes)

    @contextlib.contextmanager
    def _enter_call(self) -> Iterator[bool]:
        """Count a native call as running during the ``with`` block; yield False if the client is closed."""
        with self._calls:
            if may_call := not self._closed:
                self._running += 1
        try:
            yield may_call
        finally:
            if may_call:
                with self._calls:
                    self._running -= 1
                    self._calls.notify_all()

    def _call_native(self, keys: Sequence[str], call: Callable[..., list[int]], *arguments: object) -> list[int | None]:
        """Call the native client; return one code per key.

        A code is ``None`` if the client is closed, the call raised an exception or returned fewer codes than keys.

        Raises:
            PoolUnavailable: the client gave up a transfer of this or another call, and was closed.
        """
        begun, begun_at = time.monotonic(), time.time()
        codes: list[int | None] = []
        with self._enter_call() as may_call:
            if may_call and keys:
                try:
                    codes.extend(call(keys, *arguments))
                except Exception:
                    self.raised_calls += 1
                    level = logging.ERROR if self.raised_calls == 1 else logging.DEBUG
                    logger.log(
                        level,
                        "Mooncake's client raised an exception in a call with %d keys, which counts as failed",
                        len(keys),
                        exc_info=True,
                    )
        # Mooncake measures its 60 s with the wall clock, which may be set forward, as after a pause of the machine.
        seconds = max(time.monotonic() - begun, time.time() - begun_at)
        if _UNREACHABLE in codes and seconds > _GIVEN_UP_SECONDS:
            self._end_transfers()
        if self._is_lost:
            text = f"a transfer took more than {_GIVEN_UP_SECONDS:g} s, so the Mooncake client was closed to end it"
            raise PoolUnavailable(text)
        codes.extend([None] * (len(keys) - len(codes)))
        return codes


def _prefer_memory_of(native: Any) -> Any:
    """Return the configuration of puts that prefer this client's memory, and use others' memory when it is full."""
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.preferred_segment = native.get_hostname()
    return config


def _pin_for(seconds: float) -> Any:
    """Return the configuration of writes that pin values for ``seconds``, or remove the pins if ``seconds`` is 0."""
    from mooncake.store import ReplicateConfig, SoftPinAction

    config = ReplicateConfig()
    config.soft_pin_action = SoftPinAction.ENABLE if seconds else SoftPinAction.DISABLE
    if seconds:
        config.soft_pin_ttl_ms = max(1, round(1000 * seconds))
    return config


def _status_of_read(code: int | None, nbytes: int) -> Status:
    """Return the status of a read to a target of ``nbytes`` bytes; a value of another size counts as absent."""
    if code == nbytes:
        return Status.OK
    is_absent = code is not None and (code > 0 or code in (_NOT_FOUND, _TOO_SMALL))
    return Status.ABSENT if is_absent else Status.FAILED


def _addresses_and_sizes(values: Sequence[Value]) -> tuple[list[list[int]], list[list[int]]]:
    addresses = [[address for address, _ in value] for value in values]
    sizes = [[nbytes for _, nbytes in value] for value in values]
    return addresses, sizes
