"""Measure how well the router knows the caches of instances, with and without their KV events.

    python benchmarks/kv_events.py [--conversations 6] [--turns 6] [--json FILE] [--vllm]
    python benchmarks/kv_events.py --cost

The program starts the router with and without ``--kv-events``, and one of our instances, or a real vLLM instance on a
CPU, with a small model and no pool. It holds conversations, turn by turn, in four situations: steady; the instance
clears its cache before each turn; the instance is killed and started again; the cache is too small for all
conversations. For each request, it compares the tokens that the router expected in the instance's own cache with the
number that the instance counts. With ``--cost`` it compares the router's CPU time instead (``kv_events_cost.py``).
A figure is the mean of the differences, without the first turn of each conversation.
``--json`` writes a table for ``scripts/results``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "vllm"))

import httpx
import kv_events_cost
from cluster import Cluster
from describe_run import describe_run

from engine.make_model import make_model
from tests.end_to_end.cluster import instance, router
from tests.support.ports import free_port
from tests.support.waiting import wait_until

SITUATIONS = ("steady", "cleared", "restarted", "evicted")
_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "omicron")


def measure(folder: Path, model: Path, situation: str, options: argparse.Namespace, *, has_events: bool) -> list[float]:
    """Return for each request of one situation the difference between expected and counted cached tokens."""
    chance = random.Random(7)
    port, events, replays = free_port(), free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replays}",
    }
    block_size = 32 if options.vllm else 16  # vLLM's attention on a CPU needs multiples of 32
    num_tokens = 4160 if situation == "evicted" else 64_000  # a sequence of the longest length needs 4,096
    differences = []
    cluster = Cluster(folder, model)
    with contextlib.ExitStack() as running, contextlib.ExitStack() as instances:
        front = running.enter_context(router(folder, *(["--kv-events"] if has_events else []), splitwise=False))

        def start() -> None:
            flags = ("--num-gpu-blocks-override", str(num_tokens // block_size), "--block-size", str(block_size))
            if options.vllm:
                events_flags = ("--kv-events-config", json.dumps({"publisher": "zmq", **config}))
                cluster.start_vllm(
                    "vllm", *flags, "--enable-prompt-tokens-details", *events_flags, connector=None, port=port
                )
                instances.callback(cluster.stop, "vllm")
                cluster.wait_ready("vllm", port)
                register(front.url, port, config)
            else:
                more = ("--router", f"127.0.0.1:{front.port}", "--kv-events-config", json.dumps(config))
                instances.enter_context(instance(folder, model, *flags, *more, port=port))
            front.wait_for(mixed=1)
            wait_until(lambda: _is_followed(front.url) or not has_events, "the events to be followed")

        start()
        prompts = [_say(chance, 120) for _ in range(options.conversations)]
        for turn in range(options.turns):
            if turn and situation == "cleared":
                httpx.post(f"http://127.0.0.1:{port}/reset_prefix_cache", trust_env=False).raise_for_status()
            elif turn == options.turns // 2 and situation == "restarted":
                instances.close()
                start()
            for number, prompt in enumerate(prompts):
                response = httpx.post(
                    f"{front.url}/v1/completions",
                    json={"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True},
                    timeout=120,
                    trust_env=False,
                )
                response.raise_for_status()
                answer, request_id = response.json(), response.headers["x-request-id"]
                if turn:
                    explained = httpx.get(f"{front.url}/admin/explain/{request_id}", trust_env=False).json()
                    expected = _read_expected(explained, answer["usage"]["prompt_tokens"])
                    details = answer["usage"].get("prompt_tokens_details") or {}  # vLLM has none without cached tokens
                    cached = details.get("own_cached_tokens", details.get("cached_tokens") or 0)
                    differences.append(abs(expected - cached))
                prompts[number] += answer["choices"][0]["text"] + " " + _say(chance, 25)
                time.sleep(0.25 if has_events else 0.0)  # until the router has applied the events
    return differences


def register(url: str, port: int, events: dict[str, Any]) -> None:
    """Register a vLLM instance and its events with the router, as ``python -m router.register`` does."""
    endpoints = {name: events[name].replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint")}
    registration = {"role": "mixed", "host_ip": "127.0.0.1", "port": port, "engine": "vllm", "kv_events": endpoints}
    httpx.post(f"{url}/register", json=registration, trust_env=False).raise_for_status()


def _say(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(count))


def _is_followed(url: str) -> bool:
    listed = httpx.get(f"{url}/registered", trust_env=False).json()
    return '"cache_known":"exact"' in json.dumps(listed, separators=(",", ":"))


def _read_expected(explained: dict[str, Any], prompt_tokens: int) -> float:
    """Return the tokens that the router expected in the own cache, as the engine counts tokens."""
    decision = explained["attempts"][-1]["decisions"][0]
    reasons = decision["reasons"]
    if "own_engine_tokens" in reasons:
        return float(reasons["own_engine_tokens"])
    from_pool: float = reasons["fetch_cost"] * reasons["pool_tokens"]
    estimated: float = decision["work"] + decision["predicted_cached_tokens"] - from_pool
    return float(reasons["own_tokens"]) * prompt_tokens / max(1.0, estimated)


def make_table(title: str, figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return a table of the figures (without events, with events) of each situation."""
    columns = [{"name": "without events"}, {"name": "with events", "plot": True}]
    rows = [
        {"name": situation, "ours": True, "values": [round(figure, 1) for figure in both]}
        for situation, both in figures.items()
    ]
    return {"section": "events", "title": title, "row": "situation", "columns": columns, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all situations and print a table; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--only", choices=SITUATIONS)
    parser.add_argument("--vllm", action="store_true", help="use vLLM (the variable VLLM names it) and not our engine")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--cost", action="store_true", help="only compare the router's CPU time for a request")
    options = parser.parse_args(argv)
    if options.cost:
        return kv_events_cost.main([])
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}  # the second for /reset_prefix_cache
    begun, load = time.gmtime(), os.getloadavg()[0]
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        make_model(model)
        for situation in [options.only] if options.only else SITUATIONS:
            both = [measure(Path(name), model, situation, options, has_events=has) for has in (False, True)]
            figures[situation] = [statistics.fmean(each) for each in both]
            print(
                f"{situation:10} without events {figures[situation][0]:7.1f}   with {figures[situation][1]:7.1f}",
                flush=True,
            )
    without, with_events = (statistics.fmean(each) for each in zip(*figures.values(), strict=True))
    print(
        f"mean       without events {without:7.1f}   with {with_events:7.1f}   "
        f"ratio {with_events / without:.2f} (bar 0.25)"
    )
    if options.json:
        engine = "A real vLLM 0.32" if options.vllm else "Our engine"
        title = f"{engine}: tokens between the expected and the actual cached tokens of a request"
        table = make_table(title, figures) | describe_run("kv_events.py", argv, begun, load)
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return int(with_events > 0.25 * without)


if __name__ == "__main__":
    sys.exit(main())
