"""Check that ``cached_tokens`` in each answer equals the figure in the log of the instance that computed the prompt.

    python benchmarks/cached_tokens.py [--splitwise] [--trace ../shared/traces/conversation_trace.jsonl]

The program starts our router, a Mooncake pool, and instances of our engine with the small checkpoint: two mixed
instances, or with ``--splitwise`` two prefill instances and a decode instance. It sends 100 requests of whole
conversations of the trace, four at a time, by chat, completions, responses and messages, with and without streams.
Blocks of the trace are scaled down from 512 tokens to ``--block-tokens``; prompts share their beginnings as in the
trace. The program ends with 1 if a figure differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.make_model import make_model
from tests.end_to_end.cluster import instance, router
from tests.support.mooncake import mooncake_master
from tests.support.trace import Row, Told, ask_row, find_logged, pick_conversations, read_trace
from tests.support.waiting import wait_until

AT_ONCE = 4
MOST_BLOCKS = 40


def measure(
    rows: Sequence[Row], block_tokens: int, folder: Path, *, splitwise: bool
) -> tuple[list[Told], dict[str, int]]:
    """Send all requests; return the usages that clients got, and the logged cached tokens for each request id."""
    model = folder / "model"
    make_model(model)
    with contextlib.ExitStack() as running:
        master = running.enter_context(mooncake_master(folder / "master.log"))
        front = running.enter_context(router(folder, splitwise=splitwise))
        towards = ("--router", f"127.0.0.1:{front.port}")
        roles = ["prefill", "prefill", "decode"] if splitwise else ["mixed", "mixed"]
        instances = []
        for role in roles:
            flags = ("--splitwise-role", role) if splitwise else ()
            instances.append(running.enter_context(instance(folder, model, *flags, *towards, master=master)))
        front.wait_for(**Counter(roles))
        computing = instances[:2]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            usages = list(pool.map(lambda row: ask_row(front.url, row, block_tokens), rows))

        def read_logs() -> dict[str, int]:
            return find_logged(each.log for each in computing)

        ids = {each.request_id for each in usages}
        wait_until(lambda: ids <= read_logs().keys(), "the last lines of the logs")
        return usages, read_logs()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and print the result; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splitwise", action="store_true", help="pairs: two prefill instances and a decode instance")
    parser.add_argument("--trace", type=Path, default=Path("../shared/traces/conversation_trace.jsonl"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--block-tokens", type=int, default=32, help="instead of 512 in the trace (default 32)")
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = pick_conversations(read_trace(options.trace), options.requests, MOST_BLOCKS)
    with tempfile.TemporaryDirectory() as name:
        usages, logged = measure(rows, options.block_tokens, Path(name), splitwise=options.splitwise)
    wrong = [each for each in usages if logged[each.request_id] != each.cached_tokens]
    prompt, cached = sum(each.prompt_tokens for each in usages), sum(each.cached_tokens for each in usages)
    paths = ", ".join(f"{path} {count}" for path, count in sorted(Counter(each.path for each in usages).items()))
    print(f"{len(usages)} requests ({paths}); {cached} of {prompt} prompt tokens cached")
    for each in wrong:
        print(f"{each}, but the log has {logged[each.request_id]}")
    print(f"{len(usages) - len(wrong)} of {len(usages)} as logged; {'failed' if wrong else 'passed'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
