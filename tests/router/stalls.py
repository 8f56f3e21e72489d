"""Measures how long each operation of a client stalls the router's event loop.

``python -m tests.router.stalls`` prints for each the longest iteration of the event loop in CPU time of the router's
thread, so that other work of the machine does not count. ``--tries 3`` repeats each, and takes the shortest of the
longest times. ``--only NAME`` selects the operations with this part in their names.

The router has ``--instances`` instances, of which one has just returned. One server in its own thread answers for all
of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import uvicorn
import uvloop

from router.app import RouterApp
from router.fleet import Registration
from router.http.exchange import Connection
from router.http.server import RouterProtocol
from router.launch.server import prepare_process
from router.settings import RouterSettings
from tests.router.instructions import InstructionCount

__all__ = ["OPERATIONS", "Operation", "Stalls", "measure_stalls"]

DEADLINE_SECONDS = 120.0
MEGABYTE = 1_000_000
CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
ANSWER = b'{"id":"1","choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'


class Operation(NamedTuple):
    """An operation of a client."""

    name: str
    sent: Callable[[], bytes]
    """Returns the bytes of its requests."""
    answers: int = 1
    """The number of answers to wait for; there are fewer if the router closes the connection."""
    settings: Mapping[str, Any] = MappingProxyType({})
    waiting: int = 0
    """The number of requests that wait in the queue meanwhile."""


def ask(path: str, body: bytes = b"", *headers: bytes, method: str = "POST") -> bytes:
    """Return the bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: x", *headers]
    if method == "POST":
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def get(path: str, *headers: bytes) -> bytes:
    return ask(path, b"", *headers, method="GET")


def chat(**members: Any) -> bytes:
    return ask(CHAT, json.dumps({"request_id": "r1", **members}).encode())


def fill(start: bytes, unit: bytes, end: bytes, size: int) -> bytes:
    """Return a body of ``size`` bytes with repetitions of ``unit``; the comma at the end of the last one is omitted."""
    count = (size - len(start) - len(end)) // len(unit)
    return start + (unit * count)[: -1 if unit.endswith(b",") else None] + end


def many(start: bytes, unit: bytes, end: bytes, size: int, path: str = CHAT) -> Callable[[], bytes]:
    return lambda: ask(path, fill(start, unit, end, size))


def make_form(part: bytes, size: int) -> Callable[[], bytes]:
    form = b"content-type: multipart/form-data; boundary=x"
    return lambda: ask(EMBEDDINGS, fill(b"--x\r\n", part, b"\r\n--x--\r\n", size), form)


def abort(count: int) -> Callable[[], bytes]:
    return lambda: ask(
        "/v1/abort_requests", json.dumps({"req_ids": [f"chatcmpl-{n}_0" for n in range(count)]}).encode()
    )


_NAMED = b'{"request_id":"r1","messages":['
_VALUES = {
    "arrays": b"[],",
    "objects": b'{"a":1},',
    "empty objects": b"{},",
    "numbers": b"1,",
    "fractions": b"1.7976931348623157e308,",
    "strings": b'"",',
    "words": b'"word word word word",',
    "escapes": b'"\\"\\\\\\"\\\\\\"\\\\\\"",',
    "NaN": b"NaN,",
    "messages": b'{"role":"user","content":"hi"},',
    "long integers": b"1" * 4000 + b",",
}
_SIZES = {"200 kB": 199_000, "1 MB": MEGABYTE, "64 MB": 64 * MEGABYTE}
_PREFLIGHT = (b"origin: https://a.example", b"access-control-request-method: POST")
_LIMITED = {"max_concurrent_requests": 1, "max_queued_requests": 2000, "queue_timeout_secs": 100.0}
_READ_PATHS = (
    *("/ready", "/health", "/metrics", "/v1/models", "/registered", "/registered_number", "/prometheus_targets"),
    *("/decode_instances", "/health_generate", "/admin/requests?count=1000", "/openapi.json"),
)

OPERATIONS: Sequence[Operation] = (
    Operation("a small request", lambda: chat(messages=[])),
    Operation("a small request, streamed", lambda: chat(messages=[], stream=True)),
    Operation("a small request without a generated answer", lambda: ask(EMBEDDINGS, b'{"model":"m"}')),
    *(
        Operation(f"{size} of {name}", many(_NAMED, unit, b"]}", length))
        for size, length in _SIZES.items()
        for name, unit in _VALUES.items()
    ),
    *(
        Operation(f"{size} of {name}", many(start, unit, end, length))
        for size, length in _SIZES.items()
        for name, start, unit, end in (
            ("text", b'{"request_id":"r1","prompt":"', b"word ", b'"}'),
            ("escaped text", b'{"request_id":"r1","prompt":"', b"\\u00e9\\n", b'"}'),
            ("escaped quotes", b'{"request_id":"r1","prompt":"', b'\\"', b'"}'),
            ("Chinese text", b'{"request_id":"r1","prompt":"', "\u4e2d".encode(), b'"}'),
            ("blanks", b'{"request_id":"r1"', b" ", b"}"),
            ("names", b'{"request_id":"r1",', b'"k":1,', b"}"),
            ("its own names", b"{", b'"request_id":"r1",', b"}"),
            ("nesting", b'{"request_id":"r1","messages":', b"[", b"}"),
            ("token ids", b'{"request_id":"r1","prompt_token_ids":[', b"12345,", b"]}"),
            ("an image", b'{"request_id":"r1","messages":[{"content":[{"image_url":{"url":"', b"QUJD", b'"}}]}]}'),
            ("a wrong request_id", b'{"request_id":[', b"1,", b"]}"),
            ("a wrong previous_response_id", b'{"previous_response_id":[', b"1,", b"]}"),
            ("stop strings", b'{"request_id":"r1","stop":[', b'"stop",', b"]}"),
            ("broken JSON", b'{"request_id":"r1","messages":[', b"1,", b""),
            ("no UTF-8", b'{"request_id":"r1","messages":["', b"\xff", b'"]}'),
        )
    ),
    Operation("200 different names", lambda: chat(**{f"k{n}": n for n in range(200)})),
    Operation("200 kB of different names", lambda: chat(**{f"k{n}": n for n in range(17_000)})),
    Operation("a model's name of 200 kB", lambda: chat(model="m" * 199_000)),
    Operation(
        "a response that continues one of 1 MB",
        many(b'{"previous_response_id":[', b"1,", b"]}", MEGABYTE, "/v1/responses"),
    ),
    Operation("a form of 15 kB with many lines", make_form(b'name="model"\r\n', 15_000)),
    Operation("a form of 64 MB with many lines", make_form(b'name="model"\r\n', 63 * MEGABYTE)),
    Operation("a form of 64 MB with many parts", make_form(b"--x\r\n\r\n\r\n", 63 * MEGABYTE)),
    Operation("64 MB of unread names", many(b"{", b'"model" :', b"}", 63 * MEGABYTE, EMBEDDINGS)),
    Operation("1,000 headers", lambda: get("/v1/x", *[b"a:"] * 999)),
    Operation("16,000 headers", lambda: get("/v1/x", *[b"a:"] * 16_000)),
    Operation("999 headers that name others", lambda: get("/v1/x", *(b"connection: a%d" % n for n in range(999)))),
    Operation("one header that names 20,000 others", lambda: get("/v1/x", b"connection: " + b"a," * 20_000)),
    Operation("a header of 60 kB", lambda: get("/v1/x", b"x-session-id: " + b"a" * 60_000)),
    Operation("a path of 60 kB", lambda: get("/v1/" + "x/" * 30_000)),
    Operation("a path of 60 kB of escapes", lambda: get("/v1/" + "%41" * 20_000)),
    Operation("a query of 60 kB", lambda: get("/registered?" + "a=1&" * 15_000)),
    Operation("a model's name of 60 kB in the path", lambda: get("/v1/models/" + "m" * 60_000)),
    Operation("1,000 pipelined requests", lambda: get("/v1/x") * 1000, 1000),
    Operation("1,000 pipelined requests for /health", lambda: get("/health") * 1000, 1000),
    Operation("1,000 pipelined upgrades", lambda: get("/health", b"connection: upgrade", b"upgrade: h2c") * 1000, 1000),
    Operation(
        "2,000 pipelined preflights",
        lambda: chat(messages=[]) + ask(CHAT, b"", *_PREFLIGHT, method="OPTIONS") * 2000,
        2001,
        {"cors_allowed_origins": ("*",)},
    ),
    Operation(
        "a body in 100,000 chunks",
        lambda: (
            ask(CHAT, b"", b"transfer-encoding: chunked", method="PUT")
            + b"1\r\n{\r\n"
            + b"1\r\n \r\n" * 100_000
            + b"1\r\n}\r\n0\r\n\r\n"
        ),
    ),
    *(Operation(f"GET {path}", partial(get, path)) for path in _READ_PATHS),
    *(
        Operation(f"a request placed by {policy}", lambda: chat(prompt="word " * 30_000), settings={"policy": policy})
        for policy in ("pool_aware", "cache_aware", "consistent_hash", "fd_remote_metrics_score", "request_num")
    ),
    Operation("an abort of 1,000 requests", abort(1000)),
    Operation("an abort of 40,000 requests", abort(40_000)),
    Operation("an abort of 1,000 requests while 1,000 wait", abort(1000), 1, _LIMITED, 1000),
    Operation("a request while 1,000 wait", lambda: chat(messages=[]), 0, _LIMITED, 1000),
    Operation("GET /metrics while 1,000 wait", lambda: get("/metrics"), 1, _LIMITED, 1000),
    *(
        Operation(f"{size} of {name} to the control plane", many(start, unit, b"}", length, "/v1/abort_requests"))
        for size, length in (("1 MB", MEGABYTE), ("8 MB", 8 * MEGABYTE))
        for name, start, unit in (("numbers", b'{"a":[', b"1,"), ("escapes", b'{"a":"', b'\\"'))
    ),
    Operation("a registration of 1 MB", many(b'{"role":"', b"x", b'"}', MEGABYTE, "/register")),
)


class Stalls:
    """Measures the longest iteration of one thread's event loop, between two checks for new events."""

    def __init__(self, in_instructions: bool = False) -> None:
        """
        Args:
            in_instructions: measure bytecode instructions, which do not depend on the load of the machine, not time.
        """
        self.is_on = False
        """Whether ``watch`` continues."""
        self.longest = 0.0
        """The longest iteration in seconds of the thread's CPU time, or in instructions."""
        self._count = InstructionCount() if in_instructions else None
        self._began = 0.0

    def collect_garbage(self) -> None:
        """Collect the garbage of previous operations."""
        gc.collect()
        if self._count is not None:  # else the collector runs in the iterations, as it does in a router
            gc.freeze()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure each iteration until ``is_on`` is false; called by the loop."""
        if self._count is not None:
            if self._began:
                self._count.__exit__()
                self.longest = max(self.longest, self._count.instructions)
            if not self.is_on:
                self._began = 0.0
                return
            self._began, self._count.instructions = 1.0, 0
            time.sleep(0)  # lets other threads use the interpreter
            loop.call_soon(self.watch, loop)
            self._count.__enter__()
            return
        now = time.thread_time()
        if self._began:
            self.longest = max(self.longest, now - self._began)
        if not self.is_on:
            self._began = 0.0
            return
        time.sleep(0)
        self._began = time.thread_time()
        loop.call_soon(self.watch, loop)


@contextlib.contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in a thread."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


class _StandIn(asyncio.Protocol):
    """Answers as instances do, but never answers a request with ``"hold"``."""

    def __init__(self, transports: set[asyncio.Transport]) -> None:
        self._transports = transports
        self._head = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transports.add(self._transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._transports.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        if not self._left:
            self._head += data
            head, blank_line, data = self._head.partition(b"\r\n\r\n")
            if not blank_line:
                return
            lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
            self._left = int(lengths[0].partition(b":")[2]) if lengths else 0
        self._left -= len(data)
        if self._left or b'"hold"' in data:
            return
        models = b'{"object":"list","data":[{"id":"m"}]}'
        content = models if self._head.startswith(b"GET /v1/models ") else ANSWER
        self._head = b""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(content) + content)


class StalledRouter:
    """A router on a measured loop, and its instances on another loop."""

    def __init__(
        self, stack: contextlib.ExitStack, stalls: Stalls, instances: int, settings: Mapping[str, Any]
    ) -> None:
        self._stack = stack
        self._stalls = stalls
        self.loop, self._others = stack.enter_context(running_loop()), stack.enter_context(running_loop())
        self._transports: set[asyncio.Transport] = set()
        self._server_of_instances = self._run(self._others, self._start_instances())
        self._port = self._server_of_instances.sockets[0].getsockname()[1]
        self.sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = RouterSettings(
            **{"host": "127.0.0.1", "health_check_interval_secs": 1000.0, "access_log": "off", **settings}
        )
        self._run(self.loop, self._start(made, instances))

    def _run(self, loop: asyncio.AbstractEventLoop, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(DEADLINE_SECONDS)

    async def _start_instances(self) -> asyncio.Server:
        make = partial(_StandIn, self._transports)
        return await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)

    async def _stop_instances(self) -> None:
        self._server_of_instances.close()
        for transport in list(self._transports):
            transport.abort()
        await asyncio.sleep(0.01)

    async def _start(self, settings: RouterSettings, instances: int) -> None:
        self.app = app = RouterApp(settings)
        now = time.monotonic()
        for number in range(instances):
            fields = {"role": "mixed", "host_ip": f"127.1.{number // 256}.{number % 256}", "port": self._port}
            registered = app.registry.register(Registration.from_fields(fields), now)
            registered.set_models(frozenset(["m"]), now)
        if instances > 1:
            registered.mark_unhealthy("it was stopped")
            registered.mark_healthy(now)

        async def connect(address: Any) -> Connection:
            made = partial(Connection, app.upstream, address)
            return (await asyncio.get_running_loop().create_connection(made, "127.0.0.1", self._port))[1]

        app.upstream.connect = connect  # type: ignore[method-assign]
        config = uvicorn.Config(app, http=RouterProtocol, ws="none", log_config=None, access_log=False)
        config.server_header = config.date_header = False
        config.load()
        self._server = uvicorn.Server(config)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self.sock]))
        while not self._server.started:
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        async def end() -> None:
            self.app.proxy.stop()
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            # With ``force_exit``, uvicorn does not end the application, which closes its connections.
            await self._server.lifespan.shutdown()
            await asyncio.sleep(0.01)

        self._run(self.loop, end())
        self._run(self._others, self._stop_instances())

    def connect(self) -> socket.socket:
        return self._stack.enter_context(socket.create_connection(self.sock.getsockname(), timeout=DEADLINE_SECONDS))

    def keep_waiting(self, count: int) -> None:
        """Send one request that never ends, and make ``count`` requests wait for it."""
        body = json.dumps({"request_id": "w", "messages": ["x" * 5000], "hold": True}).encode()
        for _ in range(count + 1):
            self.connect().sendall(ask(CHAT, body))
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.app.admission.waiting < count and time.monotonic() < deadline:
            time.sleep(0.01)

    def measure(self, operation: Operation) -> tuple[float, bytes]:
        """Return the longest stall, and the start of the answer."""
        sent = operation.sent()
        if operation.waiting:
            if not self.app.admission.waiting:
                self.keep_waiting(operation.waiting)
        else:
            for warm in (get("/health"), chat(messages=[])):
                self.ask(warm, 1)
        self._stalls.collect_garbage()
        self._stalls.longest, self._stalls.is_on = 0.0, True
        self.loop.call_soon_threadsafe(self._stalls.watch, self.loop)
        answer = self.ask(sent, operation.answers)
        self._stalls.is_on = False
        self._run(self.loop, asyncio.sleep(0))
        return self._stalls.longest, answer

    def ask(self, sent: bytes, answers: int) -> bytes:
        """Send these bytes, and return the start of the answers."""
        sock = self.connect()
        sending = threading.Thread(target=_send, args=(sock, sent), daemon=True)
        sending.start()
        received = bytearray()
        while received.count(b"HTTP/1.1 ") < answers and (data := sock.recv(1 << 20)):
            received += data
        if not answers:
            sending.join(DEADLINE_SECONDS)
        self._run(self.loop, asyncio.sleep(0.05))
        return bytes(received[:400])


def _send(sock: socket.socket, sent: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(sent)


def measure_stalls(operation: Operation, instances: int, in_instructions: bool = False) -> tuple[float, bytes]:
    """Return the longest stall, in seconds or in instructions, and the start of the answer."""
    with running_router(instances, in_instructions, operation.settings) as router:
        return router.measure(operation)


@contextlib.contextmanager
def running_router(
    instances: int, in_instructions: bool = False, settings: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[StalledRouter]:
    """Start a router, and measure its stalls."""
    with contextlib.ExitStack() as stack:
        made = {"max_body_bytes": 64 * MEGABYTE + 1000, **settings}
        router = StalledRouter(stack, Stalls(in_instructions), instances, made)
        yield router
        router.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the longest stall of each operation. Return 1 if one is longer than the limit."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.router.stalls", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--only", default="", help="measure only operations with this part in their names")
    parser.add_argument("--most-ms", type=float, default=0.0, help="fail if one takes longer; 0: never")
    options = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    prepare_process()
    worst = 0.0
    for operation in OPERATIONS:
        if options.only not in operation.name:
            continue
        try:
            tries = [measure_stalls(operation, options.instances) for _ in range(options.tries)]
        except Exception as exc:
            print(f"{operation.name:60} {type(exc).__name__}: {exc}", flush=True)
            continue
        longest, answer = min(tries)
        worst = max(worst, longest)
        print(f"{operation.name:60} {1000 * longest:9.1f} ms  {answer[:12].decode(errors='replace')}", flush=True)
    return int(bool(options.most_ms) and 1000 * worst > options.most_ms)


if __name__ == "__main__":
    sys.exit(main())
