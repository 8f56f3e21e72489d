"""Check that two real vLLM instances on CPU, of tensor-parallel size 2 and 1, read each other's blocks.

    python benchmarks/vllm_cuts.py [--prompts 10] [--json FILE]

Run it with a Python that has this project and mooncake_master. The environment variable VLLM names the program ``vllm``
if it is not on the PATH. First, an instance of size 1 without connector answers all prompts. Then each of the two
instances computes one half of the prompts, and afterwards gets the other half, which the other instance computed. The
program exits with 0 only if all answers equal those of the first instance, and each instance got every whole block of
the other's prompts from the pool. The model is that of make_model: its best token leads clearly, so that answers do not
depend on rounding. Each worker has one compute thread.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "vllm"))

from cluster import Cluster, fail, metric, scratch  # noqa: E402

from engine.make_model import default_folder, make_model  # noqa: E402

BLOCK = 128
FIRST_WORD, LAST_WORD = 300, 1600  # token ids that are whole words in make_model's vocabulary
SIZES = (2, 1)
# Instances write a marker of their sharding at their start, and look for other markers every 10 s.
LOOK_AROUND_S = 11.0

Prompt = list[int]


def main() -> None:
    """Run the check and print the figures."""
    parser = argparse.ArgumentParser(description="vLLM instances of two tensor-parallel sizes share blocks.")
    parser.add_argument("--prompts", type=int, default=10, help="prompts that each instance computes (default 10)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    model = default_folder()
    make_model(model)
    chooser = random.Random(17)
    prompts = [
        chooser.choices(range(FIRST_WORD, LAST_WORD), k=chooser.randint(140, 1500)) for _ in range(2 * args.prompts)
    ]
    with scratch("cuts") as folder, Cluster(folder, model) as cluster:
        (plain,) = start(cluster, {"plain": ()}, connector=None)
        right = [answer(plain, prompt) for prompt in prompts]
        cluster.stop("plain")
        ports = start(cluster, {f"tp{size}": ("--tensor-parallel-size", str(size)) for size in SIZES})
        halves = prompts[: args.prompts], prompts[args.prompts :]
        rights = right[: args.prompts], right[args.prompts :]
        for port, size, own, expected in zip(ports, SIZES, halves, rights, strict=True):
            compare([answer(port, prompt) for prompt in own], expected, f"TP {size}, computing")
            wait_saved(port, size * sum(len(prompt) // BLOCK for prompt in own))
        time.sleep(LOOK_AROUND_S)
        figures = [
            read_others(port, size, others, expected)
            for port, size, others, expected in zip(ports, SIZES, halves[::-1], rights[::-1], strict=True)
        ]
    for row in figures:
        print(", ".join(f"{key}: {value}" for key, value in row.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


def start(cluster: Cluster, instances: dict[str, tuple[str, ...]], **options: Any) -> list[int]:
    """Start instances with these names and further flags; return their ports when all are ready."""
    ports = [cluster.start_vllm(name, *flags, **options) for name, flags in instances.items()]
    for name, port in zip(instances, ports, strict=True):
        cluster.wait_ready(name, port)
    return ports


def read_others(port: int, size: int, prompts: Sequence[Prompt], right: Sequence[list[int]]) -> dict[str, object]:
    """Send an instance the prompts that the other one computed; check the answers and the loaded blocks."""
    before = given(port), gathered(port)
    compare([answer(port, prompt) for prompt in prompts], right, f"TP {size}, reading")
    tokens, blocks = given(port) - before[0], gathered(port) - before[1]
    most = sum((len(prompt) - 1) // BLOCK for prompt in prompts)
    if tokens != most * BLOCK or blocks != most * size:
        fail(f"TP {size} was given {tokens:g} tokens and {blocks:g} pieces of blocks; there were {most} blocks")
    return {
        "reader": f"TP {size}",
        "prompts": len(prompts),
        "tokens": sum(map(len, prompts)),
        "given": int(tokens),
        "hit_rate": round(tokens / sum(map(len, prompts)), 4),
        "whole_blocks": 1.0,
        "answers": "equal",
    }


def answer(port: int, prompt: Prompt) -> list[int]:
    """Return the 16 greedy tokens after a prompt."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        token_ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return token_ids


def compare(answers: Sequence[list[int]], right: Sequence[list[int]], who: str) -> None:
    """End the program if an answer is not right."""
    wrong = sum(one != other for one, other in zip(answers, right, strict=True))
    if wrong:
        fail(f"{who}: {wrong} of {len(right)} answers are not those of the instance without connector")


def wait_saved(port: int, pieces: int) -> None:
    """Wait until an instance's workers have saved ``pieces`` pieces of blocks."""
    deadline = time.monotonic() + 60
    while metric(port, "vllm:kvstore_blocks_total", 'operation="save"', 'outcome="ok"') < pieces:
        if time.monotonic() > deadline:
            fail(f"not all of {pieces} pieces of blocks were saved within a minute")
        time.sleep(0.2)


def given(port: int) -> float:
    """Return the number of prompt tokens that an instance got from the pool."""
    return metric(port, "vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"')


def gathered(port: int) -> float:
    """Return the number of blocks that all workers together read from another sharding."""
    return metric(port, "vllm:kvstore_blocks_total", 'operation="gather"', 'outcome="ok"')


if __name__ == "__main__":
    main()
