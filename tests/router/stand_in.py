"""Stand-ins for inference instances: real HTTP/1.1 servers on loopback sockets that answer as a test scripts them.

They replace engines because a test cannot make an engine answer 500, cut the connection within an event, close an idle
connection or hang. They compute nothing; the tests of the examples use real engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import uvloop

from tests.support import plain_http
from tests.support.ports import free_port
from tests.support.registration import registration_fields

__all__ = [
    "Behaviour",
    "LoopThread",
    "Received",
    "Responder",
    "StandIn",
    "answers",
    "chat_answer",
    "full_backlog",
    "stalls",
    "streams",
    "streams_until",
]

T = TypeVar("T")


class LoopThread:
    """An event loop in its own thread, so that tests are plain functions."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.ending: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], deadline_s: float = 20.0) -> T:
        """Run ``work`` in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(deadline_s)

    def close(self) -> None:
        """Wait for the futures in ``ending``, cancel all tasks, and end the thread."""
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def _cancel_all(self) -> None:
        await asyncio.gather(*self.ending)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)  # the next iterations of the loop close aborted connections


@dataclass
class Received:
    """A received request."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


@dataclass
class Responder:
    """Methods with which a behaviour answers one request."""

    writer: asyncio.StreamWriter
    peer_left: asyncio.Event
    keep_alive: bool = True
    bytes_sent: int = 0
    succeeded: bool = False

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()
        self.bytes_sent += len(data)

    async def answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.succeeded = status < 300
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers)]
        await self.raw("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body)

    async def start_stream(self, content_type: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        await self.raw(head.encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, text: str) -> None:
        await self.chunk(f"data: {text}\n\n".encode())

    async def end_stream(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        """Abort the connection, as a crash does."""
        self.keep_alive = False
        self.writer.transport.abort()


Behaviour = Callable[[Received, Responder], Awaitable[None]]


async def never_answers(request: Received, respond: Responder) -> None:
    """Send nothing, and close the connection when the peer leaves."""
    await respond.peer_left.wait()
    respond.keep_alive = False


def cuts(after: bytes = b"") -> Behaviour:
    """Send these bytes, then abort the connection."""

    async def behave(request: Received, respond: Responder) -> None:
        if after:
            await respond.raw(after)
            await asyncio.sleep(0.02)
        respond.cut()

    return behave


def chat_answer(content: str = "hello") -> bytes:
    """Return a complete chat completion."""
    message = {"role": "assistant", "content": content}
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
    ).encode()


def answers(status: int = 200, body: bytes | None = None, *headers: tuple[str, str]) -> Behaviour:
    """Answer with this status, body (a chat completion by default) and headers."""

    async def behave(request: Received, respond: Responder) -> None:
        content = chat_answer() if body is None else body
        await respond.answer(status, content, ("content-type", "application/json"), *headers)

    return behave


def streams(*texts: str) -> Behaviour:
    """Answer with these chat chunks as an event stream, then [DONE]."""

    async def behave(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        for text in texts:
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            await respond.event(json.dumps(chunk))
        await respond.event("[DONE]")
        await respond.end_stream()

    return behave


def stalls(*events: str) -> Behaviour:
    """Begin a stream with these events, then send no more until the peer leaves."""

    async def behave(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        for event in events:
            await respond.event(event)
        await respond.peer_left.wait()
        respond.keep_alive = False

    return behave


def streams_until(go_on: threading.Event) -> Behaviour:
    """Begin a stream with the event 1, and end it once ``go_on`` is set."""

    async def behave(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event("1")
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        await respond.event("[DONE]")
        await respond.end_stream()

    return behave


@contextlib.contextmanager
def full_backlog(port: int) -> Iterator[None]:
    """Open a listener at ``port`` with a full backlog, so that the kernel accepts no more connections."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield


@dataclass
class StandIn:
    """A stand-in. A test may replace ``behave`` at any time."""

    role: str
    thread: LoopThread
    behave: Behaviour = field(default_factory=answers)
    health: int = 200
    answers_probes: bool = True
    port: int = 0
    tls: ssl.SSLContext | None = None
    received: list[Received] = field(default_factory=list)
    answered: set[bytes] = field(default_factory=set)
    aborted: list[Any] = field(default_factory=list)
    probes: int = 0
    connections: int = 0
    running: int = 0
    left: int = 0
    models: tuple[str, ...] = ("m",)
    models_status: int = 200
    models_asked: int = 0
    owner: str = ""  # ``owned_by`` of the models
    abort_answer: dict[str, Any] = field(default_factory=lambda: {"result": {"aborted": [], "not_found": []}})
    abort_status: int = 200
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Fields that are added to a registration as FastDeploy's, or replace its fields."""
    _server: asyncio.AbstractServer | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def start(self) -> StandIn:
        """Listen, at the previous port if there is one."""
        self.thread.run(self._start())
        return self

    def stop(self) -> None:
        """Stop listening and abort all connections, as the end of a process does."""
        self.thread.run(self._stop())

    def cut_idle(self) -> None:
        """Abort all connections, but continue to listen."""
        self.thread.run(self._cut_all())

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def is_listening(self) -> bool:
        return self._server is not None

    def registration(self, **changes: Any) -> dict[str, Any]:
        """Return the fields of its registration: FastDeploy's, ``extra_fields`` and ``changes``."""
        return {
            **registration_fields(self.role, self.port),
            "host_ip": "https://127.0.0.1" if self.tls else "127.0.0.1",
            "connector_port": self.port + 1 if self.port < 65535 else 1,
            **self.extra_fields,
            **changes,
        }

    def register(self, router_url: str, **changes: Any) -> httpx.Response:
        """Register at the router with this URL."""
        return plain_http.post(f"{router_url}/register", json=self.registration(**changes))

    async def _start(self) -> None:
        self.port = self.port or free_port()  # a port that is free again at the next start
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, limit=1 << 26, ssl=self.tls)

    async def accept_no_more(self) -> None:
        """Stop listening, as a process does before its end. Running requests continue."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _stop(self) -> None:
        await self.accept_no_more()
        await self._cut_all()

    async def _cut_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        ahead = b""
        try:
            while True:
                request = await _read_request(reader, ahead)
                peer_left = asyncio.Event()
                watching = asyncio.ensure_future(_read_ahead(reader, peer_left))
                responder = Responder(writer, peer_left)
                await self._respond(request, responder)
                if not responder.keep_alive:
                    return
                ahead = await watching
                if not ahead:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _respond(self, request: Received, responder: Responder) -> None:
        if request.target == "/health":
            self.probes += 1
            if self.answers_probes:
                await responder.answer(self.health, b"")
            else:
                await responder.peer_left.wait()
                responder.keep_alive = False
        elif request.target == "/v1/abort_requests":
            self.aborted.append(request.json)
            await responder.answer(self.abort_status, json.dumps(self.abort_answer).encode())
        elif request.target == "/v1/models" and self.models_status != 200:
            await responder.answer(self.models_status, b"{}")
        elif request.target == "/v1/models":
            self.models_asked += 1
            owned_by = {"owned_by": self.owner} if self.owner else {}
            data = [{"id": model, "object": "model", **owned_by} for model in self.models]
            await responder.answer(200, json.dumps({"object": "list", "data": data}).encode())
        else:
            await self._behave(request, responder)

    async def _behave(self, request: Received, responder: Responder) -> None:
        self.received.append(request)
        self.running += 1
        try:
            await self.behave(request, responder)
            if responder.succeeded:
                self.answered.add(request.body)
        finally:
            self.running -= 1
            self.left += responder.peer_left.is_set()


async def _read_request(reader: asyncio.StreamReader, ahead: bytes) -> Received:
    head = ahead
    while b"\r\n\r\n" not in head:
        more = await reader.read(65536)
        if not more:
            raise ConnectionError("the peer closed")
        head += more
    head, _, body = head.partition(b"\r\n\r\n")
    request_line, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = request_line.split(" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = int(dict(headers).get("content-length", 0))
    if len(body) < length:
        body += await reader.readexactly(length - len(body))
    if ("transfer-encoding", "chunked") in headers:
        while not body.endswith(b"0\r\n\r\n"):
            body += await reader.read(65536)
        body = _join_chunks(body)
    return Received(method, target, headers, body)


def _join_chunks(body: bytes) -> bytes:
    joined = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        if not (length := int(size, 16)):
            return joined
        joined, body = joined + rest[:length], rest[length + 2 :]


async def _read_ahead(reader: asyncio.StreamReader, peer_left: asyncio.Event) -> bytes:
    """Return the next bytes of the peer. If it leaves, set the event, and return none."""
    try:
        data = await reader.read(65536)
    except ConnectionError:
        data = b""
    if not data:
        peer_left.set()
    return data
