"""Measure the router's CPU time for a request, with and without the KV events of instances.

    python benchmarks/kv_events_cost.py [--seconds 3] [--pairs 7] [--case turn]

Two routers with one worker each, one of them with ``--kv-events``, get the same load in turn (``native/load.c``, 32
connections). 32 mock instances in this process answer, and publish a batch of events for each request: they store the
blocks of 16 tokens that their caches lack, and remove the least recently used ones beyond 2,000. A prompt of "short"
has 250 to 500 tokens that no other one has; "turn" has these behind 7,500 that all share; "unique" has 8,000 of its
own. CPU is the user and system time of the router's threads, from /proc. A figure is the median over the pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from describe_run import describe_run
from router_overhead import HEARTBEAT_S, Bench, Case, System, cpu_seconds, post, running_process

from kvcommon.kv_events import BlockRemoved, BlockStored, Event
from tests.support.beside import working_beside
from tests.support.kv_events import EventPublisher, event_publisher
from tests.support.ports import free_port
from tests.support.registration import registration_fields
from tests.support.waiting import wait_until

BAR = 1.05
NUM_INSTANCES, MAX_BLOCKS, BLOCK_TOKENS = 32, 2_000, 16
KEPT_BATCHES = 1000
_ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":"An answer of about sixteen tokens."},"finish_reason":"stop"}],"usage":{"prompt_tokens":%d,'
    b'"completion_tokens":16,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}'
)


@dataclass(frozen=True)
class Prompts(Case):
    """Requests with prompts that share their first ``shared_bytes`` and differ after that."""

    shared_bytes: int = 0

    def body(self) -> bytes:
        """Return the body of the next run's requests; ``native/load.c`` puts numbers at the place of the marks."""
        own = f"{'#' * 16} {time.monotonic_ns()} " + "What does a router cost? " * 3000
        text = ("The same text for all. " * 3000)[: self.shared_bytes] + own[: self.prompt_bytes - self.shared_bytes]
        return json.dumps({"model": "mock", "messages": [{"role": "user", "content": text}], "max_tokens": 16}).encode()


CASES = {
    "short": Prompts("small", 32, prompt_bytes=2_000),
    "turn": Prompts("large", 32, prompt_bytes=32_000, shared_bytes=30_000),
    "unique": Prompts("unique", 32, prompt_bytes=32_000),
}


TITLES = {
    "short": "375 tokens on average, all new",
    "turn": "7,900 tokens, 375 of them new",
    "unique": "8,000 tokens, all new",
}


class Instance(asyncio.Protocol):
    """A connection to a mock instance."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._data, self._size = cache, bytearray(), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = bytes(self._data).partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if end and len(body) >= int(length or 0):
            self._data.clear()
            answer = self._cache.serve(body) if head.startswith(b"POST /v1/chat/completions ") else b"{}"
            start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(start % len(answer) + answer)  # type: ignore[attr-defined]


class Cache:
    """The cache of a mock instance, which publishes its changes."""

    def __init__(self, publisher: EventPublisher) -> None:
        self.publisher, self._blocks = publisher, dict[int, None]()

    def serve(self, body: bytes) -> bytes:
        """Return the response to a request, and publish the events of its blocks."""
        text = body[body.find(b'"content"') :]
        tokens = [each & 0x1FFFF for each in array("I", text[: len(text) // 4 * 4])]
        del tokens[len(tokens) - zlib.crc32(text) % 256 :]  # tokens differ in length, so prompts have different numbers
        hashes: list[int] = []
        parent = 0
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = hash((parent, *tokens[start : start + BLOCK_TOKENS])) & (1 << 63) - 1
            hashes.append(parent)
        num_cached = next((place for place, each in enumerate(hashes) if each not in self._blocks), len(hashes))
        for each in reversed(hashes):  # as in vLLM, the end of a prompt is evicted before its beginning
            self._blocks.pop(each, None)
            self._blocks[each] = None
        events: list[Event] = []
        if new := hashes[num_cached:]:
            before = hashes[num_cached - 1] if num_cached else None
            stored = tokens[num_cached * BLOCK_TOKENS : len(hashes) * BLOCK_TOKENS]
            events.append(BlockStored(list(new), before, stored, BLOCK_TOKENS))
        if (too_many := len(self._blocks) - MAX_BLOCKS) > 0:
            oldest = [each for each, _ in zip(self._blocks, range(too_many), strict=False)]
            for each in oldest:
                del self._blocks[each]
            events.append(BlockRemoved(list(oldest)))
        if events:
            self.publisher.publish(*events)
            self.publisher.sent.pop(self.publisher.number - KEPT_BATCHES, None)
        return _ANSWER % (len(tokens), len(tokens) + 16, num_cached * BLOCK_TOKENS)


@contextlib.contextmanager
def running_instances() -> Iterator[dict[int, EventPublisher]]:
    """Run the mock instances; yield each one's publisher by its port."""
    with contextlib.ExitStack() as opened:
        caches = {free_port(): Cache(opened.enter_context(event_publisher())) for _ in range(NUM_INSTANCES)}

        async def serve(ended: threading.Event) -> None:
            loop = asyncio.get_running_loop()
            for port, cache in caches.items():
                await loop.create_server(lambda cache=cache: Instance(cache), "127.0.0.1", port)  # type: ignore[misc]
            while not ended.is_set():
                await asyncio.sleep(0.02)
                for cache in caches.values():
                    cache.publisher.answer_replays()

        with working_beside(lambda ended: asyncio.run(serve(ended))):
            yield {port: cache.publisher for port, cache in caches.items()}


@contextlib.contextmanager
def running_router(folder: Path, instances: dict[int, EventPublisher], *flags: str) -> Iterator[System]:
    """Run a router that knows the instances."""
    port = free_port()
    argv = ["-m", "router.launch", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--access-log", "off"]

    def register(ended: threading.Event) -> None:
        while not ended.is_set():
            registrations = [
                registration_fields("mixed", each) | {"kv_events": by.fields} for each, by in instances.items()
            ]
            taken = {post(port, "/register", json.dumps(each).encode()) for each in registrations}
            ended.wait(HEARTBEAT_S if taken == {200} else 0.1)

    def is_ready() -> bool:
        listed: bytes
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/registered", timeout=5) as response:
                listed = response.read().replace(b" ", b"")
        except OSError:
            return False
        return listed.count(b'"cache_known":"exact"' if flags else b'"kv_events"') >= NUM_INSTANCES

    with (
        (folder / f"router-{port}.log").open("w") as log,
        running_process([sys.executable, *argv, *flags], log) as process,
        working_beside(register),
    ):
        wait_until(is_ready, "the registrations", 60)
        yield System([port], process.pid)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases and print a table; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement (default 3)")
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each router (default 7)")
    parser.add_argument("--case", choices=tuple(CASES))
    parser.add_argument("--json", type=Path, help="a file for the figures")
    args = parser.parse_args(argv)
    is_met, begun, load = True, time.gmtime(), os.getloadavg()[0]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), (), Path(name))
        print(f"{'case':<10}{'req/s':>8}{'us/req without':>16}{'with':>9}{'ratio':>8}{'range':>17}")
        for kind in [args.case] if args.case else CASES:
            with contextlib.ExitStack() as running:
                instances = running.enter_context(running_instances())
                systems = [
                    running.enter_context(running_router(Path(name), instances, *flags))
                    for flags in ((), ("--kv-events",))
                ]
                pairs = []
                for number in range(args.pairs + 1):  # the first pair fills the caches
                    order = systems if number % 2 else systems[::-1]
                    taken = {each.pid: measure(bench, CASES[kind], each, args.seconds) for each in order}
                    pairs.append([taken[each.pid] for each in systems])
            without, with_events = ([pair[place] for pair in pairs[1:]] for place in (0, 1))
            ratios = sorted(late[0] / early[0] for early, late in zip(without, with_events, strict=True))
            ratio, per_s = statistics.median(ratios), statistics.median(each[1] for each in with_events)
            is_met &= ratio <= BAR
            cpu = [statistics.median(each[0] for each in both) for both in (without, with_events)]
            rows.append(
                {"name": TITLES[kind], "ours": True, "values": [*(round(each) for each in cpu), round(ratio, 2)]}
            )
            spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
            print(f"{kind:<10}{per_s:>8,.0f}{cpu[0]:>16.1f}{cpu[1]:>9.1f}{ratio:>8.3f}{spread:>17}", flush=True)
    if args.json:
        table = {
            "section": "events",
            "title": "The router's CPU time for a request",
            "row": "prompts of the requests",
            "columns": [
                {"name": "without events, \u03bcs", "better": "lower", "plot": True},
                {"name": "with events, \u03bcs", "better": "lower", "plot": True},
                {"name": "ratio", "better": "lower"},
            ],
            "rows": rows,
            "notes": [
                f"{NUM_INSTANCES} mock instances publish one batch of events for each request. The bar is {BAR}."
            ],
        }
        table |= describe_run("kv_events_cost.py", argv, begun, load)
        args.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0 if is_met else 1


def measure(bench: Bench, case: Case, system: System, seconds: float) -> tuple[float, float]:
    """Return the microseconds of CPU for a request, and the requests per second."""
    before = cpu_seconds(system.pid)
    figures = bench._run_load(case, system, seconds)
    time.sleep(0.3)  # the router associates prompts with their blocks up to 0.2 s later
    return 1e6 * (cpu_seconds(system.pid) - before) / figures["answers"], figures["per_s"]


if __name__ == "__main__":
    sys.exit(main())
