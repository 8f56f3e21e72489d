"""Run two vLLM instances on CPU with one Mooncake pool, behind our router. Exit 0 only if all checks succeed.

    python examples/vllm/run.py [--keep]

The second instance must load a prompt that the first one computed. Through the router, both must serve requests, with
the same answers as the first instance alone. vLLM is not changed: ``--kv-transfer-config`` names our connector, and a
register file names the instances to the router. ``README.md`` in this folder says what must be installed.
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
    said = words(400, seed=100 + user)
    for turn in range(3):
        said += complete(port, said) + words(150, seed=1000 + 10 * user + turn)
    return said


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
        fail("the second instance, which loaded the prompt, answers otherwise than the first, which computed it")
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
            fail(f"user {user}: the router's answers are not the first instance's own")
    print(
        f"  {served[0]} and {served[1]} were served by the instances; the answers are those of the first, asked alone"
    )


def main() -> None:
    """Start everything and run the checks."""
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
        router = cluster.start_router({first: "mixed", second: "mixed"})
        verify(first, second, router)
        print("VERIFIED")
        if options.keep:
            print(f"router: http://127.0.0.1:{router}  instances: {first}, {second}  model: m")
            wait_for_interrupt()


if __name__ == "__main__":
    main()
