"""Two vLLM instances on CPU, one Mooncake pool, our router before them. Exits 0 only if it verified what it claims.

    python examples/vllm/run.py [--keep]

What the first instance computes the second loads, and the answers through the router are those of an instance alone.
vLLM is used as it is: ``--kv-transfer-config`` names our connector, a register file names the instances to the router.
Run it with a Python that has this project and mooncake_master; VLLM names vLLM's program where it is not on the PATH.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import urllib.request

from cluster import Cluster, fail, metric, scratch

from engine.make_model import WORDS, default_folder, make_model

BLOCK = 128
TOKENS = 2000
DEADLINE_S = 60.0


def words(count: int, seed: int) -> str:
    """A text of this many tokens: in the model's vocabulary each word is one."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def complete(port: int, prompt: str) -> str:
    """A greedy answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def blocks(port: int, operation: str) -> int:
    """Blocks that an instance looked up, loaded or saved with success."""
    return int(metric(port, "vllm:kvstore_blocks_total", f'operation="{operation}"', 'outcome="ok"'))


def wait_for(port: int, operation: str, count: int) -> None:
    """Until an instance has counted so many blocks; transfers do not hold answers up."""
    deadline = time.monotonic() + DEADLINE_S
    while (now := blocks(port, operation)) < count:
        if time.monotonic() > deadline:
            fail(f"after {DEADLINE_S:g} s the instance on port {port} has {now} blocks ({operation}), not {count}")
        time.sleep(0.1)


def verify(first: int, second: int, router: int) -> None:
    """Ask the instances themselves, then through the router."""
    full = (TOKENS - 1) // BLOCK
    prompt = words(TOKENS, seed=1)
    print(f"asking the first instance: a prompt of {TOKENS:,} tokens")
    computed = complete(first, prompt)
    wait_for(first, "save", full)
    print("asking the second instance: the same prompt")
    hits = metric(second, "vllm:external_prefix_cache_hits_total")
    if complete(second, prompt) != computed:
        fail("the second instance, which loaded the prompt, answers otherwise than the first, which computed it")
    wait_for(second, "load", full)
    hits = metric(second, "vllm:external_prefix_cache_hits_total") - hits
    if hits != full * BLOCK or blocks(second, "load") != full:
        fail(f"vLLM counts {hits:g} tokens from the pool and we {blocks(second, 'load') * BLOCK}, not {full * BLOCK}")
    print(f"  {full * BLOCK:,} of its tokens came from the pool, by vLLM's metrics and by ours; the answers are equal")

    print("asking through the router: a conversation of 3 turns for each of 4 users")
    served = blocks(first, "lookup"), blocks(second, "lookup")
    for user in range(4):
        prompt = words(400, seed=100 + user)
        for turn in range(3):
            answer = complete(router, prompt)
            if answer != complete(first, prompt):
                fail(f"turn {turn} of user {user}: the router's answer is not the instance's own")
            prompt += answer + " " + words(150, seed=1000 + 10 * user + turn)
    if (blocks(first, "lookup"), blocks(second, "lookup")) == served:
        fail("no request found anything in the pool")
    print("  all 12 answers are those of an instance asked directly")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    options = parser.parse_args()
    model = default_folder()
    make_model(model)
    with scratch("run") as folder, Cluster(folder, model) as cluster:
        print(f"starting two vLLM instances, which takes a minute; logs are in {folder}")
        first, second = cluster.start_vllm("vllm_0"), cluster.start_vllm("vllm_1")
        cluster.wait_ready("vllm_0", first)
        cluster.wait_ready("vllm_1", second)
        router = cluster.start_router([first, second])
        verify(first, second, router)
        print("VERIFIED")
        if options.keep:
            print(
                f"router: http://127.0.0.1:{router}  instances: {first}, {second}  model: m  (Ctrl-C stops everything)"
            )
            try:
                while True:
                    time.sleep(1)
            except KeyboardInterrupt:
                pass


if __name__ == "__main__":
    main()
