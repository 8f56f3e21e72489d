"""A model of Mooncake 0.3.13: a master, clients that give it memory, and native calls that block.

It replaces the modules ``mooncake.store`` and ``mooncake.engine``. The real ``stores/mooncake.py`` and
``engine/disaggregation/transfer.py`` run on top of it. Codes and times were measured with the real Mooncake. A call
blocks the simulated thread that makes it. Its bytes move only at the end of its wait: a call that its caller gave up
thus reads and writes the caller's memory late, as with the real Mooncake.

Not modelled: the lock of Python (GIL) that the real ``close`` holds, several replicas, SSD, a master that separates
tenants, a metadata server.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvstore_backend.stores import mooncake_joining as real_store
from simulation.world import Process, World
from simulation.world.patches import this_process

__all__ = ["TROUBLES", "Mooncake", "Trouble", "in_place"]

_OK, _NOT_FOUND, _NOT_READY, _LEASED, _LEASE_OVER = 0, -704, -703, -706, -707
_TOO_SMALL, _UNREACHABLE, _NO_ROOM, _DEAD, _TIMED_OUT = -600, -800, -200, -900, -901
_OWNER_TTL_SECONDS = 10.0
_BEGUN_SECONDS = 30.0
_HUNG_OWNER_SECONDS = 30.0
_BYTES_PER_SECOND = 1.4e9
_WATERMARK, _EVICTED_SHARE = 0.9, 0.1
_ALIGNMENT = 64


@dataclass(eq=False)
class _Segment:
    """Memory that a client gives to the cluster, and the places of the objects in it."""

    client: _Client
    memory: bytearray
    used: dict[int, int] = field(default_factory=dict)  # offset -> size

    def allocate(self, nbytes: int) -> int | None:
        """Reserve the first gap that is large enough; return its offset, or None if there is no such gap."""
        start, size = 0, -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for offset in sorted(self.used):
            if offset - start >= size:
                break
            start = offset + self.used[offset]
        if start + size > len(self.memory):
            return None
        self.used[start] = size
        return start


@dataclass(eq=False)
class _Object:
    """One stored value: its place in memory, and the time until which it must not be removed."""

    segment: _Segment
    offset: int
    nbytes: int
    begun_at: float
    is_complete: bool = False
    lease_until: float = 0.0
    kept_until: float = 0.0
    used_at: float = 0.0
    is_spoilt: bool = False
    lost_at: float = math.inf  # from this time on, reads of the value fail; the master notices it some seconds later


@dataclass
class Trouble:
    """Rates of failing calls. Faults of the plan change the attributes.

    Attributes:
        stall_share: share of the calls that wait ``stall_seconds`` longer before their bytes move.
        flip_share: share of the transferred values in which one bit changes on the way.
        raise_share: share of the calls that raise.
        slowness: factor by which all calls take longer.
    """

    stall_share: float = 0.0
    stall_seconds: tuple[float, float] = (0.5, 8.0)
    flip_share: float = 0.0
    raise_share: float = 0.0
    slowness: float = 1.0


TROUBLES = {"stall": "stall_share", "flip": "flip_share", "raise": "raise_share", "slow": "slowness"}
"""For each kind of fault, the attribute of ``Trouble`` that it changes."""


class Mooncake:
    """A Mooncake cluster: its master, its clients and the stored values.

    Args:
        world: the simulated world, with the clock and the random numbers.
        is_strict: whether bytes can move only from and to registered memory, as over RDMA.
        rpc_seconds: how long a client waits for a master that hangs.
        lease_seconds: for how long a key that was looked up or read cannot be removed or evicted.
        slowness: factor by which all calls take longer than measured, also without trouble.
    """

    def __init__(
        self,
        world: World,
        *,
        is_strict: bool = False,
        rpc_seconds: float = 2.0,
        lease_seconds: float = 10.0,
        slowness: float = 1.0,
    ) -> None:
        self.world = world
        self.is_strict = is_strict
        self.trouble = Trouble()
        self.clients: list[_Client] = []
        self.engines: dict[str, _Engine] = {}
        self.objects: dict[str, _Object] = {}
        self.removals: list[tuple[str, str]] = []
        """The process and the key of each removal since the last check by an oracle."""
        self._quota = 1.0
        self._segments: list[_Segment] = []
        self._rpc_seconds = rpc_seconds
        self._lease_seconds = lease_seconds
        self._slowness = slowness
        self._state = "up"
        self._hung_at = 0.0
        self._random = world.stream("mooncake")
        self._ports = iter(range(20001, 30000))

    # Faults.

    def kill_master(self) -> None:
        """Kill the master: it loses all its data."""
        self._state = "dead"
        self.objects.clear()
        self._segments.clear()

    def restart_master(self) -> None:
        """Start a new master without data; clients mount their memory again 2 to 4 s later."""
        if self._state != "dead":
            return
        self._state = "up"
        for client in self.clients:
            client.mount_at = self.world.now + self._random.uniform(2.0, 4.0)

    def hang_master(self) -> None:
        """Suspend the master's process: calls to it get no answer."""
        if self._state == "up":
            self._state, self._hung_at = "hung", self.world.now

    def wake_master(self) -> None:
        """Resume the master's process. After a long suspension, it takes all clients for dead and unmounts them."""
        if self._state != "hung":
            return
        self._state = "up"
        if self.world.now - self._hung_at > _OWNER_TTL_SECONDS:
            for client in self.clients:
                self._unmount(client)
                client.mount_at = self.world.now + self._random.uniform(0.5, 2.0)

    def evict_share(self, share: float) -> None:
        """Evict this share of the objects without a lease, as the traffic of another user of the cluster would."""
        self._settle()
        loose = sorted(key for key, each in self.objects.items() if self._is_loose(each))
        for key in self._random.sample(loose, int(share * len(loose))):
            self._drop(key)

    def spoil_share(self, share: float) -> None:
        """Change this share of the values, as if other software wrote them: another size, or another value's bytes."""
        self._settle()
        whole = sorted(key for key, each in self.objects.items() if each.is_complete)
        for key in self._random.sample(whole, int(share * len(whole))):
            each, other = self.objects[key], self.objects[self._random.choice(whole)]
            each.is_spoilt = True
            if self._random.random() < 0.5:
                each.nbytes -= 16
            elif each.nbytes == other.nbytes:
                data = other.segment.memory[other.offset : other.offset + other.nbytes]
                each.segment.memory[each.offset : each.offset + each.nbytes] = data

    def lose_share(self, share: float, seconds: float) -> None:
        """Make this share of the values unreadable now, while the master still lists them for ``seconds``."""
        self._settle()
        for key in self._random.sample(sorted(self.objects), int(share * len(self.objects))):
            self.objects[key].lost_at = self.world.now
            self.world.scheduler.call_later(seconds, partial(self._drop_if_same, key, self.objects[key]))

    def limit(self, share: float) -> None:
        """Refuse puts that would use more than this share of the memory, as an operator's quota does."""
        self._quota = share

    def _drop_if_same(self, key: str, each: _Object) -> None:
        if self.objects.get(key) is each:
            self._drop(key)

    # Questions of the oracles.

    def list_whole(self) -> list[tuple[str, float, bytes]]:
        """Return the key, the start time of the put and the bytes of each complete value that no fault has changed."""
        self._settle()
        whole = [(key, each) for key, each in self.objects.items() if each.is_complete and not each.is_spoilt]
        return [
            (key, each.begun_at, bytes(each.segment.memory[each.offset : each.offset + each.nbytes]))
            for key, each in whole
        ]

    @property
    def is_up(self) -> bool:
        """Whether the master answers."""
        return self._state == "up"

    # The master.

    def ask_master(self) -> int:
        """Wait for the master's answer to a call; return 0, or an error code if the master does not answer."""
        deadline = self.world.now + self._rpc_seconds
        time.sleep(self._random.uniform(0.0001, 0.0006) * max(self._slowness, self.trouble.slowness))
        while self._state == "hung":
            if self.world.now >= deadline:
                return _TIMED_OUT
            time.sleep(0.05)
        if self._state == "dead":
            time.sleep(self._random.uniform(0.3, 4.5))
            return _DEAD
        self._settle()
        return _OK

    def _settle(self) -> None:
        """Do the master's periodic work: mount and unmount clients, drop unfinished puts, evict."""
        now = self.world.now
        if self._state != "up":
            return
        for client in self.clients:
            if client.died_at is None and not client.owner.is_alive:
                client.died_at = now
            if client.died_at is not None and now - client.died_at > _OWNER_TTL_SECONDS:
                self._unmount(client)
            elif client.mount_at is not None and now >= client.mount_at and client.is_usable:
                client.mount_at = None
                if client.size:
                    client.segment = _Segment(client, client.memory)
                    self._segments.append(client.segment)
        for key in [key for key, each in self.objects.items() if not each.is_complete]:
            if now - self.objects[key].begun_at > _BEGUN_SECONDS:
                self._drop(key)
        used, size = self._measure()
        if size and used > _WATERMARK * size:
            self._evict(_EVICTED_SHARE * size)

    def _measure(self) -> tuple[int, int]:
        return (
            sum(sum(segment.used.values()) for segment in self._segments),
            sum(len(segment.memory) for segment in self._segments),
        )

    def _evict(self, nbytes: float) -> None:
        """Evict at least ``nbytes`` if possible: least recently used values first, soft-pinned values last."""
        now = self.world.now
        loose = [(key, each) for key, each in self.objects.items() if self._is_loose(each)]
        for key, each in sorted(loose, key=lambda item: (item[1].kept_until > now, item[1].used_at)):
            if nbytes <= 0:
                return
            nbytes -= each.nbytes
            self._drop(key)

    def _is_loose(self, each: _Object) -> bool:
        return each.is_complete and each.lease_until <= self.world.now

    def _drop(self, key: str) -> None:
        each = self.objects.pop(key)
        each.segment.used.pop(each.offset, None)

    def _unmount(self, client: _Client) -> None:
        if (segment := client.segment) is None:
            return
        client.segment = None
        if segment in self._segments:
            self._segments.remove(segment)
        for key in [key for key, each in self.objects.items() if each.segment is segment]:
            self._drop(key)

    def begin_put(self, key: str, nbytes: int, preferred: str | None) -> _Object | int:
        """Return the place of a new value; 0 if the key exists already, or an error code if there is no space."""
        if key in self.objects:
            return _OK
        used, size = self._measure()
        if self._quota < 1.0 and used + nbytes > self._quota * size:
            return _NO_ROOM
        segments = list(self._segments)
        self._random.shuffle(segments)
        segments.sort(key=lambda segment: segment.client.hostname != preferred)
        for segment in segments:
            if (offset := segment.allocate(nbytes)) is not None:
                now = self.world.now
                self.objects[key] = made = _Object(segment, offset, nbytes, now, used_at=now)
                return made
        self._evict(_EVICTED_SHARE * self._measure()[1])
        return _NO_ROOM

    def end_put(self, key: str, each: _Object, *, is_whole: bool) -> int:
        """Complete a put if all its bytes were written, else drop it; return 0 or an error code."""
        if self.objects.get(key) is not each:
            return _NOT_FOUND
        if is_whole:
            each.is_complete = True
            each.used_at = self.world.now
            return _OK
        self._drop(key)
        return _UNREACHABLE

    def begin_get(self, key: str) -> _Object | int:
        """Return a value's place and extend the lease on it, or return an error code."""
        each = self.objects.get(key)
        if each is None:
            return _NOT_FOUND
        if not each.is_complete:
            return _NOT_READY
        now = self.world.now
        each.lease_until, each.used_at = max(each.lease_until, now + self._lease_seconds), now
        return each

    def remove(self, key: str, *, force: bool, owner: str) -> int:
        """Remove a value for the process ``owner``; return 0 or an error code."""
        each = self.objects.get(key)
        if each is None:
            return _NOT_FOUND
        if not each.is_complete:
            return _NOT_READY
        if not force and each.lease_until > self.world.now:
            return _LEASED
        self._drop(key)
        self.removals.append((owner, key))
        return _OK

    def connect(self, address: tuple[str, int], timeout: float) -> _Connection:
        """Connect to the master, as ``socket.create_connection`` does."""
        time.sleep(self._random.uniform(0.0001, 0.0005))
        if self._state == "dead":
            raise ConnectionRefusedError(111, "Connection refused")
        return _Connection(self, timeout)

    def next_port(self) -> int:
        """Return a port that no other client or engine has."""
        return next(self._ports)

    # Bytes.

    def wait_for_bytes(self, nbytes: int) -> None:
        """Wait for as long as the transfer of ``nbytes`` takes, with the delays of the current faults."""
        stalls = self._random.random() < self.trouble.stall_share
        seconds = self._random.uniform(0.0003, 0.001) + nbytes / _BYTES_PER_SECOND
        time.sleep(seconds * max(self._slowness, self.trouble.slowness))
        if stalls:
            time.sleep(self._random.uniform(*self.trouble.stall_seconds))

    def reach(self, owner: Process) -> bool:
        """Wait while another process is paused, up to 30 s; return whether its memory can be reached."""
        waited = 0.0
        while owner.is_alive and not owner.runs and waited < _HUNG_OWNER_SECONDS:
            time.sleep(0.25)
            waited += 0.25
        if not owner.runs:
            time.sleep(self._random.uniform(0.02, 1.0))
            return False
        return True

    def store(self, key: str, each: _Object, sent: bytes) -> None:
        """Write bytes to a value's place.

        If the value was dropped meanwhile, as when a master was restarted, the bytes damage other values that are
        stored there now.
        """
        data = self.carry(sent)
        each.segment.memory[each.offset : each.offset + each.nbytes] = data
        each.is_spoilt = data != sent
        for other in self.objects.values() if self.objects.get(key) is not each else ():
            if other.segment.memory is each.segment.memory and abs(other.offset - each.offset) < max(
                other.nbytes, each.nbytes
            ):
                other.is_spoilt = True

    def late_seconds(self) -> float:
        """Return after how many seconds the bytes of a broken transfer arrive."""
        return self._random.uniform(0.0, 2.5)

    def raises(self) -> bool:
        """Draw whether a call raises."""
        return self._random.random() < self.trouble.raise_share

    def carry(self, data: bytes) -> bytes:
        """Return the bytes as they arrive; one bit may be flipped."""
        if self._random.random() >= self.trouble.flip_share:
            return data
        at = self._random.randrange(len(data))
        self.world.trace.add("mooncake", f"byte {at} of {len(data)} flipped")
        return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]


class _Connection:
    """A connection to the master's port. The master does not speak HTTP."""

    def __init__(self, cluster: Mooncake, timeout: float) -> None:
        self._cluster = cluster
        self._timeout = timeout

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing."""

    def getsockname(self) -> tuple[str, int]:
        """Return a fixed address of this machine."""
        return "10.0.0.1", 1

    def sendall(self, data: bytes) -> None:
        """Ignore the data."""

    def recv(self, nbytes: int) -> bytes:
        """Return no data, as after a close by the master; time out if the master hangs or is dead."""
        if not self._cluster.is_up:
            time.sleep(self._timeout)
            raise TimeoutError("timed out")
        return b""


class _Client:
    """The model of ``mooncake.store.MooncakeDistributedStore``: a client of the cluster in one process."""

    def __init__(self, cluster: Mooncake) -> None:
        self._cluster = cluster
        self.owner = _running_process()
        self.hostname = f"{self.owner.name}:{cluster.next_port()}"
        self.size = 0
        self.memory = bytearray()
        self.segment: _Segment | None = None
        self.mount_at: float | None = None
        self.died_at: float | None = None
        self.registered: dict[int, int] = {}
        self.is_set_up = self.is_closed = False

    @property
    def is_usable(self) -> bool:
        """Whether the client can mount its memory."""
        return self.is_set_up and not self.is_closed and self.owner.is_alive

    def setup(self, hostname: str, metadata: str, size: int, *_: object) -> int:
        """Join the cluster, and mount ``size`` bytes of memory."""
        self._enter("setup")
        if code := self._cluster.ask_master():
            return code
        time.sleep(0.05)
        self.is_set_up, self.size, self.memory = True, size, bytearray(size)
        self.mount_at = self._cluster.world.now
        self._cluster.clients.append(self)
        return _OK

    def get_hostname(self) -> str:
        """Return the name of the client's memory."""
        return self.hostname

    def close(self) -> None:
        """Leave the cluster; the values in the client's memory are lost."""
        self._enter("close")
        time.sleep(1.2)
        self.is_closed = True
        self._cluster._unmount(self)

    def register_buffer(self, address: int, nbytes: int) -> int:
        """Register memory and return 0; refuse memory that overlaps registered memory."""
        self._enter("register_buffer")
        if any(address < start + size and start < address + nbytes for start, size in self.registered.items()):
            self._cluster.world.fail("registration", f"{self.hostname} registers memory that overlaps other memory")
            return _TOO_SMALL
        self.registered[address] = nbytes
        return _OK

    def unregister_buffer(self, address: int) -> int:
        """Unregister memory and return 0; refuse an address that is not registered."""
        self._enter("unregister_buffer")
        if self.registered.pop(address, None) is None:
            self._cluster.world.fail("registration", f"{self.hostname} unregisters memory that is not registered")
            return _TOO_SMALL
        return _OK

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return for each key 1 if it exists, else 0; or an error code for all keys."""
        self._enter("batch_is_exist")
        if code := self._cluster.ask_master():
            return [code] * len(keys)
        return [int(isinstance(self._cluster.begin_get(key), _Object)) for key in keys]

    def get_size(self, key: str) -> int:
        """Return the size of a value in bytes, or a negative code."""
        self._enter("get_size")
        if code := self._cluster.ask_master():
            return code
        found = self._cluster.begin_get(key)
        return found.nbytes if isinstance(found, _Object) else found

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Remove keys; return for each 0 or a negative code."""
        self._enter("batch_remove")
        if code := self._cluster.ask_master():
            return [code] * len(keys)
        return [self._cluster.remove(key, force=force, owner=self.owner.name) for key in keys]

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        """Remove keys that match; return their number, or a negative code. Incomplete values stay."""
        self._enter("remove_by_regex")
        if code := self._cluster.ask_master():
            return code
        keys = [key for key in self._cluster.objects if re.match(pattern, key)]
        return sum(self._cluster.remove(key, force=force, owner=self.owner.name) == _OK for key in keys)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        config: Any = None,
    ) -> list[int]:
        """Write values under keys that do not exist yet; return for each key 0 or a negative code."""
        self._enter("put")
        preferred = getattr(config, "preferred_segment", None)
        return self._write(
            keys, addresses, sizes, lambda key, nbytes: self._cluster.begin_put(key, nbytes, preferred), 0.0
        )

    def batch_upsert_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: Any = None
    ) -> list[int]:
        """Write values, also over existing ones; return for each key 0 or a negative code."""
        self._enter("upsert")
        seconds = getattr(config, "soft_pin_ttl_ms", 0) / 1000 if getattr(config, "soft_pin_action", False) else 0.0

        def begin(key: str, nbytes: int) -> _Object | int:
            if (each := self._cluster.objects.get(key)) is not None:
                if not each.is_complete:
                    return _NOT_READY
                self._cluster._drop(key)
            return self._cluster.begin_put(key, nbytes, None)

        return self._write(keys, [[each] for each in addresses], [[each] for each in sizes], begin, seconds)

    def _write(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        begin: Callable[[str, int], _Object | int],
        keep_seconds: float,
    ) -> list[int]:
        cluster = self._cluster
        if code := cluster.ask_master():
            return [code] * len(keys)
        begun = [begin(key, sum(each)) for key, each in zip(keys, sizes, strict=True)]
        cluster.wait_for_bytes(sum(map(sum, sizes)))
        codes, are_written = [], []
        for key, each, parts in zip(keys, begun, zip(addresses, sizes, strict=True), strict=True):
            is_written = False
            if isinstance(each, _Object):
                spans = list(zip(*parts, strict=True))
                if cluster.reach(each.segment.client.owner) and self._may_touch("put", spans):
                    cluster.store(key, each, b"".join(ctypes.string_at(address, size) for address, size in spans))
                    is_written = True
                cluster.world.trace.add(self.owner.name, f"put {key[-8:]} {is_written}")
            are_written.append(is_written)
        lost = cluster.ask_master()
        for key, each, is_written in zip(keys, begun, are_written, strict=True):
            if isinstance(each, int):
                codes.append(each)
            elif lost:
                codes.append(lost)
            else:
                codes.append(cluster.end_put(key, each, is_whole=is_written))
                each.kept_until = cluster.world.now + keep_seconds if keep_seconds else 0.0
        return codes

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[int]:
        """Read values into memory; return for each key the value's size or a negative code."""
        self._enter("get")
        cluster = self._cluster
        if code := cluster.ask_master():
            return [code] * len(keys)
        found = [cluster.begin_get(key) for key in keys]
        return [
            self._read(key, each, list(zip(*parts, strict=True)))
            for key, each, parts in zip(keys, found, zip(addresses, sizes, strict=True), strict=True)
        ]

    def _read(self, key: str, each: _Object | int, spans: Sequence[tuple[int, int]]) -> int:
        cluster = self._cluster
        if isinstance(each, int):
            return each
        wanted = sum(size for _, size in spans)
        if wanted != each.nbytes:
            return _UNREACHABLE if wanted > each.nbytes else _TOO_SMALL
        cluster.wait_for_bytes(wanted)
        is_lost = each.lost_at <= cluster.world.now
        if is_lost or not cluster.reach(each.segment.client.owner) or not self._may_touch("get", spans):
            return _UNREACHABLE
        memory = each.segment.memory[each.offset : each.offset + each.nbytes]
        data = cluster.carry(bytes(memory))
        for address, size in spans:
            ctypes.memmove(address, data[:size], size)
            data = data[size:]
        cluster.world.trace.add(self.owner.name, f"get {key[-8:]}")
        return each.nbytes if cluster.world.now <= each.lease_until else _LEASE_OVER

    def _enter(self, call: str) -> None:
        if self.is_closed:
            self._cluster.world.fail("native", f"{call} of a client that was closed: the process would crash")
        if call not in ("close", "unregister_buffer") and self._cluster.raises():
            raise RuntimeError(f"{call} failed in the native client")

    def _may_touch(self, call: str, spans: Sequence[tuple[int, int]]) -> bool:
        """Return whether all of this memory is registered; always true if the cluster is not strict."""
        if not self._cluster.is_strict:
            return True
        for address, nbytes in spans:
            if not any(
                start <= address and address + nbytes <= start + size for start, size in self.registered.items()
            ):
                self._cluster.world.fail("registration", f"{call} of memory that is not registered at {self.hostname}")
                return False
        return True


class _Engine:
    """The model of ``mooncake.engine.TransferEngine``: writes into another process's registered memory."""

    def __init__(self, cluster: Mooncake) -> None:
        self._cluster = cluster
        self._owner = _running_process()
        self._registered: dict[int, int] = {}
        self._port = cluster.next_port()

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        """Let other engines write to this one under its host and port; return 0."""
        self._cluster.engines[f"{host}:{self._port}"] = self
        return _OK

    def get_rpc_port(self) -> int:
        """Return the port by which other engines name this one."""
        return self._port

    def register_memory(self, address: int, nbytes: int) -> int:
        """Register memory that others may write to; return 0."""
        self._registered[address] = nbytes
        return _OK

    def unregister_memory(self, address: int) -> int:
        """Unregister memory; return 0, or -1 if it is not registered."""
        return _OK if self._registered.pop(address, None) is not None else -1

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> int:
        """Write to the other process's memory; return 0 if all bytes are there, or -1 if some may be missing."""
        cluster, other = self._cluster, self._cluster.engines.get(session)
        for source, target, nbytes in zip(sources, targets, sizes, strict=True):
            cluster.wait_for_bytes(nbytes)
            if other is None or not cluster.reach(other._owner) or not other._holds(target, nbytes):
                return -1
            data = cluster.carry(ctypes.string_at(source, nbytes))
            if cluster.raises():
                # The connection broke; bytes that were already given to the network still arrive later.
                cluster.world.scheduler.call_later(cluster.late_seconds(), partial(other.land, target, data))
                return -1
            ctypes.memmove(target, data, nbytes)
        return _OK

    def land(self, address: int, data: bytes) -> None:
        """Write bytes that arrive late, if the memory is still registered."""
        if self._owner.runs and self._holds(address, len(data)):
            ctypes.memmove(address, data, len(data))

    def _holds(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + size for start, size in self._registered.items())


@contextlib.contextmanager
def in_place(cluster: Callable[[], Mooncake]) -> Iterator[None]:
    """Replace ``mooncake.store``, ``mooncake.engine`` and connections to the master by those of a model."""
    package, store, engine = (types.ModuleType(name) for name in ("mooncake", "mooncake.store", "mooncake.engine"))
    vars(store).update(
        MooncakeDistributedStore=lambda: _Client(cluster()),
        ReplicateConfig=types.SimpleNamespace,
        SoftPinAction=types.SimpleNamespace(ENABLE=True, DISABLE=False),
    )
    vars(engine)["TransferEngine"] = lambda: _Engine(cluster())
    vars(package).update(store=store, engine=engine)
    modules = {"mooncake": package, "mooncake.store": store, "mooncake.engine": engine}
    before = {name: sys.modules.get(name) for name in modules}
    real_socket = vars(real_store)["socket"]
    sys.modules.update(modules)
    vars(real_store)["socket"] = types.SimpleNamespace(
        create_connection=lambda address, timeout: cluster().connect(address, timeout), socket=None
    )
    try:
        yield
    finally:
        vars(real_store)["socket"] = real_socket
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _running_process() -> Process:
    process = this_process()
    assert process is not None, "native objects are made on threads of a process"
    return process
