"""Measure the gain and the cost of the pool for vLLM: two real instances on CPU with our connector, one without.

    python benchmarks/vllm_connector.py [--prompts 100] [--pairs 9] [--json FILE] [--only PART] [--memory staged]
        [--flags="--max-num-seqs 4"] [--family gemma3]

Run it with a Python that has this project and mooncake_master. The environment variable VLLM names the program ``vllm``
if it is not on the PATH. Parts: ``hits``, ``answers``, ``throughput``, ``strangers``. Each instance is a separate
process with one compute thread. Answers are greedy; they are compared, token by token, with those of the instance
without connector. The model is that of make_model: its best token leads clearly, so that answers do not depend on the
division of the work into steps. ``--memory staged`` moves blocks through the stand-in for a GPU's memory. ``--family``
uses a small random model of another kind instead (``hybrid_models.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "vllm")]

from cluster import Cluster, Connector, _vllm, fail, find_model, metric, namespaces, scratch  # noqa: E402
from hybrid_models import FAMILIES  # noqa: E402

BLOCK = 128
LONG = 2000  # tokens
FIRST_WORD, LAST_WORD = 300, 1600  # token ids that are whole words in make_model's vocabulary
# The parts, with the instances that each needs.
PARTS = {
    "hits": ("first", "second"),
    "answers": ("plain", "first", "second"),
    "throughput": ("plain", "first"),
    "strangers": ("first",),
}
MIN_THROUGHPUT = 0.97  # bar: throughput with connector / without

Prompt = list[int]


def prompt(length: int, seed: str) -> Prompt:
    """Return random token ids; the same seed gives the same ids."""
    return random.Random(seed).choices(range(FIRST_WORD, LAST_WORD), k=length)


def mixed_prompts(count: int, seed: str) -> list[Prompt]:
    """Return prompts of 20 to 2,000 tokens; every third one continues an earlier one, so that they share prefixes."""
    chooser = random.Random(seed)
    prompts: list[Prompt] = []
    for number in range(count):
        fresh = prompt(int(20 * 100 ** chooser.random()), f"{seed} {number}")
        old = chooser.choice(prompts) if number % 3 == 2 else []
        prompts.append((old + fresh)[:LONG])
    return prompts


class Client:
    """A client of the instances. An incomplete answer counts as failed."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=64), trust_env=False)

    async def answer(self, port: int, asked: Prompt, max_tokens: int = 16) -> list[int] | None:
        """Send a prompt; return the answer's token ids, or None if the request failed."""
        body = {"model": "m", "prompt": asked, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        try:
            response = await self._http.post(
                f"http://127.0.0.1:{port}/v1/completions", json={**body, "return_token_ids": True}
            )
            choice = response.raise_for_status().json()["choices"][0]
        except (httpx.HTTPError, KeyError, ValueError):
            return None
        return choice["token_ids"] if choice["finish_reason"] == "length" else None

    async def answers(self, ports: Sequence[int], asked: Sequence[Prompt], at_once: int = 4) -> list[list[int] | None]:
        """Send prompt ``i`` to ``ports[i % len(ports)]``, ``at_once`` prompts at the same time; return all answers."""
        turn = asyncio.Semaphore(at_once)

        async def one(i: int) -> list[int] | None:
            async with turn:
                return await self.answer(ports[i % len(ports)], asked[i])

        return await asyncio.gather(*(one(i) for i in range(len(asked))))

    async def ttft(self, port: int, asked: Prompt) -> float:
        """Send a prompt and return the seconds to the first token."""
        body = {"model": "m", "prompt": asked, "max_tokens": 2, "temperature": 0, "stream": True}
        start = time.perf_counter()
        async with self._http.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    return time.perf_counter() - start
        raise AssertionError(f"port {port} streamed nothing")


async def until(condition: Callable[[], object], event: str, seconds: float = 60.0) -> None:
    """Wait until ``condition`` is true; end the program if that takes longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            fail(f"{event}: not within {seconds:g} s")
        await asyncio.sleep(0.05)


def blocks(port: int, operation: str, outcome: str) -> float:
    """Return the number of blocks that an instance's connector counted for an operation and outcome."""
    return metric(port, "vllm:kvstore_blocks_total", f'operation="{operation}"', f'outcome="{outcome}"')


def ended(port: int, operation: str) -> float:
    """Return the number of blocks with an ended load or save, with any outcome."""
    return sum(blocks(port, operation, outcome) for outcome in ("ok", "failed", "dropped"))


class Bench:
    """The parts of the benchmark, with one running cluster."""

    def __init__(self, cluster: Cluster, ports: Mapping[str, int], options: argparse.Namespace) -> None:
        self._cluster = cluster
        self._plain, self._first, self._second = (ports.get(name, 0) for name in ("plain", "first", "second"))
        self._num_prompts = options.prompts
        self._num_pairs = options.pairs
        self._client = Client()
        self.figures: dict[str, object] = {}
        self.missed: list[str] = []

    async def hits(self) -> None:
        """Measure the TTFT of prompts of 2,000 tokens that the first instance computes and the second one loads."""
        full = (LONG - 1) // BLOCK
        await self._client.ttft(self._first, prompt(LONG, "warm"))
        await until(lambda: ended(self._first, "save") >= full, "saving")
        await self._client.ttft(self._second, prompt(LONG, "warm too"))
        cold: list[float] = []
        hit: list[float] = []
        for number in range(24):
            asked = prompt(LONG, f"hit {number}")
            saved, lost = ended(self._first, "save"), self._lost()
            computed = await self._client.ttft(self._first, asked)
            await self._settle(self._first, "save", saved + full)
            loads, hits = ended(self._second, "load"), metric(self._second, "vllm:external_prefix_cache_hits_total")
            answered = await self._client.ttft(self._second, asked)
            hits = metric(self._second, "vllm:external_prefix_cache_hits_total") - hits
            if hits:
                await self._settle(self._second, "load", loads + 1)
            if self._lost() > lost:
                continue  # the machine was busy with other work, so that transfers missed their deadlines
            if hits != full * BLOCK:
                fail(f"vLLM's counter says that {hits:g} tokens were loaded, not {full * BLOCK}")
            cold.append(computed)
            hit.append(answered)
            if len(hit) == 10:
                break
        else:
            fail(f"of 24 prompts only {len(hit)} were saved and loaded within the pool's deadline")
        ratio = statistics.median(hit) / statistics.median(cold)
        self.figures["hits"] = {
            "tokens loaded of 2,000, by vLLM's counter": full * BLOCK,
            "TTFT cold, median s": round(statistics.median(cold), 3),
            "TTFT full hit, median s": round(statistics.median(hit), 3),
            "hit / cold": round(ratio, 3),
        }
        self._expect(ratio <= 0.3, f"TTFT of a full hit is {ratio:.2f} of cold, more than 0.3")

    async def _settle(self, port: int, operation: str, at_least: float) -> None:
        """Wait until an instance has counted ``at_least`` blocks, and the count has not changed for 0.5 s.

        The count may be higher: a model with several groups of layers has one block in each group for the same tokens.
        """
        await until(lambda: ended(port, operation) >= at_least, operation)
        count = -1.0
        while ended(port, operation) != count:
            count = ended(port, operation)
            await asyncio.sleep(0.5)

    def _lost(self) -> float:
        """Return the blocks that were not saved or not loaded."""
        return sum(
            blocks(port, operation, outcome)
            for port, operation in ((self._first, "save"), (self._second, "load"))
            for outcome in ("failed", "dropped")
        )

    async def answers(self) -> None:
        """Check that all three instances give the same answers, while the second one loads blocks of the first."""
        asked = mixed_prompts(self._num_prompts, "answers")
        truth = await self._client.answers([self._plain], asked)
        loaded = blocks(self._second, "load", "ok")
        known = {kind: metric(self._second, f"vllm:{kind}prefix_cache_hits_total") for kind in ("", "external_")}
        for name, port in (("first", self._first), ("second", self._second)):
            self._compare(name, truth, await self._client.answers([port], asked))
        loaded = blocks(self._second, "load", "ok") - loaded
        hits = sum(
            metric(self._second, f"vllm:{kind}prefix_cache_hits_total") - before for kind, before in known.items()
        )
        allowed = sum((len(each) - 1) // BLOCK * BLOCK for each in asked)
        self.figures["answers"] = {
            "prompts": len(asked),
            "equal": len(asked),
            "blocks the second loaded": loaded,
            "tokens that the second did not compute, of those in full blocks": round(hits / allowed, 3),
        }
        if not loaded:
            fail("the second instance loaded nothing")

    async def throughput(self) -> None:
        """Measure the throughput of new prompts, alternately with and without connector."""
        rates: dict[int, list[float]] = {self._plain: [], self._first: []}
        names = {self._plain: "plain", self._first: "first"}
        spent: dict[int, list[float]] = {port: [] for port in rates}
        for number in range(1 + self._num_pairs):
            for port in list(rates)[:: 1 if number % 2 else -1]:
                asked = [prompt(700, f"throughput {port} {number} {i}") for i in range(12)]
                start, cpu = time.perf_counter(), self._cluster.cpu_seconds(names[port])
                answers = await self._client.answers([port], asked, at_once=6)
                rates[port].append(sum(map(len, filter(None, answers))) / (time.perf_counter() - start))
                spent[port].append(self._cluster.cpu_seconds(names[port]) - cpu)
        # Ratios of consecutive measurements, because other work on the machine changes over time. The first pair is a
        # warm-up and does not count.
        ratios, costs = (
            [mine / others for mine, others in zip(values[self._first][1:], values[self._plain][1:], strict=True)]
            for values in (rates, spent)
        )
        ratio = statistics.median(ratios)
        self.figures["throughput"] = {
            "tokens/s without": round(statistics.median(rates[self._plain][1:]), 1),
            "tokens/s with, 0 % hits": round(statistics.median(rates[self._first][1:]), 1),
            "with / without, median of pairs": round(ratio, 3),
            "processor time with / without, median of pairs": round(statistics.median(costs), 3),
            "pair by pair": [round(each, 3) for each in sorted(ratios)],
            "processor time pair by pair": [round(each, 3) for each in sorted(costs)],
        }
        self._expect(ratio >= MIN_THROUGHPUT, f"throughput with the connector is {ratio:.3f} of without")

    async def strangers(self) -> None:
        """Check that instances with another dtype or block size find no blocks of the first instance in the pool."""
        asked = [prompt(LONG, f"stranger {i}") for i in range(4)]
        await self._client.answers([self._first], asked)
        found: dict[str, object] = {}
        seen = {"first": namespaces(self._first)}
        for name, *flags in (("bfloat16", "--dtype", "bfloat16"), ("block-64", "--block-size", "64")):
            port = self._cluster.start_vllm(name, *flags)
            await asyncio.to_thread(self._cluster.wait_ready, name, port)
            await until(lambda: blocks(self._first, "save", "ok") > 0, "saving")
            await self._client.answers([port], asked)
            await until(partial(blocks, port, "save", "ok"), "saving")
            seen[name] = namespaces(port)
            found[f"blocks that {name} found"] = blocks(port, "lookup", "ok") + blocks(port, "load", "ok")
            if found[f"blocks that {name} found"]:
                fail(f"the instance with {' '.join(flags)} found blocks of another")
            self._cluster.stop(name)
        self.figures["strangers"] = {**found, "namespaces": {name: sorted(spaces) for name, spaces in seen.items()}}
        if len(set.union(*seen.values())) != len(seen):
            fail(f"three kinds of instances, but the statistics name {seen}")

    def _expect(self, holds: bool, sentence: str) -> None:
        """Note ``sentence`` if a bar was missed; the other parts still run."""
        if not holds:
            self.missed.append(sentence)

    def _compare(self, name: str, truth: Sequence[object], answers: Sequence[object]) -> None:
        if failed := list(answers).count(None):
            fail(f"{failed} requests to the {name} failed")
        if other := sum(one != two for one, two in zip(truth, answers, strict=True)):
            fail(f"{other} of {len(truth)} answers of the {name} differ")


async def run(bench: Bench, parts: Sequence[str]) -> None:
    """Run the parts in this order, and print the figures of each."""
    for part in parts:
        start = time.monotonic()
        await getattr(bench, part)()
        print(f"{part} ({time.monotonic() - start:.0f} s): {json.dumps(bench.figures[part], indent=2)}", flush=True)


def make_parser(text: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of all benchmarks with real vLLM.

    Args:
        text: the program's docstring; its first line becomes the description.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100, help="number of prompts to compare (default 100)")
    parser.add_argument(
        "--flags", type=shlex.split, default=[], help="further flags of vLLM for all instances, in one string"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--family", choices=FAMILIES, help="a small random model; default: this project's own model")
    return parser


def choose_model(family: str | None) -> Path:
    """Return the checkpoint of a family of ``hybrid_models.py``, which is made if it is missing.

    For None, return this project's own small checkpoint.
    """
    if family is None:
        return find_model(None)
    folder = Path(tempfile.gettempdir()) / "kvstore-hybrid-models" / family
    made = Path(_vllm()).with_name("python")  # vLLM's environment has a transformers that knows the family
    argv = [str(made), str(ROOT / "benchmarks" / "hybrid_models.py"), family, str(folder)]
    subprocess.run(argv, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return folder


def main() -> None:
    """Start the instances and run the parts."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part")
    parser.add_argument("--pairs", type=int, default=9, help="measurements of throughput with and without connector")
    parser.add_argument("--memory", choices=("staged", "direct"), help="memory of the instances with connector")
    options = parser.parse_args()
    parts = options.only or list(PARTS)
    wanted = {name for part in parts for name in PARTS[part]}
    with scratch("benchmark") as folder, Cluster(folder, choose_model(options.family)) as cluster:
        ports = {}
        for name in sorted(wanted):
            own = {"memory": options.memory} if options.memory else {}
            connector: Connector | None = None if name == "plain" else "kvstore"
            ports[name] = cluster.start_vllm(name, *options.flags, connector=connector, **own)
        for name, port in ports.items():
            cluster.wait_ready(name, port)
        bench = Bench(cluster, ports, options)
        asyncio.run(run(bench, parts))
        if options.json:
            options.json.write_text(json.dumps(bench.figures, indent=2) + "\n")
        if bench.missed:
            fail("; ".join(bench.missed))


if __name__ == "__main__":
    main()
