"""Measure the gain of the pool: on a conversation trace, on a trace of agents, by prompt length, and by router.

    python benchmarks/pool_gain.py conversations --trace ../shared/traces/conversation_trace.jsonl --json FILE
    python benchmarks/pool_gain.py agents --json FILE
    python benchmarks/pool_gain.py lengths --json FILE
    python benchmarks/pool_gain.py routers --peers-venv /tmp/peers --json FILE

On the traces, four requests at a time go through our router to two instances of our engine with the small checkpoint,
without any cache, with their own caches, and with their own caches and a Mooncake pool. Prompts are scaled down, and
so are the own caches: each has space for a quarter of the different blocks, at least for 288. ``agents`` uses
``agent_trace.py``. ``lengths`` measures the time to first token of prompts that one instance computes and the other one
loads. ``routers`` sends the conversation trace through our router, and through sglang-router, smg and vllm-router with
their policy cache_aware, to instances with and without the pool. Each process has one compute thread. ``--json``
writes a table for ``scripts/results``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_trace import make_trace
from describe_run import describe_run
from router_overhead import PEERS, READY_S, free_port, peer_command, post, running_process

from engine.make_model import WORDS, make_model
from tests.end_to_end.cluster import instance, router
from tests.support.mooncake import mooncake_master
from tests.support.trace import pick_conversations, read_trace

AT_ONCE = 4
MOST_BLOCKS = 80
LENGTHS = (64, 128, 256, 512, 1024, 2048, 3072)
ROUNDS = 7
ENGINE_BLOCK = 16
MAX_TOKENS = 3800
MIN_OWN_BLOCKS = 288  # more than the longest prompt needs
BEGUN = 300
WAYS = {"no cache": (False, False), "own caches": (True, False), "own caches and the pool": (True, True)}
OUR_POLICIES = ("pool_aware", "cache_aware")
COLUMNS = [
    {"name": "cached tokens, %", "better": "higher", "plot": True},
    {"name": "mean TTFT, ms", "better": "lower", "plot": True},
    {"name": "median TTFT, ms", "better": "lower"},
    {"name": "third quartile of TTFT, ms", "better": "lower"},
    {"name": "requests/s", "better": "higher"},
]

Prompt = Sequence[int]


def write_text(blocks: Prompt, block_tokens: int) -> str:
    """Return a prompt that has these blocks: one word for each token. Equal blocks have equal words."""
    return "".join(f" {word}" for block in blocks for word in random.Random(block).choices(WORDS, k=block_tokens))


def ask(url: str, text: str) -> tuple[float, int, int]:
    """Send a prompt; return the seconds to the first token, and its numbers of cached tokens and of all tokens."""
    body = {"model": "any", "prompt": text, "max_tokens": 4, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    first, usage = 0.0, dict[str, Any]()
    begun = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300, trust_env=False) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begun
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    return first, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def choose_flags(prompts: Sequence[Prompt], block_tokens: int) -> list[str]:
    """Return the flags of instances with own caches that have space for a quarter of the different blocks."""
    own_blocks = len({block for prompt in prompts for block in prompt}) * block_tokens // ENGINE_BLOCK // 4
    size = ["--block-size", str(ENGINE_BLOCK), "--num-gpu-blocks-override", str(max(own_blocks, MIN_OWN_BLOCKS))]
    return [*size, "--served-model-name", "any"]


def send_prompts(url: str, prompts: Sequence[Prompt], block_tokens: int) -> list[Any]:
    """Send all prompts, ``AT_ONCE`` at a time; return the figures of a table's row."""
    ask(url, write_text([-1], block_tokens))
    begun = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda prompt: ask(url, write_text(prompt, block_tokens)), prompts))
    seconds = time.perf_counter() - begun
    times = [1000 * first for first, _, _ in answers]
    cached, tokens = (sum(answer[number] for answer in answers) for number in (1, 2))
    figures = [round(statistics.fmean(times)), round(statistics.median(times)), round(statistics.quantiles(times)[2])]
    return [round(100 * cached / tokens, 1), *figures, round(len(answers) / seconds, 2)]


def replay(
    prompts: Sequence[Prompt], block_tokens: int, model: Path, folder: Path, way: str, policy: str = "pool_aware"
) -> list[Any]:
    """Send all prompts through the router; return the figures of the table's row."""
    has_caches, has_pool = WAYS[way]
    flags = choose_flags(prompts, block_tokens) + ([] if has_caches else ["--no-enable-prefix-caching"])
    with contextlib.ExitStack() as running:
        master = running.enter_context(mooncake_master(folder / "master.log")) if has_pool else None
        front = running.enter_context(router(folder, "--policy", policy, splitwise=False))
        for _ in range(2):
            running.enter_context(instance(folder, model, *flags, "--router", f"127.0.0.1:{front.port}", master=master))
        front.wait_for(mixed=2)
        return send_prompts(front.url, prompts, block_tokens)


def replay_by_peer(
    prompts: Sequence[Prompt], block_tokens: int, model: Path, folder: Path, way: str, name: str, venv: Path
) -> list[Any]:
    """Send all prompts through another router; return the figures of the table's row."""
    flags = choose_flags(prompts, block_tokens)
    with contextlib.ExitStack() as running:
        master = running.enter_context(mooncake_master(folder / "master.log")) if WAYS[way][1] else None
        ports = [running.enter_context(instance(folder, model, *flags, master=master)).port for _ in range(2)]
        port = free_port()
        log = running.enter_context((folder / f"{name}.log").open("w"))
        running.enter_context(running_process(peer_command(name, "prefix4", port, ports, venv), log))
        deadline = time.monotonic() + READY_S
        body = json.dumps({"model": "any", "prompt": "a", "max_tokens": 1}).encode()
        while post(port, "/v1/completions", body) != 200:
            if time.monotonic() > deadline:
                sys.exit(f"{name} does not answer: {Path(log.name).read_text()[-300:]}")
            time.sleep(0.2)
        time.sleep(3)  # it looks for instances every second, and may know only one of them
        return send_prompts(f"http://127.0.0.1:{port}", prompts, block_tokens)


def measure_trace(
    prompts: Sequence[Prompt], block_tokens: int, title: str, spread: str, folder: Path
) -> dict[str, Any]:
    """Measure a trace with each kind of cache; return the table. ``spread`` is the table's note on variation."""
    model = folder / "model"
    make_model(model)
    rows = []
    for way in WAYS:
        values = replay(prompts, block_tokens, model, folder, way)
        print(way, values, flush=True)
        rows.append({"name": way, "ours": way.endswith("pool"), "values": values})
    return {"section": "cache", "title": title, "row": "caches", "columns": COLUMNS, "rows": rows, "spread": spread}


def measure_routers(
    prompts: Sequence[Prompt], block_tokens: int, spread: str, folder: Path, venv: Path, runs: int
) -> dict[str, Any]:
    """Return the table of a trace by router: the median of several runs for each figure."""
    model = folder / "model"
    make_model(model)
    systems = list(itertools.product(("own caches", "own caches and the pool"), (*OUR_POLICIES, *PEERS)))
    measured: dict[tuple[str, str], list[list[Any]]] = {system: [] for system in systems}
    for number in range(runs):
        for way, name in systems[:: -1 if number % 2 else 1]:
            if name in OUR_POLICIES:
                values = replay(prompts, block_tokens, model, folder, way, name)
            else:
                values = replay_by_peer(prompts, block_tokens, model, folder, way, name, venv)
            print(way, name, values, flush=True)
            measured[way, name].append(values)
    rows = []
    for (way, name), values_of_runs in measured.items():
        values = [statistics.median(figures) for figures in zip(*values_of_runs, strict=True)]
        is_ours = name in OUR_POLICIES
        title = f"{f'kvrouter, {name}' if is_ours else name}, {way}"
        rows.append({"name": title, "ours": is_ours, "values": values})
    return {
        "section": "routers",
        "title": "Two real instances",
        "row": "router and caches",
        "columns": COLUMNS,
        "rows": rows,
        "notes": [
            "pool_aware is our default. The peers have their default thresholds of load, which four requests at a time "
            "do not reach."
        ],
        "spread": spread,
    }


def measure_lengths(folder: Path) -> dict[str, Any]:
    """Return the table of times by prompt length."""
    model = folder / "model"
    make_model(model)
    rows = []
    with contextlib.ExitStack() as running:
        master = running.enter_context(mooncake_master(folder / "master.log"))
        first, second = (
            running.enter_context(
                instance(
                    folder, model, "--block-size", str(ENGINE_BLOCK), "--num-gpu-blocks-override", "4096", master=master
                )
            )
            for _ in range(2)
        )
        num_missed = 0
        for length in LENGTHS:
            computed, loaded = [], []
            for number in range(ROUNDS + 1):  # the first one warms up
                text = write_text([1000 * length + number], length)
                first_seconds = ask(first.url, text)[0]
                first.wait_for_saves()
                seconds, cached, tokens = ask(second.url, text)
                if number:
                    computed.append(first_seconds)
                    if cached >= tokens - 2 * ENGINE_BLOCK:
                        loaded.append(seconds)
            num_missed += ROUNDS - len(loaded)
            values = [round(1000 * statistics.median(times), 1) if times else None for times in (computed, loaded)]
            print(length, values, f"{len(loaded)} of {ROUNDS} loaded", flush=True)
            rows.append({"name": str(length), "ours": True, "values": values})
    return {
        "section": "lengths",
        "title": "TTFT by prompt length",
        "row": "prompt tokens",
        "columns": [{"name": "computed, ms"}, {"name": "loaded, ms"}],
        "rows": rows,
        "lines": True,
        "spread": f"medians of {ROUNDS}; {num_missed} prompts that were not loaded are left out",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("conversations", "agents", "lengths", "routers"))
    parser.add_argument("--trace", type=Path, default=Path("../shared/traces/conversation_trace.jsonl"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--peers-venv", type=Path, help="environment of the other routers, as for router_overhead.py")
    parser.add_argument("--runs", type=int, default=5, help="runs of each router (default 5)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    begun, load = time.gmtime(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.part == "lengths":
            table = measure_lengths(folder)
        elif options.part == "agents":
            rows = make_trace(sessions=40, scale=0.01, block_tokens=ENGINE_BLOCK)
            short = [row["hash_ids"] for row in rows if row["input_length"] < MAX_TOKENS]
            prompts = short[BEGUN : BEGUN + options.requests]  # when many sessions have begun
            spread = f"{len(prompts)} successive requests, {AT_ONCE} at a time, tokens scaled by 0.01; one run each"
            table = measure_trace(prompts, ENGINE_BLOCK, "Agents", spread, folder)
        else:
            picked = pick_conversations(read_trace(options.trace), options.requests, MOST_BLOCKS)
            spread = f"{len(picked)} requests, {AT_ONCE} at a time, blocks of 512 tokens scaled to 32; "
            prompts = [row.hash_ids for row in picked]
            if options.part == "routers":
                if options.peers_venv is None:
                    parser.error("routers needs --peers-venv")
                venv = options.peers_venv.absolute()
                spread += f"medians of {options.runs} runs"
                table = measure_routers(prompts, 32, spread, folder, venv, options.runs)
            else:
                table = measure_trace(prompts, 32, "Conversations", spread + "one run each", folder)
    if options.json:
        options.json.write_text(json.dumps(table | describe_run("pool_gain.py", argv, begun, load), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
