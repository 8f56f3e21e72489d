"""Run two vLLM instances on CPU with one Mooncake pool, behind our router. Exit 0 only if all checks succeed.

    python examples/vllm/run.py [--keep]

The second instance must load a prompt that the first one computed. Through the router, both must serve requests, with
the same answers as the first instance alone. vLLM is not changed: ``--kv-transfer-config`` names our connector, and a
register file names the instances to the router. ``README.md`` in this folder lists the required packages.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from asking import BLOCK, answered, blocks, complete, wait_for, words
from cluster import Cluster, fail, metric, scratch, wait_for_interrupt

from engine.make_model import default_folder, make_model

TOKENS = 2000


def converse(port: int, user: int) -> str:
    """Hold a conversation of three turns and return its whole text. Each turn continues the text so far."""
    text = words(400, seed=100 + user)
    for turn in range(3):
        text += complete(port, text) + words(150, seed=1000 + 10 * user + turn)
    return text


def verify(first: int, second: int, router: int) -> None:
    """Check the answers of the instances themselves, then those through the router."""
    full = (TOKENS - 1) // BLOCK
    prompt = words(TOKENS, seed=1)
    print(f"asking the first instance: a prompt of {TOKENS:,} tokens")
    computed = complete(first, prompt)
    wait_for(first, "save", full)
    print("asking the second instance: the same prompt")
    hits = metric(second, "vllm:external_prefix_cache_hits_total")
    if complete(second, prompt) != computed:
        fail("the answer of the second instance, which loaded the prompt, differs from that of the first")
    wait_for(second, "load", full)
    hits = metric(second, "vllm:external_prefix_cache_hits_total") - hits
    if hits != full * BLOCK or blocks(second, "load") != full:
        fail(f"vLLM counts {hits:g} tokens from the pool and we {blocks(second, 'load') * BLOCK}, not {full * BLOCK}")
    print(f"  {full * BLOCK:,} of its tokens came from the pool, by vLLM's metrics and by ours; the answers are equal")

    print("asking through the router: 4 users at once, a conversation of 3 turns each")
    served = answered(first), answered(second)
    with ThreadPoolExecutor(4) as users:
        conversations = list(users.map(lambda user: converse(router, user), range(4)))
    served = answered(first) - served[0], answered(second) - served[1]
    if sum(served) != 12 or not all(served):
        fail(f"the instances served {served[0]} and {served[1]} of 12 requests through the router")
    for user, conversation in enumerate(conversations):
        if converse(first, user) != conversation:
            fail(f"user {user}: the answers through the router differ from those of the first instance")
    print(
        f"  the instances served {served[0]} and {served[1]} requests; the first instance alone gives the same answers"
    )


def main() -> None:
    """Start everything and run the checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep all processes running until Ctrl-C")
    options = parser.parse_args()
    model = default_folder()
    make_model(model)
    with scratch("run") as folder, Cluster(folder, model) as cluster:
        print(f"starting two vLLM instances, which takes a minute; logs are in {folder}")
        first, second = cluster.start_vllm("vllm_0"), cluster.start_vllm("vllm_1")
        cluster.wait_ready("vllm_0", first)
        cluster.wait_ready("vllm_1", second)
        router = cluster.start_router({first: "mixed", second: "mixed"})
        verify(first, second, router)
        print("VERIFIED")
        if options.keep:
            print(f"router: http://127.0.0.1:{router}  instances: {first}, {second}  model: m")
            wait_for_interrupt()


if __name__ == "__main__":
    main()
