"""Measure how much time cache, pool and hand-over save, end to end: real instances over HTTP, make_model's small model.

    python benchmarks/end_to_end.py [--quick] [--json FILE]

Each instance, the router and mooncake_master are separate processes on loopback, as in examples/cache_storage. The
program first measures conversations of several turns, 1 to 16 at once, with each way of sharing KV; then ratios that
must meet a bar. All processes share this machine's cores. While a prefill and a decode instance both work, each gets
only a part of the cores, but a mixed instance gets all. Prefill/decode thus cannot be faster here; its figures show the
cost of the hand-over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from engine.make_model import WORDS, default_folder, make_model

LONG = 32 * 64  # tokens: "2,000", in whole blocks
BLOCKS = 1200
TURNS, FIRST, QUESTION, ANSWER = 3, 600, 40, 32  # tokens of a conversation's parts
DECODED = 96  # tokens of a request for which the time of steps is measured
# An instance that cannot import TransferEngine, as if it were not installed: hand-overs go through the pool.
NO_DIRECT = (
    "import runpy, sys; sys.modules['mooncake.engine'] = None; "
    "runpy.run_module('engine.api_server', run_name='__main__', alter_sys=True)"
)


# --- the client -----------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """A streamed answer: the time of its request, and the time of each of its tokens (``time.perf_counter``)."""

    asked: float
    times: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.asked


def words(count: int, seed: str) -> str:
    """Return a prompt of ``count`` tokens: each word is one token."""
    return "".join(f" {word}" for word in random.Random(seed).choices(WORDS, k=count))


async def ask(port: int, prompt: str, max_tokens: int, on_token: Callable[[Answer], None] = lambda _: None) -> Answer:
    """Complete ``prompt`` greedily, in exactly ``max_tokens`` tokens; call ``on_token`` after each token.

    The client uses a plain socket, because it must use little CPU time.
    """
    fields = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body = orjson.dumps({"model": "m", **fields})
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    answer = Answer(time.perf_counter())
    writer.write(head.encode() + body)
    other = b""
    async for line in reader:
        if not line.startswith(b"data: {"):
            other += line
        else:
            event = orjson.loads(line[6:])
            if "error" in event:
                sys.exit(f"port {port} answered {event['error']}")
            if event["choices"] and (text := event["choices"][0]["text"]):
                answer.times.append(time.perf_counter())
                answer.text += text
                on_token(answer)
    writer.close()
    if len(answer.text.split()) != max_tokens:
        sys.exit(f"port {port} gave {len(answer.text.split())} words, not {max_tokens}:\n{answer.text}{other.decode()}")
    return answer


async def ask_all(asked: Sequence[tuple[int, str]], max_tokens: int) -> list[Answer]:
    """Call ``ask`` for several pairs of port and prompt at once."""
    return await asyncio.gather(*(ask(port, prompt, max_tokens) for port, prompt in asked))


# --- the processes --------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(sock.getsockname()[1]) for sock in sockets]


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def metric(port: int, name: str) -> float:
    """Return the value of one metric (with its labels) of an instance; 0 if the instance does not have it."""
    lines = (line.rpartition(" ") for line in get(port, "/metrics").splitlines())
    return next((float(value) for found, _, value in lines if found == name), 0.0)


class Machine:
    """A context manager that starts processes, and ends them at its end."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self._stack = contextlib.ExitStack()
        self._master = 0

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """End all processes that were started within this ``with`` block at its end."""
        outer, self._stack = self._stack, contextlib.ExitStack()
        try:
            with self._stack:
                yield
        finally:
            self._stack = outer

    def master(self) -> None:
        """Start the pool's master, for all instances with ``pool``."""
        installed = Path(sys.executable).with_name("mooncake_master")
        program = str(installed) if installed.exists() else shutil.which("mooncake_master")
        if program is None:
            sys.exit("mooncake_master is not installed: pip install '/path/to/this/repository[mooncake]'")
        self._master, metrics = free_ports(2)
        flags = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        flags += [f"--rpc_port={self._master}", f"--metrics_port={metrics}"]
        self._start("master", [program, *flags], {}, lambda: bool(get(metrics, "/health")))

    def router(self) -> int:
        """Start a router for prefill and decode instances; return its port."""
        [port] = free_ports(1)
        argv = [sys.executable, "-m", "router.launch", "--host", "127.0.0.1", "--port", str(port), "--splitwise"]
        self._start("router", argv, {}, lambda: bool(get(port, "/registered_number")))
        return port

    def instance(self, *flags: str, pool: bool = False, direct: bool = True, router: int = 0) -> int:
        """Start an instance, and wait until it is ready and, with ``pool``, has opened the pool; return its port."""
        [port] = free_ports(1)
        argv = [sys.executable, *(["-m", "engine.api_server"] if direct else ["-c", NO_DIRECT])]
        argv += ["--model", str(self._model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        argv += ["--max-model-len", "4096", "--max-num-seqs", "16", "--num-gpu-blocks-override", str(BLOCKS), *flags]
        env = {"FD_LOG_DIR": str(self._folder / f"log_{port}")}
        if router:
            argv += ["--router", f"127.0.0.1:{router}"]
        if pool:
            argv += ["--kvcache-storage-backend", "mooncake"]
            env["MOONCAKE_MASTER_SERVER_ADDR"] = f"127.0.0.1:{self._master}"
            env |= {"MOONCAKE_METADATA_SERVER": "P2PHANDSHAKE", "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1"}
            env |= {"MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1GiB"}
        self._start(f"instance {port}", argv, env, lambda: metric(port, "kvstore_pool_open") == pool)
        return port

    def pair(self, *, pool: bool) -> tuple[int, list[int]]:
        """Start a router with a prefill and a decode instance; return its port and their ports."""
        router = self.router()
        output = ["--enable-output-caching"] if pool else []
        ports = [
            self.instance("--splitwise-role", role, *flags, pool=pool, direct=not pool, router=router)
            for role, flags in (("prefill", []), ("decode", output))
        ]

        def complete() -> bool:
            numbers = json.loads(get(router, "/registered_number"))
            return bool(numbers["prefill"] == numbers["decode"] == 1)

        until(complete, "the pair to register")
        return router, ports

    def _start(self, name: str, argv: Sequence[str], env: dict[str, str], is_ready: Callable[[], bool]) -> None:
        log = self._folder / f"{name}.out"
        with log.open("wb") as output:
            process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env})
        self._stack.callback(_end, process)

        def ready() -> bool:
            if process.poll() is not None:
                sys.exit(f"{name} ended with exit code {process.returncode}:\n{log.read_text()[-2000:]}")
            try:
                get_ready = is_ready()
            except OSError:
                return False
            return get_ready

        until(ready, f"{name} to be ready")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], event: str, deadline: float = 120.0) -> None:
    give_up_at = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > give_up_at:
            sys.exit(f"waited {deadline:g} s for {event}")
        time.sleep(0.02)


def wait_until_idle(ports: Sequence[int]) -> None:
    """Wait until the instances have saved all blocks, as they do while a person reads an answer."""
    for port in ports:
        until(lambda port=port: metric(port, "kvstore_pending_save_blocks") == 0, "the end of all saves")  # type: ignore[misc]


# --- conversations --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way of sharing KV.

    Attributes:
        fronts: ports of the servers to which the client sends successive turns of a conversation, one after another.
        ports: ports of all instances.
    """

    title: str
    fronts: Sequence[int]
    ports: Sequence[int]


@dataclass(frozen=True)
class Talk:
    """The figures of one way of sharing KV: medians of the seconds to the first token, and tokens per second."""

    way: str
    at_once: int
    first_ttft: float
    later_ttft: float
    tokens_per_second: float


def converse(way: Way, at_once: int, about: str) -> Talk:
    """Hold ``at_once`` conversations at the same time, turn by turn; their texts depend on ``about``."""
    texts = [words(FIRST, f"{way.title} {about} {i}") for i in range(at_once)]
    ttfts: list[list[float]] = []
    seconds = 0.0
    for turn in range(TURNS):
        wait_until_idle(way.ports)

        start = time.perf_counter()
        answers = asyncio.run(
            ask_all([(way.fronts[(i + turn) % len(way.fronts)], t) for i, t in enumerate(texts)], ANSWER)
        )
        seconds += time.perf_counter() - start
        ttfts.append([answer.ttft for answer in answers])
        texts = [
            text + answer.text + words(QUESTION, f"{way.title} {about} {i} {turn}")
            for i, (text, answer) in enumerate(zip(texts, answers, strict=True))
        ]
    later = [ttft for turn in ttfts[1:] for ttft in turn]
    return Talk(
        way.title,
        at_once,
        statistics.median(ttfts[0]),
        statistics.median(later),
        at_once * TURNS * ANSWER / seconds,
    )


# --- the bars -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One figure and its bar: the ratio that it must reach or must not exceed."""

    name: str
    figures: str
    ratio: float
    bar: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.bar if self.at_least else self.ratio <= self.bar


def ask_one(port: int, prompt: str, max_tokens: int = 1) -> Answer:
    return asyncio.run(ask(port, prompt, max_tokens))


def pool_hit(one: int, other: int, rounds: int) -> Bar:
    """Measure the TTFT of a long prompt that one instance computes, and another one then loads from the pool."""
    cold, hit = [], []
    for i in range(rounds + 1):
        prompt = words(LONG, f"pool {i}")
        first = ask_one(one, prompt)
        wait_until_idle([one])
        before = metric(other, "kvstore_pool_cached_tokens_total")
        second = ask_one(other, prompt)
        got = metric(other, "kvstore_pool_cached_tokens_total") - before
        if got < LONG - 64 or second.text != first.text:
            sys.exit(f"the pool gave {got:g} tokens of {LONG}, and {second.text!r} instead of {first.text!r}")
        cold.append(first.ttft)
        hit.append(second.ttft)
    a, b = statistics.median(cold[1:]), statistics.median(hit[1:])  # the first warms connections up
    return Bar(f"TTFT of {LONG:,} tokens: pool hit / cold", f"{1e3 * b:.0f} / {1e3 * a:.0f} ms", b / a, 0.15)


def direct(router: int, mixed: int, rounds: int) -> Bar:
    """Measure the TTFT of a long prompt with a pair that hands over directly, and with a mixed instance."""
    times: dict[int, list[float]] = {router: [], mixed: []}
    for i in range(rounds + 1):
        for port, seen in times.items():
            seen.append(ask_one(port, words(LONG, f"direct {port} {i}"), 2).ttft)
    pair, alone = (statistics.median(seen[1:]) for seen in times.values())
    figures = f"{1e3 * pair:.0f} / {1e3 * alone:.0f} ms"
    return Bar(f"TTFT of {LONG:,} tokens: P/D direct / mixed", figures, pair / alone, 1.15)


def throughput(port: int, at_once: int, seed: str) -> float:
    """Return the tokens per second of ``at_once`` sequences, in the time in which all of them decode."""

    answers = asyncio.run(ask_all([(port, words(256, f"{seed} {i}")) for i in range(at_once)], DECODED))
    begin = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    return sum(begin < at <= end for answer in answers for at in answer.times) / (end - begin)


def batching(port: int, rounds: int) -> Bar:
    """Measure the decode throughput with 16 sequences and with one."""
    rates: dict[int, list[float]] = {1: [], 16: []}
    for i in range(rounds + 1):
        for at_once, seen in rates.items():
            seen.append(throughput(port, at_once, f"throughput {i} {at_once}"))
    one, many = (statistics.median(seen[1:]) for seen in rates.values())
    return Bar(
        "decode throughput: 16 sequences / 1", f"{many:.0f} / {one:.0f} tokens/s", many / one, 6.0, at_least=True
    )


def undisturbed(one: int, other: int, rounds: int) -> Bar:
    """Measure the time between tokens of four decoding sequences, with and without a concurrent load from the pool."""
    prompts = [words(LONG + 1, f"load {i}") for i in range(rounds)]
    for prompt in prompts:
        ask_one(one, prompt)
        wait_until_idle([one])
    calm: list[float] = []
    loading: list[float] = []

    async def run(prompt: str, seed: int) -> None:
        midway = asyncio.Event()
        decodes = [
            asyncio.create_task(
                ask(
                    other,
                    words(256, f"decode {seed} {i}"),
                    DECODED,
                    lambda a: midway.set() if len(a.times) == 40 else None,
                )
            )
            for i in range(4)
        ]
        await midway.wait()
        loaded = await ask(other, prompt, 1)
        for decode in decodes:
            times = (await decode).times
            for start, end in itertools.pairwise(times[8:]):
                overlaps = start < loaded.times[0] and end > loaded.asked
                (loading if overlaps else calm).append(end - start)

    before = metric(other, "kvstore_pool_cached_tokens_total")
    for i, prompt in enumerate(prompts):
        asyncio.run(run(prompt, i))
    if (got := metric(other, "kvstore_pool_cached_tokens_total") - before) < rounds * LONG:
        sys.exit(f"the pool gave {got:g} tokens of {rounds * LONG}")
    a, b = statistics.median(calm), statistics.mean(loading)
    # The figure with loads is a mean, so that a single long step among several counts.
    return Bar(f"decode step: loading {LONG:,} tokens / not", f"{1e3 * b:.1f} / {1e3 * a:.1f} ms", b / a, 1.3)


# --- the run --------------------------------------------------------------------------------------------------


def run(machine: Machine, *, quick: bool) -> tuple[list[Talk], list[Bar | str]]:
    """Measure everything."""
    rounds, loads = (3, (1, 16)) if quick else (7, (1, 4, 16))
    talks: list[Talk] = []
    bars: list[Bar | str] = []

    def talk(way: Way) -> None:
        converse(way, 1, "warming up")
        talks.extend(converse(way, at_once, str(at_once)) for at_once in loads)

    machine.master()
    with machine.group():
        port = machine.instance("--no-enable-prefix-caching")
        talk(Way("(a) no cache", [port], [port]))
    with machine.group():
        port = machine.instance()
        talk(Way("(b) own prefix cache", [port], [port]))
        bars.append(batching(port, rounds))
        router, ports = machine.pair(pool=False)
        ask_one(router, words(LONG, "is it direct?"), 2)
        if metric(ports[1], 'kvstore_handed_over_total{way="direct"}') == 1:
            bars.append(direct(router, port, rounds))
        else:
            bars.append("P/D direct: not available")
    with machine.group():
        one, other = ports = [machine.instance("--enable-output-caching", pool=True) for _ in range(2)]
        talk(Way("(c) pool, two mixed in turn", ports, ports))
        bars.append(pool_hit(one, other, rounds))
        bars.append(undisturbed(one, other, rounds))
    with machine.group():
        router, ports = machine.pair(pool=True)
        talk(Way("(d) P/D through the pool", [router], ports))
    if not isinstance(bars[1], str):
        with machine.group():
            router, ports = machine.pair(pool=False)
            talk(Way("(e) P/D direct", [router], ports))
    return talks, bars


def show(talks: Sequence[Talk], bars: Sequence[Bar | str]) -> None:
    """Print the tables."""
    print(f"conversations of {TURNS} turns: {FIRST} tokens, then {QUESTION} more each; answers of {ANSWER}")
    print(f"{'':<30}{'at once':>9}{'first TTFT':>12}{'later TTFT':>12}{'tokens/s':>10}")
    for talk in talks:
        first, later = (f"{1e3 * ttft:.0f} ms" for ttft in (talk.first_ttft, talk.later_ttft))
        print(f"{talk.way:<30}{talk.at_once:>9}{first:>12}{later:>12}{talk.tokens_per_second:>10.0f}")
    if not any(talk.way.startswith("(e)") for talk in talks):
        print(f"{'(e) P/D direct':<30}  not available")
    print(f"\n{'':<46}{'':>24}{'ratio':>8}{'bar':>9}")
    for bar in bars:
        if isinstance(bar, str):
            print(bar)
            continue
        sign, missed = (">=" if bar.at_least else "<="), "" if bar.is_met else "  MISSED"
        print(f"{bar.name:<46}{bar.figures:>24}{bar.ratio:>8.2f}{f'{sign} {bar.bar:g}':>9}{missed}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure how much time cache, pool and hand-over save.")
    parser.add_argument("--quick", action="store_true", help="fewer loads and repeats")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args(argv)
    model = default_folder()
    make_model(model)
    with tempfile.TemporaryDirectory() as folder, Machine(Path(folder), model) as machine:
        talks, bars = run(machine, quick=args.quick)
    show(talks, bars)
    if args.json:
        figures = {
            "talks": [asdict(talk) for talk in talks],
            "bars": [bar if isinstance(bar, str) else asdict(bar) | {"is_met": bar.is_met} for bar in bars],
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
