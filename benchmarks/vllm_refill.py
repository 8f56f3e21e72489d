"""Check that a real vLLM instance puts its cached blocks into the pool again after the master was restarted.

    python benchmarks/vllm_refill.py [--prompts 20] [--json FILE]

Run it with a Python that has this project and mooncake_master. The environment variable VLLM names the program ``vllm``
if it is not on the PATH. An instance on CPU with our connector computes prompts of 2,000 tokens. Then the master is
killed and started again, with an empty pool. The instance first gets no requests, then a small request every half
second, because it puts blocks again in vLLM's own steps. In the end, a second instance must load all blocks and give
the same answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "vllm")]

from cluster import Cluster, fail, find_model, scratch  # noqa: E402
from vllm_connector import BLOCK, LONG, Client, blocks, ended, prompt, until  # noqa: E402

# An instance asks every 5 s whether the pool has lost blocks.
PERIOD_S = 6.0
DEADLINE_S = 120.0


async def lose_and_refill(cluster: Cluster, first: int, second: int, num_prompts: int) -> dict[str, object]:
    """Run the check and return the figures; end the program if blocks do not come back or answers differ."""
    client, master = Client(), cluster.master
    asked = [prompt(LONG, f"refill {number}") for number in range(num_prompts)]
    full = num_prompts * ((LONG - 1) // BLOCK)
    truth = await client.answers([first], asked)
    await until(lambda: ended(first, "save") >= full, "saving")
    await asyncio.sleep(PERIOD_S)  # so that the instance has looked for lost blocks at least once
    before = await asyncio.to_thread(master.count_keys)
    master.send(signal.SIGKILL)
    await asyncio.to_thread(master.start)
    start = time.monotonic()
    await asyncio.sleep(2 * PERIOD_S)
    without_requests = await asyncio.to_thread(master.count_keys)
    asking = time.monotonic()
    for number in range(1000):
        if (after := await asyncio.to_thread(master.count_keys)) >= before:
            break
        if time.monotonic() > asking + DEADLINE_S:
            fail(f"after {DEADLINE_S:g} s with requests the pool has {after} of {before} blocks")
        await client.answer(first, prompt(20, f"step {number}"))
        await asyncio.sleep(0.5)
    seconds = time.monotonic() - asking
    loaded = blocks(second, "load", "ok")
    if None in truth or await client.answers([second], asked) != truth:
        fail("the second instance answers otherwise than the first")
    await until(lambda: blocks(second, "load", "ok") - loaded >= full, "loading")
    return {
        "keys in the pool before": before,
        f"{asking - start:.1f} s after the master's return, without requests": without_requests,
        f"after {seconds:.1f} s with a request every half second": after,
        "blocks that the second instance loaded then": f"{blocks(second, 'load', 'ok') - loaded:g} of {full}",
        "answers equal": len(asked),
    }


def main() -> None:
    """Start the instances and run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20, help="number of prompts, with 15 whole blocks each")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with scratch("refill") as folder, Cluster(folder, find_model(None)) as cluster:
        ports = {name: cluster.start_vllm(name) for name in ("first", "second")}
        for name, port in ports.items():
            cluster.wait_ready(name, port)
        figures = asyncio.run(lose_and_refill(cluster, ports["first"], ports["second"], options.prompts))
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
