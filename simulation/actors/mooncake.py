"""A model of Mooncake 0.3.13: a master, clients that give it memory, and native calls that block.

It stands in for the modules ``mooncake.store`` and ``mooncake.engine`` below the real ``stores/mooncake.py`` and
``engine/disaggregation/transfer.py``. Codes and times were measured with the real one. A call blocks the simulated
thread that makes it; its bytes move when it has waited, so that a call which was given up reads and writes its caller's
memory late, as the real one does.

What is left out: the lock of Python that ``close`` holds, several replicas, SSD, a master that separates tenants, a
metadata server.
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
    """Memory that a client gives, and where its objects lie."""

    client: _Client
    memory: bytearray
    used: dict[int, int] = field(default_factory=dict)  # offset -> size

    def allocate(self, nbytes: int) -> int | None:
        """The first gap that is large enough."""
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
    """One value: where it lies, and until when nobody may take it away."""

    segment: _Segment
    offset: int
    nbytes: int
    begun_at: float
    is_complete: bool = False
    lease_until: float = 0.0
    kept_until: float = 0.0
    used_at: float = 0.0
    is_spoilt: bool = False
    lost_at: float = math.inf  # nobody can read it from then on; the master notices that some seconds later


@dataclass
class Trouble:
    """What goes wrong with calls now; changed by faults.

    Attributes:
        stall_share: of the calls that wait ``stall_seconds`` more before their bytes move.
        flip_share: of the values whose bytes change on their way.
        raise_share: of the calls that raise.
        slowness: by how much all takes longer.
    """

    stall_share: float = 0.0
    stall_seconds: tuple[float, float] = (0.5, 8.0)
    flip_share: float = 0.0
    raise_share: float = 0.0
    slowness: float = 1.0


TROUBLES = {"stall": "stall_share", "flip": "flip_share", "raise": "raise_share", "slow": "slowness"}
"""The attribute of ``Trouble`` that a kind of fault changes."""


class Mooncake:
    """A cluster.

    Args:
        world: in whose time it runs.
        is_strict: bytes move only from and to registered memory, as over RDMA.
        rpc_seconds: how long a client waits for a master that hangs.
        lease_seconds: how long a key that was looked up or read stays.
    """

    def __init__(
        self, world: World, *, is_strict: bool = False, rpc_seconds: float = 2.0, lease_seconds: float = 10.0
    ) -> None:
        self.world = world
        self.is_strict = is_strict
        self.trouble = Trouble()
        self.clients: list[_Client] = []
        self.engines: dict[str, _Engine] = {}
        self.objects: dict[str, _Object] = {}
        self.removals: list[tuple[str, str]] = []
        """The process and the key of each removal, since an oracle has looked."""
        self._quota = 1.0
        self._segments: list[_Segment] = []
        self._rpc_seconds = rpc_seconds
        self._lease_seconds = lease_seconds
        self._state = "up"
        self._hung_at = 0.0
        self._random = world.stream("mooncake")
        self._ports = iter(range(20001, 30000))

    # What faults do.

    def kill_master(self) -> None:
        """End the master: it forgets everything."""
        self._state = "dead"
        self.objects.clear()
        self._segments.clear()

    def restart_master(self) -> None:
        """Start a master that knows of nothing; clients mount their memory again in a while."""
        if self._state != "dead":
            return
        self._state = "up"
        for client in self.clients:
            client.mount_at = self.world.now + self._random.uniform(2.0, 4.0)

    def hang_master(self) -> None:
        """Stop the master's process."""
        if self._state == "up":
            self._state, self._hung_at = "hung", self.world.now

    def wake_master(self) -> None:
        """Let the master go on; it takes clients that it has not heard of for long for dead."""
        if self._state != "hung":
            return
        self._state = "up"
        if self.world.now - self._hung_at > _OWNER_TTL_SECONDS:
            for client in self.clients:
                self._unmount(client)
                client.mount_at = self.world.now + self._random.uniform(0.5, 2.0)

    def evict_share(self, share: float) -> None:
        """Evict so many of the objects that nobody has a lease on, as a neighbour's traffic would."""
        self._settle()
        loose = sorted(key for key, each in self.objects.items() if self._is_loose(each))
        for key in self._random.sample(loose, int(share * len(loose))):
            self._drop(key)

    def spoil_share(self, share: float) -> None:
        """Let so many of the values have another size, or another value's bytes: other software wrote them."""
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
        """Let so many of the values be listed for ``seconds`` although nobody can read them."""
        self._settle()
        for key in self._random.sample(sorted(self.objects), int(share * len(self.objects))):
            self.objects[key].lost_at = self.world.now
            self.world.scheduler.call_later(seconds, partial(self._drop_if_same, key, self.objects[key]))

    def limit(self, share: float) -> None:
        """Refuse puts that need more than this share of the memory, as with an operator's quota."""
        self._quota = share

    def _drop_if_same(self, key: str, each: _Object) -> None:
        if self.objects.get(key) is each:
            self._drop(key)

    # What oracles ask.

    def list_whole(self) -> list[tuple[str, bytes]]:
        """Every value that can be read now, but for those whose bytes this model spoilt."""
        self._settle()
        whole = [(key, each) for key, each in self.objects.items() if each.is_complete and not each.is_spoilt]
        return [(key, bytes(each.segment.memory[each.offset : each.offset + each.nbytes])) for key, each in whole]

    @property
    def is_up(self) -> bool:
        """Whether the master answers."""
        return self._state == "up"

    # The master.

    def ask_master(self) -> int:
        """Wait for the master's answer to a call: 0, or the code where there is none."""
        deadline = self.world.now + self._rpc_seconds
        time.sleep(self._random.uniform(0.0001, 0.0006) * self.trouble.slowness)
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
        """Let the master do what it does by itself: mount, unmount, evict."""
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
        """Those used longest ago first; what is kept only where nothing else is left."""
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
        """Memory for a value; or the code where there is none, or none is needed."""
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
        """The bytes are there, or will never be."""
        if self.objects.get(key) is not each:
            return _NOT_FOUND
        if is_whole:
            each.is_complete = True
            each.used_at = self.world.now
            return _OK
        self._drop(key)
        return _UNREACHABLE

    def begin_get(self, key: str) -> _Object | int:
        """Where a value lies, and a lease on it."""
        each = self.objects.get(key)
        if each is None:
            return _NOT_FOUND
        if not each.is_complete:
            return _NOT_READY
        now = self.world.now
        each.lease_until, each.used_at = max(each.lease_until, now + self._lease_seconds), now
        return each

    def remove(self, key: str, *, force: bool, owner: str) -> int:
        """Remove a value for a process: 0, or why not."""
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
        """``socket.create_connection`` to the master."""
        time.sleep(self._random.uniform(0.0001, 0.0005))
        if self._state == "dead":
            raise ConnectionRefusedError(111, "Connection refused")
        return _Connection(self, timeout)

    def next_port(self) -> int:
        """A port that no other client or engine has."""
        return next(self._ports)

    # Bytes.

    def wait_for_bytes(self, nbytes: int) -> None:
        """As long as so many bytes take, and longer where there is trouble."""
        stalls = self._random.random() < self.trouble.stall_share
        seconds = self._random.uniform(0.0003, 0.001) + nbytes / _BYTES_PER_SECOND
        time.sleep(seconds * self.trouble.slowness)
        if stalls:
            time.sleep(self._random.uniform(*self.trouble.stall_seconds))

    def reach(self, owner: Process) -> bool:
        """Wait for another process's memory; whether it is there."""
        waited = 0.0
        while owner.is_alive and not owner.runs and waited < _HUNG_OWNER_SECONDS:
            time.sleep(0.25)
            waited += 0.25
        if not owner.runs:
            time.sleep(self._random.uniform(0.02, 1.0))
            return False
        return True

    def store(self, key: str, each: _Object, sent: bytes) -> None:
        """Let bytes arrive where a value is to lie: late ones hit what lies there since a master was restarted."""
        data = self.carry(sent)
        each.segment.memory[each.offset : each.offset + each.nbytes] = data
        each.is_spoilt = data != sent
        for other in self.objects.values() if self.objects.get(key) is not each else ():
            if other.segment.memory is each.segment.memory and abs(other.offset - each.offset) < max(
                other.nbytes, each.nbytes
            ):
                other.is_spoilt = True

    def late_seconds(self) -> float:
        """How long bytes are on their way that nobody waits for."""
        return self._random.uniform(0.0, 2.5)

    def raises(self) -> bool:
        """Whether a call raises."""
        return self._random.random() < self.trouble.raise_share

    def carry(self, data: bytes) -> bytes:
        """The bytes as they arrive."""
        if self._random.random() >= self.trouble.flip_share:
            return data
        at = self._random.randrange(len(data))
        self.world.trace.add("mooncake", f"byte {at} of {len(data)} flipped")
        return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]


class _Connection:
    """A connection to the master's port, which answers no HTTP."""

    def __init__(self, cluster: Mooncake, timeout: float) -> None:
        self._cluster = cluster
        self._timeout = timeout

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is left."""

    def getsockname(self) -> tuple[str, int]:
        """This machine's address."""
        return "10.0.0.1", 1

    def sendall(self, data: bytes) -> None:
        """Nobody reads it."""

    def recv(self, nbytes: int) -> bytes:
        """The master closes the connection, unless it hangs."""
        if not self._cluster.is_up:
            time.sleep(self._timeout)
            raise TimeoutError("timed out")
        return b""


class _Client:
    """``mooncake.store.MooncakeDistributedStore``."""

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
        """Whether it may mount its memory."""
        return self.is_set_up and not self.is_closed and self.owner.is_alive

    def setup(self, hostname: str, metadata: str, size: int, *_: object) -> int:
        """Join, and mount ``size`` bytes."""
        self._enter("setup")
        if code := self._cluster.ask_master():
            return code
        time.sleep(0.05)
        self.is_set_up, self.size, self.memory = True, size, bytearray(size)
        self.mount_at = self._cluster.world.now
        self._cluster.clients.append(self)
        return _OK

    def get_hostname(self) -> str:
        """The name of its memory."""
        return self.hostname

    def close(self) -> None:
        """Leave; keys in its memory are gone."""
        self._enter("close")
        time.sleep(1.2)
        self.is_closed = True
        self._cluster._unmount(self)

    def register_buffer(self, address: int, nbytes: int) -> int:
        """0; overlapping memory is refused."""
        self._enter("register_buffer")
        if any(address < start + size and start < address + nbytes for start, size in self.registered.items()):
            self._cluster.world.fail("registration", f"{self.hostname} registers memory that overlaps other memory")
            return _TOO_SMALL
        self.registered[address] = nbytes
        return _OK

    def unregister_buffer(self, address: int) -> int:
        """0; the address is one that was registered."""
        self._enter("unregister_buffer")
        if self.registered.pop(address, None) is None:
            self._cluster.world.fail("registration", f"{self.hostname} unregisters memory that is not registered")
            return _TOO_SMALL
        return _OK

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 or 0 each."""
        self._enter("batch_is_exist")
        if code := self._cluster.ask_master():
            return [code] * len(keys)
        return [int(isinstance(self._cluster.begin_get(key), _Object)) for key in keys]

    def get_size(self, key: str) -> int:
        """Bytes, or a negative code."""
        self._enter("get_size")
        if code := self._cluster.ask_master():
            return code
        found = self._cluster.begin_get(key)
        return found.nbytes if isinstance(found, _Object) else found

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """0 or a negative code each."""
        self._enter("batch_remove")
        if code := self._cluster.ask_master():
            return [code] * len(keys)
        return [self._cluster.remove(key, force=force, owner=self.owner.name) for key in keys]

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        """How many were removed, or a negative code; what is being written stays."""
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
        """0 or a negative code each."""
        self._enter("put")
        preferred = getattr(config, "preferred_segment", None)
        return self._write(
            keys, addresses, sizes, lambda key, nbytes: self._cluster.begin_put(key, nbytes, preferred), 0.0
        )

    def batch_upsert_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: Any = None
    ) -> list[int]:
        """As a put that writes over what is there."""
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
        """The size of each value, or a negative code."""
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
        """Whether all of this memory is registered, where that is needed."""
        if not self._cluster.is_strict:
            return True
        for address, nbytes in spans:
            if not any(
                start <= address and address + nbytes <= start + size for start, size in self.registered.items()
            ):
                self._cluster.world.fail("registration", f"{call} of memory that {self.hostname} was not told of")
                return False
        return True


class _Engine:
    """``mooncake.engine.TransferEngine``: writes into another process's registered memory."""

    def __init__(self, cluster: Mooncake) -> None:
        self._cluster = cluster
        self._owner = _running_process()
        self._registered: dict[int, int] = {}
        self._port = cluster.next_port()

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        """0."""
        self._cluster.engines[f"{host}:{self._port}"] = self
        return _OK

    def get_rpc_port(self) -> int:
        """The port by which others name it."""
        return self._port

    def register_memory(self, address: int, nbytes: int) -> int:
        """0."""
        self._registered[address] = nbytes
        return _OK

    def unregister_memory(self, address: int) -> int:
        """0."""
        return _OK if self._registered.pop(address, None) is not None else -1

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> int:
        """0 when all bytes are in the other process's memory; else -1, and some may be."""
        cluster, other = self._cluster, self._cluster.engines.get(session)
        for source, target, nbytes in zip(sources, targets, sizes, strict=True):
            cluster.wait_for_bytes(nbytes)
            if other is None or not cluster.reach(other._owner) or not other._holds(target, nbytes):
                return -1
            data = cluster.carry(ctypes.string_at(source, nbytes))
            if cluster.raises():
                # The connection broke; what was given to the network before arrives for a while.
                cluster.world.scheduler.call_later(cluster.late_seconds(), partial(other.land, target, data))
                return -1
            ctypes.memmove(target, data, nbytes)
        return _OK

    def land(self, address: int, data: bytes) -> None:
        """Take in bytes that were on their way."""
        if self._owner.runs and self._holds(address, len(data)):
            ctypes.memmove(address, data, len(data))

    def _holds(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + size for start, size in self._registered.items())


@contextlib.contextmanager
def in_place(cluster: Callable[[], Mooncake]) -> Iterator[None]:
    """Let ``mooncake.store``, ``mooncake.engine`` and connections to the master be those of a model."""
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
