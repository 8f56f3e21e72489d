"""The path of one streamed request to a prefill/decode pair: the files and the calls in the router's code.

``python -m tests.router.request_path`` prints the files in the order in which the request reaches them;
``--calls`` prints the calls in order, one per line, indented by depth. The client, both instances and the router
share one process, one thread and one event loop, and use loopback sockets; the router has the settings of
``router.launch``. The third request over the same connections is traced, from before its first byte until the end
of both instances' responses.

The decode instance sends the response's head, the first piece, and the second piece with the response's end, with a
pause after each, so that the router reads each separately. The prefill instance sends one JSON object.

A call is a "call" event of ``sys.setprofile`` with code in the folder of the package ``router``: the start of a
function, method, property, lambda or generator. A coroutine or generator that continues is shown, but does not count.
Comprehensions are not shown, because newer versions of Python do not call them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import inspect
import json
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import router
from router.app import RouterApp
from router.settings import RouterSettings

__all__ = ["Call", "Client", "RequestPath", "registration", "running_instance", "running_router", "trace_request"]

PACKAGE = Path(router.__file__).parent
CLOCK = PACKAGE / "fleet" / "awake.py"  # runs several times a second, also without requests
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}
COUNTED_REQUEST = 3
# The pause after each piece: longer than the router needs to forward a piece.
PAUSE_SECONDS = 0.02
DEADLINE_SECONDS = 10.0

REQUEST = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "What does a call cost?"}], "stream": True}
).encode()
CHUNK = '{"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[%s]}'
PIECES = tuple(
    "data: {}\n\n".format(CHUNK % f'{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":null}}').encode()
    for text in ("one", "two")
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PREFILL_RESPONSE = b'HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{"id":"1"}'


class Call(NamedTuple):
    """One call, or one continuation of a coroutine."""

    file: str
    """The path relative to the package's folder."""
    line: int
    function: str
    depth: int
    """The number of the router's calls that are still running."""
    resumed: bool
    """Whether a coroutine or generator continues."""


class RequestPath(NamedTuple):
    """The calls of one request, in order."""

    events: list[Call]
    """The calls and the continuations."""

    @property
    def calls(self) -> list[Call]:
        """The events without continuations."""
        return [event for event in self.events if not event.resumed]

    @property
    def files(self) -> list[str]:
        """The files in the order in which the request reaches them, relative to the package's folder."""
        return list(dict.fromkeys(call.file for call in self.calls))


class _Recorder:
    """Records the calls while it is installed with ``sys.setprofile``."""

    def __init__(self) -> None:
        self.events: list[Call] = []
        self._files: dict[CodeType, str] = {}
        self._suspended: set[FrameType] = set()
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        file = self._files.get(code)
        if file is None:
            file = self._files[code] = _counted_file(code)
        if not file:
            return
        if event == "return":  # or a pause
            self._depth = max(0, self._depth - 1)
            if code.co_flags & _SUSPENDABLE:
                self._suspended.add(frame)
            return
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified name
        self.events.append(Call(file, code.co_firstlineno, name, self._depth, frame in self._suspended))
        self._depth += 1


_SUSPENDABLE = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def _counted_file(code: CodeType) -> str:
    """Return the code's file in the package; "" for other files, for comprehensions, and for ``CLOCK``."""
    path = Path(code.co_filename)
    if code.co_name in COMPREHENSIONS or not path.is_relative_to(PACKAGE) or path == CLOCK:
        return ""
    return str(path.relative_to(PACKAGE))


class _Peer(asyncio.Protocol):
    """Base of client and instance: a buffer and a transport."""

    def __init__(self) -> None:
        self.received = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Instance(_Peer):
    """One connection to a scripted instance, which responds to each POST with the same writes."""

    def __init__(self, writes: Sequence[bytes], requests: list[bytes], open_transports: set[Any]) -> None:
        super().__init__()
        self._writes = writes
        self._requests = requests
        self._open_transports = open_transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open_transports.add(transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._open_transports.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        """Respond when the request is complete."""
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        if not separator or len(body) < int(lengths[0].partition(b":")[2] if lengths else 0):
            return
        self.received = b""
        if head.startswith(b"GET"):
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        self._requests.append(head + separator + body)
        self._writing = asyncio.ensure_future(self._write_pieces())

    async def _write_pieces(self) -> None:
        for piece in self._writes:
            self.transport.write(piece)
            await asyncio.sleep(PAUSE_SECONDS)
            for _ in range(3):  # on a busy machine, the pause may end before the router reads the piece
                await asyncio.sleep(0)


class Client(_Peer):
    """A client's connection, with one request at a time."""

    ended: asyncio.Event

    @classmethod
    async def connect(cls, port: int) -> Client:
        """Open a connection to ``port`` of this machine."""
        return (await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port))[1]

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Send one request, and return the response."""
        self.received, self.ended = b"", asyncio.Event()
        head = f"{method} {path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.wait_for(self.ended.wait(), DEADLINE_SECONDS)
        return self.received

    def data_received(self, data: bytes) -> None:
        """Set ``ended`` at the response's end."""
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        length = next((line for line in head.split(b"\r\n") if line.startswith(b"content-length:")), None)
        has_ended = len(body) == int(length.partition(b":")[2]) if length else body.endswith(b"0\r\n\r\n")
        if separator and has_ended:
            self.ended.set()


def trace_request() -> RequestPath:
    """Send the request that this module's docstring describes, and return its calls."""
    return uvloop.run(_trace_request())


async def _trace_request() -> RequestPath:
    first, second = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in PIECES)
    async with (
        running_instance([PREFILL_RESPONSE]) as prefill_port,
        running_instance([STREAM_HEAD, first, second + b"0\r\n\r\n"]) as decode_port,
        running_router() as router_port,
    ):
        client = await Client.connect(router_port)
        for role, port in (("prefill", prefill_port), ("decode", decode_port)):
            response = await client.ask("POST", "/register", registration(role, port))
            assert b'"success"' in response, response
        for _ in range(COUNTED_REQUEST - 1):
            await client.ask("POST", "/v1/chat/completions", REQUEST)
            await asyncio.sleep(PAUSE_SECONDS)
        recorder = _Recorder()
        sys.setprofile(recorder)
        try:
            response = await client.ask("POST", "/v1/chat/completions", REQUEST)
            await asyncio.sleep(PAUSE_SECONDS)
        finally:
            sys.setprofile(None)
        client.transport.close()
    assert response.startswith(b"HTTP/1.1 200"), response
    assert all(piece in response for piece in PIECES), response
    return RequestPath(recorder.events)


@contextlib.asynccontextmanager
async def running_instance(writes: Sequence[bytes], requests: list[bytes] | None = None) -> AsyncIterator[int]:
    """Start a scripted instance, and yield its port. It appends its requests, without probes, to ``requests``."""
    received = [] if requests is None else requests
    open_transports: set[Any] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Instance(writes, received, open_transports), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    while open_transports:
        for transport in open_transports:
            transport.abort()
        await asyncio.sleep(0)


def registration(role: str, port: int) -> bytes:
    members = {
        "role": role,
        "host_ip": "127.0.0.1",
        "port": port,
        "metrics_port": port,
        "connector_port": port,
        "engine_worker_queue_port": 1,
        "rdma_ports": ["7100"],
        "device_ids": [0],
        "transfer_protocol": ["ipc", "rdma"],
        "tp_size": 1,
    }
    return json.dumps(members).encode()


@contextlib.asynccontextmanager
async def running_router(access_log: str = "off") -> AsyncIterator[int]:
    """Start a router for pairs, and yield its port."""
    # No rounds of probes, no batches of records and no access log, so that these do not count.
    settings = RouterSettings(
        host="127.0.0.1", splitwise=True, health_check_interval_secs=1000.0, access_log=access_log
    )
    app = RouterApp(settings)
    with (
        mock.patch("router.telemetry.audit.FLUSH_SECONDS", 1000.0),
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        config = uvicorn.Config(
            app,
            http=_protocol(),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """uvicorn in a process that handles its signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def _protocol() -> type[asyncio.Protocol]:
    """Return the protocol that ``router.launch.server`` passes to uvicorn."""
    found = [
        each
        for each in vars(importlib.import_module("router.launch.server")).values()
        if isinstance(each, type) and issubclass(each, HttpToolsProtocol)
    ]
    assert len(found) == 1, found
    return found[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the files or the calls, and their numbers."""
    parser = argparse.ArgumentParser(prog="python -m tests.router.request_path", description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", action="store_true", help="print the calls in order")
    options = parser.parse_args(argv)
    path = trace_request()
    if options.calls:
        number = 0
        for call in path.events:
            number += not call.resumed
            label = "..." if call.resumed else str(number)
            print(f"{label:>4} {'  ' * call.depth}{call.function}  {call.file}:{call.line}")
    else:
        print("\n".join(path.files))
    print(f"{len(path.files)} files, {len(path.calls)} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
