"""Network: simulates TCP in memory: connections, listening ports, host names, and links with faults.

An ``Endpoint`` is one end of a connection in the kernel, a ``SimSocket`` is the socket object of a program, and a
``SimTransport`` (``transport.py``) is asyncio's transport. An end sends at most ``buffer_bytes`` that the program at
the other end has not read. If a program closes an end with unread data, the other end gets a reset, as in Linux.

A ``Link`` has the properties of all connections from one host to another; faults change them. A link that is down
loses all data. When it is up again, the lost data is sent again, in order.
"""

from __future__ import annotations

import errno
import functools
import random
import re
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.world.scheduler import SECOND, Scheduler
from simulation.world.transport import SimTransport

if TYPE_CHECKING:
    from simulation.world.loop import SimulatedLoop
    from simulation.world.process import Process
    from simulation.world.trace import Trace

__all__ = ["BUFFER_BYTES", "Endpoint", "Link", "Network", "SimServer", "SimSocket"]

BUFFER_BYTES = 256 * 1024
READ_BYTES = 256 * 1024
# Time after which a connection fails if sent data is not acknowledged (Linux: net.ipv4.tcp_retries2).
UNACKNOWLEDGED_SECONDS = 924.0
# Time after which an attempt to connect fails if there is no answer (Linux: net.ipv4.tcp_syn_retries).
CONNECT_SECONDS = 127.0
# Maximum time between the moment when a link is up again and the moment when lost data is sent again.
RETRANSMISSION_SECONDS = 3.0
FIRST_PORT = 32768
FIRST_DESCRIPTOR = 1 << 20
# Above the process ids of any system, so that code that reads /proc finds no process.
FIRST_PID = 1 << 23


@dataclass
class Link:
    """Properties of the network from one host to another.

    Attributes:
        latency, jitter: each piece of data takes ``latency`` seconds, plus a random time of at most ``jitter``.
        split: the probability that data that is sent at once arrives in several pieces.
        bytes_per_second: speed of each connection; 0: no limit.
        is_down: whether all data is lost, without an error.
        is_refusing: whether new connections are refused, as by a firewall. Existing connections continue.
        stalled: functions that ``Network.set_down`` calls at its next call for this link.
    """

    latency: float = 0.0002
    jitter: float = 0.0003
    split: float = 0.1
    bytes_per_second: float = 0.0
    is_down: bool = False
    is_refusing: bool = False
    stalled: list[Callable[[], None]] = field(default_factory=list)


_ADDRESSES = re.compile(rb'"addresses": \[[\d, ]*\]')


class Network:
    """All hosts, with their open sockets and the links between them."""

    def __init__(self, scheduler: Scheduler, trace: Trace) -> None:
        self.scheduler = scheduler
        self.trace = trace
        self.listeners: dict[tuple[str, int], SimServer] = {}
        self.endpoints: dict[int, Endpoint] = {}
        """The ends that a program has open, by their descriptors."""
        self.names: dict[str, list[str]] = {}
        """The addresses of names that are not names of hosts. A name with an empty list cannot be resolved."""
        self.buffer_bytes = BUFFER_BYTES
        """Maximum number of bytes that an end sends before the program at the other end has read them."""
        self.defaults: dict[str, Any] = {}
        """Properties of links that are used for the first time."""
        self._links: dict[tuple[str, str], Link] = {}
        self.dead_hosts: set[str] = set()
        self._stalled: dict[str, list[Callable[[], None]]] = {}
        self._num_pids, self._num_descriptors = FIRST_PID, FIRST_DESCRIPTOR
        self._ports: dict[str, int] = {}
        self._num_connections: dict[tuple[str, str], int] = {}

    def link(self, source: str, target: str) -> Link:
        """Return the link from one host to another."""
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = Link(**self.defaults)
        return link

    def links_of(self, host: str) -> list[Link]:
        """Return the links from and to a host that were used so far."""
        return [link for ends, link in self._links.items() if host in ends]

    def set_down(self, links: list[Link], is_down: bool) -> None:
        """Set whether ``links`` are down."""
        for link in links:
            link.is_down = is_down
            stalled, link.stalled = link.stalled, []
            for callback in stalled:
                callback()
        self._watch_lives()

    def stalled_for(self, host: str) -> list[Callable[[], None]]:
        """Return the list of functions to call when a dead host is up again."""
        return self._stalled.setdefault(host, [])

    def take_pid(self) -> int:
        """Return an unused process id."""
        self._num_pids += 1
        return self._num_pids

    def on_process_start(self, host: str) -> None:
        """Mark ``host`` as up, because a process was started there."""
        self.dead_hosts.discard(host)
        for callback in self._stalled.pop(host, []):
            callback()

    def on_process_end(self, process: Process, *, silently: bool) -> None:
        """Close all sockets of a process that has ended. ``silently``: its host has lost power, so it sends nothing."""
        if silently:
            self.dead_hosts.add(process.host)
        for address, server in list(self.listeners.items()):
            if server.process is process:
                del self.listeners[address]
        for endpoint in list(self.endpoints.values()):
            if endpoint.process is process:
                endpoint.close()
        self._watch_lives()

    def _watch_lives(self) -> None:
        for endpoint in list(self.endpoints.values()):
            if endpoint.is_cut_off:
                endpoint.watch_life()

    def on_loop_end(self, loop: SimulatedLoop) -> None:
        """Close all connections of an event loop that was closed."""
        for endpoint in list(self.endpoints.values()):
            if endpoint.loop is loop:
                endpoint.close()

    def is_dead(self, host: str) -> bool:
        """Return whether a host has lost power, so that it neither sends nor receives."""
        return host in self.dead_hosts

    def take_descriptor(self, endpoint: Endpoint) -> int:
        """Return an unused descriptor for an end that a program opens."""
        self._num_descriptors += 1
        self.endpoints[self._num_descriptors] = endpoint
        return self._num_descriptors

    def listen(self, loop: SimulatedLoop, factory: Callable[[], Any], port: int, sock: Any = None) -> SimServer:
        """Accept connections at a port of the process's host, or at ``sock``.

        Raises:
            OSError: the port is taken.
        """
        process = loop.process
        if sock is not None:
            server: SimServer = sock
            server.serve(loop, factory)
            return server
        server = self.open_listener(process, port)
        server.serve(loop, factory)
        return server

    def open_listener(self, process: Process, port: int) -> SimServer:
        """Return a listening socket. Connections to it wait until a program accepts them.

        Raises:
            OSError: the port is taken.
        """
        if not port:
            port = self._take_port(process.host)
        if (process.host, port) in self.listeners:
            raise OSError(errno.EADDRINUSE, f"Address already in use: {process.host}:{port}")
        server = SimServer(self, process, port)
        self.listeners[process.host, port] = server
        return server

    async def resolve(self, loop: SimulatedLoop, host: str, port: Any) -> list[Any]:
        """Return the addresses of a host name.

        Raises:
            socket.gaierror: the name has no address at present.
        """
        addresses = self.names.get(host, [host])
        if not addresses:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    async def connect(
        self, loop: SimulatedLoop, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[SimTransport, Any]:
        """Connect to ``host:port``, and return the transport and the protocol.

        Raises:
            OSError: the connection was refused, there was no answer, or the name cannot be resolved.
        """
        process = loop.process
        ((*_, (address, _port)),) = (await self.resolve(loop, host, port))[:1]
        opened = loop.create_future()

        def report(outcome: Exception | None) -> None:
            if not opened.done():
                opened.set_exception(outcome) if outcome is not None else opened.set_result(None)

        attempt = _Attempt(self, process, address, port, lambda outcome: loop.post(report, outcome))
        attempt.send_syn()
        try:
            await opened
        except BaseException:
            attempt.give_up()
            raise
        assert attempt.endpoint is not None
        return await self.adopt(loop, factory, SimSocket(attempt.endpoint))

    async def adopt(self, loop: SimulatedLoop, factory: Callable[[], Any], sock: SimSocket) -> tuple[SimTransport, Any]:
        """Create a transport and a protocol for a connected socket, and return both."""
        endpoint = sock.endpoint
        endpoint.process, endpoint.loop = loop.process, loop
        protocol = factory()
        transport = SimTransport(loop, sock, protocol)
        made = loop.create_future()
        loop.call_soon(transport.begin)
        loop.call_soon(lambda: None if made.done() else made.set_result(None))
        try:
            await made
        except BaseException:
            transport.close()
            raise
        return transport, protocol

    def socket_pair(self, one: Process, other: Process) -> tuple[SimSocket, SimSocket]:
        """Return two connected sockets, one for each process, like ``socket.socketpair``."""
        pair = Endpoint(self, one, f"pair of {one.name}", 0), Endpoint(self, other, f"pair of {other.name}", 0)
        _join(*pair, self, is_local=True)
        return SimSocket(pair[0]), SimSocket(pair[1])

    def direction(self, source: str, target: str) -> random.Random:
        """Return the random numbers for one direction of the next connection between two hosts."""
        number = self._num_connections[source, target] = self._num_connections.get((source, target), 0) + 1
        return self.scheduler.stream("link", source, target, str(number))

    def take_client_port(self, host: str) -> int:
        """Return an unused port for the client's end of a connection."""
        return self._take_port(host)

    def _take_port(self, host: str) -> int:
        port = self._ports[host] = self._ports.get(host, FIRST_PORT) + 1
        return port


class _Attempt:
    """An attempt to open a connection.

    Args:
        report: called with None when the connection is open, or with the error.
    """

    def __init__(
        self, network: Network, process: Process, host: str, port: int, report: Callable[[Exception | None], None]
    ) -> None:
        self._network = network
        self._process = process
        self._host, self._port = host, port
        self._report = report
        self._is_given_up = False
        self.endpoint: Endpoint | None = None
        self._link = network.link(process.host, host)
        self._draws = network.direction(process.host, host)
        late = OSError(errno.ETIMEDOUT, "Connection timed out")
        self._late = network.scheduler.call_later(CONNECT_SECONDS, lambda: self._report(late))

    def give_up(self) -> None:
        self._is_given_up = True
        self._late.cancel()
        if self.endpoint is not None:
            self.endpoint.close()

    def send_syn(self) -> None:
        if self._is_given_up:
            return
        if self._link.is_down:
            self._link.stalled.append(lambda: self._again())
            return
        delay = self._link.latency + self._draws.random() * self._link.jitter
        self._network.scheduler.call_later(delay, self._arrive)

    def _again(self) -> None:
        self._network.scheduler.call_later(self._draws.random() * RETRANSMISSION_SECONDS, self.send_syn)

    def _arrive(self) -> None:
        if self._is_given_up or self._network.is_dead(self._host):
            return
        server = self._network.listeners.get((self._host, self._port))
        delay = self._link.latency + self._draws.random() * self._link.jitter
        if server is None or self._link.is_refusing:
            refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            self._network.scheduler.call_later(delay, lambda: self._end(refused))
            return
        if not server.has_room:
            self._again()
            return
        network = self._network
        mine = Endpoint(network, self._process, self._process.host, network.take_client_port(self._process.host))
        theirs = Endpoint(network, server.process, self._host, self._port)
        _join(mine, theirs, network)
        self.endpoint = mine
        server.queue_connection(theirs)
        network.scheduler.call_later(delay, lambda: self._end(None))

    def _end(self, outcome: Exception | None) -> None:
        self._late.cancel()
        self._report(outcome)


class Endpoint:
    """One end of a connection in the kernel of its host."""

    peer: Endpoint
    link: Link

    def __init__(self, network: Network, process: Process, host: str, port: int) -> None:
        self.network = network
        self.process = process
        self.host, self.port = host, port
        self.loop: SimulatedLoop | None = None
        self.transport: SimTransport | None = None
        self.descriptor = network.take_descriptor(self)
        self.received = bytearray()
        self.has_eof = self.is_closed = self.is_write_closed = False
        self.error: OSError | None = None
        self.unread_there = 0
        """Number of bytes that were sent and that the program at the other end has not read."""
        self.sent_at = 0
        """Virtual time of the last send."""
        self.passed: deque[SimSocket] = deque()  # descriptors in a message over a socket pair
        self.reader: Callable[[], None] | None = None
        self.is_kept_alive = False
        self.keepalive_seconds = 7200.0
        self._draws: random.Random
        self._arrives_at = 0
        self._wire: deque[tuple[str, bytes]] = deque()
        self._is_stalled = False
        self._round = 0  # number of times that data was lost; scheduled arrivals of an earlier round do not happen
        self._given_up: Any = None

    def __repr__(self) -> str:
        return f"<{self.host}:{self.port} to {self.peer.host}:{self.peer.port}>"

    @property
    def room(self) -> int:
        """Number of bytes that can be sent now."""
        return max(0, self.network.buffer_bytes - self.unread_there)

    @property
    def unacknowledged(self) -> int:
        """Number of sent bytes that have not arrived in the kernel of the other end."""
        in_flight = sum(len(data) for kind, data in self._wire if kind == "data")
        return in_flight + max(0, self.unread_there - in_flight - self.network.buffer_bytes // 2)

    def send(self, data: bytes) -> None:
        """Send data; there must be ``room`` for it."""
        self.unread_there += len(data)
        self.sent_at = self.network.scheduler.now
        for piece in self._split(data):
            self._put("data", piece)

    def shut_down_writing(self) -> None:
        """Send the end of the stream after all data."""
        if not self.is_write_closed:
            self.is_write_closed = True
            self._put("eof", b"")

    def close(self) -> None:
        """Close this end, because the program has closed its descriptor or has ended."""
        if self.is_closed:
            return
        self.is_closed = True
        self.network.endpoints.pop(self.descriptor, None)
        if self.network.is_dead(self.host):
            pass  # a host without power sends nothing
        elif self.received:
            self._put("reset", b"")
        elif not self.is_write_closed and self.error is None:
            self.is_write_closed = True
            self._put("eof", b"")
        self.received.clear()
        self.transport = self.reader = None

    def reset(self) -> None:
        """End the connection with an error at both ends, as a firewall or another device on the way can do."""
        for end in (self, self.peer):
            end._on_error(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def read(self, size: int = READ_BYTES) -> bytes:
        """Return received data, at most ``size`` bytes, and remove it from the buffer."""
        data = bytes(self.received[:size])
        del self.received[:size]
        if data:
            sender = self.peer
            sender.unread_there -= len(data)
            if sender.transport is not None and not sender.is_closed:
                sender.transport.on_room()
        return data

    @property
    def is_cut_off(self) -> bool:
        """Whether data is lost in at least one direction."""
        return self.link.is_down or self.peer.link.is_down or self.network.is_dead(self.peer.host)

    def watch_life(self) -> None:
        """Let the connection fail if it stays cut off for long.

        Without keep-alive this happens only if data is on its way.
        """
        seconds = UNACKNOWLEDGED_SECONDS if self._wire else self.keepalive_seconds if self.is_kept_alive else 0.0
        if seconds and self._given_up is None:
            self._given_up = self.network.scheduler.call_later(seconds, lambda: self._give_up(seconds))

    def _give_up(self, after: float) -> None:
        self._given_up = None
        if self.is_closed or not self.is_cut_off:
            return
        if self._wire and after < UNACKNOWLEDGED_SECONDS:
            self.watch_life()
        else:
            self._on_error(OSError(errno.ETIMEDOUT, "Connection timed out"))

    def _split(self, data: bytes) -> list[bytes]:
        if len(data) < 2 or not self.link.split or self._draws.random() >= self.link.split:
            return [data]
        # Addresses of memory have more or fewer digits in each run, which must not change the draws.
        size = len(_ADDRESSES.sub(lambda found: re.sub(rb"\d+", b"0" * 10, found[0]), data))
        draws = [self._draws.randrange(1, size) for _ in range(self._draws.randint(1, 3))]
        cuts = sorted({min(draw, len(data) - 1) for draw in draws})
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    def _put(self, kind: str, data: bytes) -> None:
        self._wire.append((kind, data))
        if self._is_stalled:
            return
        if self.is_lost_on_the_way:
            self._stall()
            return
        scheduler, link = self.network.scheduler, self.link
        at = scheduler.now + int((link.latency + self._draws.random() * link.jitter) * SECOND)
        if at < self._arrives_at:
            at = self._arrives_at
        if link.bytes_per_second:
            at += round(len(data) / link.bytes_per_second * SECOND)
        self._arrives_at = at
        scheduler.call_at(at, functools.partial(self._arrive, self._round))

    @property
    def is_lost_on_the_way(self) -> bool:
        """Whether data that is sent now is lost."""
        return self.link.is_down or self.peer.host in self.network.dead_hosts

    def _stall(self) -> None:
        self._is_stalled = True
        self._round += 1
        stalled = self.link.stalled if self.link.is_down else self.network.stalled_for(self.peer.host)
        stalled.append(self._send_again_later)
        self.watch_life()

    def _send_again_later(self) -> None:
        delay = self._draws.random() * RETRANSMISSION_SECONDS
        self.network.scheduler.call_later(delay, self._send_again)

    def _send_again(self) -> None:
        if self.is_lost_on_the_way:
            self._stall()
            return
        self._is_stalled = False
        for end in (self, self.peer):
            if end._given_up is not None:
                end._given_up.cancel()
                end._given_up = None
        for _ in range(len(self._wire)):
            self._arrive(self._round)

    def _arrive(self, round_number: int) -> None:
        if round_number != self._round or not self._wire:
            return
        if self.is_lost_on_the_way:
            self._stall()
            return
        peer = self.peer
        kind, data = self._wire.popleft()
        if kind == "data" and not peer.is_closed:
            peer.received += data
            peer._notify_reader()
        elif kind == "data":
            if self.error is None and peer.error is None:
                peer._put("reset", b"")
        elif kind == "eof":
            peer.has_eof = True
            peer._notify_reader()
        else:
            peer._on_error(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def _on_error(self, error: OSError) -> None:
        if not self.is_closed and self.error is None:
            self.error = error
            self._wire.clear()
            self._notify_reader()

    def _notify_reader(self) -> None:
        if self.transport is not None:
            self.transport.on_readable()
        elif self.reader is not None:
            self.reader()


def _join(one: Endpoint, other: Endpoint, network: Network, *, is_local: bool = False) -> None:
    one.peer, other.peer = other, one
    for end, peer in ((one, other), (other, one)):
        end.link = Link(latency=0.0, jitter=0.00005, split=0.0) if is_local else network.link(end.host, peer.host)
        end._draws = network.direction(end.host, peer.host)


class SimSocket:
    """A program's socket object for one end of a connection."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._is_moved = False
        self.family, self.type = socket.AF_INET, socket.SOCK_STREAM

    def fileno(self) -> int:
        """Return the descriptor, which is not a real one; -1 after the end was closed."""
        return -1 if self.endpoint.is_closed else self.endpoint.descriptor

    def getsockname(self) -> tuple[str, int]:
        """Return the address of this end."""
        return self.endpoint.host, self.endpoint.port

    def getpeername(self) -> tuple[str, int]:
        """Return the address of the other end."""
        return self.endpoint.peer.host, self.endpoint.peer.port

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Set an option. Only those of keep-alive have an effect.

        Raises:
            OSError: the connection has ended.
        """
        endpoint = self.endpoint
        if endpoint.error is not None or endpoint.is_closed:
            raise OSError(errno.EINVAL, "Invalid argument")
        if (level, option) == (socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            endpoint.is_kept_alive = bool(value)
        elif (level, option) == (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", -1)):
            endpoint.keepalive_seconds = 2.0 * value  # the probes take the same time again

    def setblocking(self, _: bool) -> None:
        """Nothing blocks."""

    def move(self) -> SimSocket:
        """Return a socket for another process. Closing this object then does not close the end any more."""
        self._is_moved = True
        return SimSocket(self.endpoint)

    def close(self) -> None:
        """Close this end."""
        if not self._is_moved:
            self.endpoint.close()

    def watch(self, loop: SimulatedLoop, callback: Callable[[], None] | None) -> bool:
        """Do the same as ``loop.add_reader``, or ``remove_reader`` for None."""
        endpoint, had = self.endpoint, self.endpoint.reader is not None
        endpoint.loop = loop
        endpoint.reader = None if callback is None else lambda: loop.post(callback)
        if callback is not None and (endpoint.received or endpoint.has_eof or endpoint.passed):
            loop.post(callback)
        return had


class SimServer:
    """A listening socket, which is also asyncio's server object for it."""

    BACKLOG = 2048

    def __init__(self, network: Network, process: Process, port: int) -> None:
        self.network = network
        self.process = process
        self.port = port
        self.sockets = [self]
        self._factory: Callable[[], Any] | None = None
        self._loop: SimulatedLoop | None = None
        self._waiting: deque[Endpoint] = deque()
        self._watcher: Callable[[], None] | None = None
        self.is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether a further connection may wait to be accepted."""
        return len(self._waiting) < self.BACKLOG

    def getsockname(self) -> tuple[str, int]:
        """Return the address of the listening socket."""
        return self.process.host, self.port

    def serve(self, loop: SimulatedLoop, factory: Callable[[], Any]) -> None:
        """Accept connections, and create a protocol for each with ``factory``."""
        self._loop, self._factory = loop, factory
        if self._waiting:
            loop.post(self._take_waiting)

    def setblocking(self, _: bool) -> None:
        """Nothing blocks."""

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        """Return the connection that has waited longest, and the address of its other end.

        Raises:
            BlockingIOError: no connection waits.
        """
        if not self._waiting:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        sock = SimSocket(self._waiting.popleft())
        return sock, sock.getpeername()

    def queue_connection(self, endpoint: Endpoint) -> None:
        """Add a new connection to those that wait to be accepted."""
        self._waiting.append(endpoint)
        if self._loop is not None and self._factory is not None:
            self._loop.post(self._take_waiting)
        elif self._watcher is not None:
            self._watcher()

    def watch(self, loop: SimulatedLoop, callback: Callable[[], None] | None) -> bool:
        """Do the same as ``loop.add_reader``, or ``remove_reader`` for None."""
        had = self._watcher is not None
        self._watcher = None if callback is None else lambda: loop.post(callback)
        if self._watcher is not None and self._waiting:
            self._watcher()
        return had

    def close(self) -> None:
        """Accept no more connections, and close those that wait."""
        if not self.is_closed:
            self.is_closed = True
            self.network.listeners.pop((self.process.host, self.port), None)
            for endpoint in self._waiting:
                endpoint.close()
            self._waiting.clear()

    def close_clients(self) -> None:
        """Do nothing; simulated servers close their connections themselves."""

    async def wait_closed(self) -> None:
        """Return at once, because ``close`` does not leave anything to wait for."""

    def _take_waiting(self) -> None:
        assert self._loop is not None
        assert self._factory is not None
        while self._waiting:
            endpoint = self._waiting.popleft()
            endpoint.process, endpoint.loop = self._loop.process, self._loop
            SimTransport(self._loop, SimSocket(endpoint), self._factory()).begin()
