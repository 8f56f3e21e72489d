"""Soak test: check that the router does not grow, leak connections or lose requests with 1,000 random clients.

    python benchmarks/router_soak.py [--seconds 60] [--connections 1000] [--mode pd|mixed] [--workers 1]

A real router, with one process or several workers, uses mock instances (2 prefill + 2 decode, or 4 mixed;
``native/worker.c``). Each connection sends one random request after another: for whole answers, for streams with pauses
between events, with new prompts of 32 KB, with bodies that are not JSON, and for the list of models. Some clients leave
before the answer or in the middle of a stream, and connect again.

The program ends with 1 if an answer is wrong (each is read to its end and checked), if the router's memory grows by
more than --growth-mb after the warm-up, if a request still counts at an instance when all clients have left, or if file
descriptors stay open. The warm-up takes a third of the time. It fills the stores of limited size: the records for
/admin/explain (10,000 requests) and the prefix index, which is small in this test. Memory and descriptors are those of
all the router's processes together; memory that processes share counts once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import uvloop
from router_overhead import ROLES, compiled, family, free_port, heartbeats, post, running_process

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvstore_backend.cli.report import show_progress

CHAT = "/v1/chat/completions"
EVENTS = 12
PACE_MS = 20
LONG_PROMPT_BYTES = 32_000
PREFIX_ENTRIES = 20_000
PATIENCE_S = 30.0
READY_S = 60.0
SHRINKS_WITHIN_S = 15.0
# Clients connect at random times within this time.
RAMP_S = 1.0
# The number of descriptors by which each worker may have more at the end: connections of heartbeats and probes.
FEW = 16
# Kinds of requests, and their relative frequency.
KINDS = {"whole": 40, "stream": 25, "long": 10, "bad": 5, "models": 2, "leaves at once": 6, "leaves a stream": 12}


class Lost(Exception):
    """Raised if an answer is wrong."""


class Tally:
    """Counters of the requests' outcomes."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        """Number of requests of each kind that ended properly."""
        self.lost: Counter[str] = Counter()
        """Number of the other requests, by a description of the error."""
        self.is_over = False
        """Whether clients must stop."""

    @property
    def requests(self) -> int:
        return self.ended.total() + self.lost.total()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long clients send (default 60)")
    parser.add_argument("--connections", type=int, default=1000, help="clients at once (default 1000)")
    parser.add_argument("--mode", choices=ROLES, default="pd", help="how requests are served (default pd)")
    parser.add_argument("--workers", type=int, default=1, help="processes that serve (default 1)")
    parser.add_argument(
        "--growth-mb", type=float, default=16.0, help="each worker's allowed growth after the warm-up (default 16)"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as parts:
        folder, port = Path(name), free_port()
        workers = parts.enter_context(_workers(folder, options.mode))
        log = parts.enter_context((folder / "router.log").open("w+"))
        process = parts.enter_context(running_process(_router(options, port), log))
        parts.enter_context(heartbeats(port, options.mode, workers))
        _wait_until_ready(port)
        troubles = uvloop.run(_soak(process.pid, port, options))
        log.seek(0)
        troubles += [f"the router logged: {line.rstrip()}" for line in log if "ERROR" in line][:5]
    for trouble in troubles:
        print(trouble)
    print("failed" if troubles else "passed")
    return 1 if troubles else 0


async def _soak(pid: int, port: int, options: argparse.Namespace) -> list[str]:
    """Run the clients, print the table, and return a sentence for each problem."""
    tally = Tally()
    clients = [asyncio.ensure_future(_client(port, tally, seed)) for seed in range(options.connections)]
    print(f"{'':<16}{'processes':>10}{'memory MB':>10}{'open files':>12}{'requests':>10}{'lost':>6}")
    before = _show("start", pid, tally)
    few = FEW * options.workers
    started = time.monotonic()
    with show_progress("soak", options.seconds) as report:
        while (seconds := time.monotonic() - started) < options.seconds / 3:
            report(seconds, "warm-up")
            await asyncio.sleep(min(1.0, options.seconds / 3 - seconds))
    highest = warm = _show("after warm-up", pid, tally).memory_mb
    with show_progress("soak", options.seconds) as report:
        while (seconds := time.monotonic() - started) < options.seconds:
            report(seconds, f"{tally.ended.total()} requests")
            await asyncio.sleep(min(1.0, options.seconds / 20))
            highest = max(highest, _weigh(pid).memory_mb)
    end = _show("end", pid, tally).memory_mb
    tally.is_over = True
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    left = await _left_running(port)
    # The router keeps idle connections to instances only for some seconds.
    give_up_at = time.monotonic() + SHRINKS_WITHIN_S
    while _weigh(pid).files > before.files + few and time.monotonic() < give_up_at:
        await asyncio.sleep(0.1)
    after = _show("clients closed", pid, tally)
    kinds = ", ".join(f"{count} {kind}" for kind, count in tally.ended.most_common())
    print(f"requests: {kinds}; {tally.ended.total() / options.seconds:.0f} a second; most memory {highest:.1f} MB")
    troubles = [f"lost {count} times: {how}" for how, count in tally.lost.most_common(10)]
    allowed = options.growth_mb * options.workers
    if end - warm > allowed:
        troubles.append(f"memory grew by {end - warm:.1f} MB after the warm-up; {allowed:g} MB are allowed")
    if left:
        troubles.append(f"{left} requests are still counted at instances after all clients have left")
    if after.files > before.files + few:
        troubles.append(
            f"{after.files} files are open after all clients have left; {before.files} were open at the start"
        )
    if after.processes != before.processes:
        troubles.append(
            f"the router has {after.processes} processes at the end; it had {before.processes} at the start"
        )
    return troubles


async def _client(port: int, tally: Tally, seed: int) -> None:
    """Send random requests over one connection after another, until cancelled."""
    draw = random.Random(seed)
    await asyncio.sleep(draw.random() * RAMP_S)
    while not tally.is_over:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            stays = True
            while stays and not tally.is_over:
                (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
                try:
                    stays = await asyncio.wait_for(_ask(kind, reader, writer, draw), PATIENCE_S)
                except (Lost, OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as exc:
                    tally.lost[f"{kind}: {type(exc).__name__} {exc}"] += 1
                    break
                tally.ended[kind] += 1
        finally:
            writer.transport.abort()


async def _ask(kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, draw: random.Random) -> bool:
    """Send one request and check its answer; return False if the client leaves.

    Raises:
        Lost: the answer is wrong.
    """
    is_stream = kind in ("stream", "leaves a stream")
    prompt = draw.randbytes(LONG_PROMPT_BYTES // 2).hex() if kind == "long" else f"question {draw.randrange(1000)}"
    asked: dict[str, object] = {
        "model": "mock",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": EVENTS,
    }
    if is_stream:
        asked |= {"stream": True, "seed": PACE_MS}
    body = b"{oh" if kind == "bad" else json.dumps(asked).encode()
    start = b"GET /v1/models" if kind == "models" else b"POST " + CHAT.encode()
    writer.write(start + b" HTTP/1.1\r\nhost: soak\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    if kind == "leaves at once":
        await asyncio.sleep(draw.random() * 0.01)
        return False
    head = await reader.readuntil(b"\r\n\r\n")
    expected = b"400" if kind == "bad" else b"200"
    if head.split(b" ", 2)[1] != expected:
        raise Lost(f"answered {head[:12]!r}")
    if not is_stream:
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = json.loads(await reader.readexactly(length))
        if ("error" in answer) != (kind == "bad"):
            raise Lost(f"answered {answer}")
        return True
    return await _read_stream(reader, draw.randrange(EVENTS) if kind == "leaves a stream" else None)


async def _read_stream(reader: asyncio.StreamReader, leave_after: int | None) -> bool:
    """Read a chunked event stream; return True at its end, or False after more than ``leave_after`` events."""
    stream = b""
    while size := int(await reader.readline(), 16):
        stream += await reader.readexactly(size)
        await reader.readexactly(2)
        if leave_after is not None and stream.count(b"\n\n") > leave_after:
            return False
    await reader.readexactly(2)
    if stream.count(b"\n\n") != EVENTS + 1 or not stream.endswith(b"data: [DONE]\n\n"):
        raise Lost(f"a stream of {stream.count(bytes(2))} events ended with {stream[-80:]!r}")
    return True


async def _left_running(port: int) -> int:
    """Wait some time for running requests to end; return the number that the router still counts at instances."""
    left = 0
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(100):
            registered = (await client.get(f"http://127.0.0.1:{port}/registered")).json()
            left = sum(i["running_requests"] for role in ("mixed", "prefill", "decode") for i in registered[role])
            if not left:
                break
            await asyncio.sleep(0.1)
    return left


class Weight(NamedTuple):
    """Memory and open files of all processes of the router together."""

    processes: int
    memory_mb: float
    files: int


def _show(when: str, pid: int, tally: Tally) -> Weight:
    """Print a line of the table; return the router's figures in it."""
    own = _weigh(pid)
    print(
        f"{when:<16}{own.processes:>10}{own.memory_mb:>10.1f}{own.files:>12}"
        f"{tally.requests:>10}{tally.lost.total():>6}",
        flush=True,
    )
    return own


def _weigh(pid: int) -> Weight:
    weights = []
    for each in family(pid):
        with contextlib.suppress(OSError, StopIteration):  # if the process has ended
            folder = Path(f"/proc/{each}")
            weights.append((_memory_mb(folder), len(os.listdir(folder / "fd"))))
    return Weight(len(weights), sum(memory for memory, _ in weights), sum(files for _, files in weights))


def _memory_mb(process: Path) -> float:
    """Return a process's memory in MB; a shared page counts in part ("proportional set size")."""
    lines = (process / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


def _router(options: argparse.Namespace, port: int) -> list[str]:
    splitwise = ["--splitwise"] if options.mode == "pd" else []
    bounded = ["--prefix-index-entries", str(PREFIX_ENTRIES), "--access-log", "off", "--log-level", "warn"]
    address = ["--host", "127.0.0.1", "--port", str(port), "--workers", str(options.workers)]
    return [sys.executable, "-m", "router.launch", *address, *splitwise, *bounded]


@contextlib.contextmanager
def _workers(folder: Path, mode: str) -> Iterator[list[int]]:
    """Run the mock instances; yield their ports."""
    command = [str(compiled("worker", folder)), *ROLES[mode]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [int(port) for port in process.stdout.readline().split()]
        finally:
            process.kill()


def _wait_until_ready(port: int) -> None:
    give_up_at = time.monotonic() + READY_S
    while post(port, CHAT, b"{}") != 200:
        if time.monotonic() > give_up_at:
            sys.exit(f"the router does not serve within {READY_S:g} s")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
