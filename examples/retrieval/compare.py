"""Compare an instance with sparse attention with a dense one: both search the same needles. Exit 0 if both find them.

    python examples/retrieval/compare.py --dense http://127.0.0.1:8101 --sparse http://127.0.0.1:8102

An answer has four values. The first one comes from the prefill, which is exact in both instances. The other three come
from decode steps; with sparse attention, these steps find a value only if they select the block that holds it.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from train_needle import NUM_VALUES, make_texts

ENOUGH = 0.9


@dataclass(frozen=True)
class Answers:
    """The results of one instance.

    Attributes:
        right: share of the prompts with four right values.
        seconds: time for all prompts.
        blocks_read, blocks_total: KV blocks that sparse steps read, and that they could have read; 0 if dense.
    """

    right: float
    seconds: float
    blocks_read: int
    blocks_total: int


def ask(url: str, prompts: list[list[int]], answers: list[list[int]]) -> Answers:
    """Send all prompts to an instance, four at a time, and compare the answers."""

    def one(prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": NUM_VALUES, "temperature": 0}
        response = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120)
        response.raise_for_status()
        result: dict[str, Any] = response.json()
        return result

    start = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(one, prompts))
    seconds = time.monotonic() - start
    right = read = total = 0
    for result, expected in zip(results, answers, strict=True):
        right += expected == result["choices"][0]["completion_token_ids"]
        details = result["usage"].get("retrieval_details", {})
        read += details.get("blocks_read", 0)
        total += details.get("blocks_total", 0)
    return Answers(right / len(prompts), seconds, read, total)


def main() -> int:
    """Run the comparison and print the results; return 0 if they are as expected."""
    parser = argparse.ArgumentParser(description="Needles with and without sparse attention.")
    parser.add_argument("--dense", required=True, metavar="URL")
    parser.add_argument("--sparse", required=True, metavar="URL")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--texts", type=int, default=24)
    args = parser.parse_args()
    texts = make_texts(args.texts, args.length, torch.Generator().manual_seed(1))
    prompts, expected = texts.token_ids.tolist(), texts.answers.tolist()
    dense, sparse = (ask(url, prompts, expected) for url in (args.dense, args.sparse))
    print(f"{args.texts} needles in {args.length} tokens each; all four values right:")
    print(f"  without retrieval {dense.right:6.0%}  {dense.seconds:5.1f} s")
    share = sparse.blocks_read / max(1, sparse.blocks_total)
    print(f"  with retrieval    {sparse.right:6.0%}  {sparse.seconds:5.1f} s  {share:.0%} of the KV blocks read")
    problems = []
    if dense.blocks_total or not 0 < sparse.blocks_read < sparse.blocks_total:
        problems.append("the dense instance uses sparse attention, or the sparse one reads all blocks or none")
    if dense.right < ENOUGH:
        problems.append(f"the model finds fewer than {ENOUGH:.0%} of the needles even with dense attention")
    if sparse.right < ENOUGH * dense.right:
        problems.append(f"sparse attention finds fewer than {ENOUGH:.0%} of the needles that dense attention finds")
    print("verified" if not problems else "NOT verified: " + "; ".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
