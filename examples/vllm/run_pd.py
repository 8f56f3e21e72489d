"""vLLM on CPU with prefill and decode apart, one Mooncake pool between them, our router in splitwise mode before them.

    python examples/vllm/run_pd.py [--keep]

The router sends each request to both at once, unchanged. Prefill answers every request with one token
(``--override-generation-config``) and saves the prompt's blocks; decode waits for them (``prefill_wait_s``), loads
them, computes what is left, and answers. Exits 0 only if vLLM's own metrics say so: of two prompts in a row, every
whole block was loaded; of eight more, half at least (what comes too late is computed); and if all answers are those of
an instance without connector, asked before.
What must be installed: ``README.md`` here.
"""

from __future__ import annotations

import argparse
import operator
from typing import NamedTuple

from asking import ANSWER_TOKENS, BLOCK, answered, blocks, complete, wait_answered, words
from cluster import Cluster, fail, metric, scratch, wait_for_interrupt

from engine.make_model import default_folder, make_model

ONE_TOKEN = ("--override-generation-config", '{"max_new_tokens": 1}')
PREFILL_WAIT_S = 10.0
# The first transfers open connections and commit memory, which may take longer than the pool allows.
WARM_UP_TOKENS = 1200
MOST_WARM_UPS = 20
# What comes later than the pool's deadlines allow is computed, which two cores under load make happen.
ENOUGH = 0.5
LENGTHS = (2000, 1500, 100, 700, 1025, 300, 1900, 640)  # tokens; one prompt is shorter than a block


class Counted(NamedTuple):
    """What an instance's metrics say it has done."""

    requests: int
    generated: int
    computed: int
    """Tokens of prompts; those that were loaded follow."""
    loaded: int
    blocks: int
    """Loaded, by our own count."""

    @classmethod
    def of(cls, port: int) -> Counted:
        """Now."""

        def prompt_tokens(source: str) -> int:
            return int(metric(port, "vllm:prompt_tokens_by_source_total", f'source="{source}"'))

        return cls(
            answered(port),
            int(metric(port, "vllm:generation_tokens_total")),
            prompt_tokens("local_compute"),
            prompt_tokens("external_kv_transfer"),
            blocks(port, "load"),
        )

    def __sub__(self, before: Counted) -> Counted:
        return Counted(*map(operator.sub, self, before))


def warm_up(prefill: int, decode: int, router: int) -> None:
    """Ask until two prompts in a row were handed over whole."""
    whole = 0
    for seed in range(MOST_WARM_UPS):
        loaded = blocks(decode, "load")
        complete(router, words(WARM_UP_TOKENS, seed))
        for port in (prefill, decode):
            wait_answered(port, seed + 1)
        whole = whole + 1 if blocks(decode, "load") - loaded == (WARM_UP_TOKENS - 1) // BLOCK else 0
        if whole == 2:
            return
    fail(f"of {MOST_WARM_UPS} prompts, no two in a row were handed over whole")


def ask(prefill: int, decode: int, router: int, prompts: list[str]) -> list[str]:
    """Ask the router, and see by the instances' metrics who did what."""
    warm_up(prefill, decode, router)
    print(f"asking through the router: {len(prompts)} prompts, every other answer as a stream")
    before = Counted.of(prefill), Counted.of(decode)
    answers = [complete(router, prompt, stream=bool(number % 2)) for number, prompt in enumerate(prompts)]
    wait_answered(prefill, before[0].requests + len(prompts))
    by_prefill, by_decode = Counted.of(prefill) - before[0], Counted.of(decode) - before[1]
    expected = Counted(len(prompts), len(prompts), sum(LENGTHS), 0, 0)
    if by_prefill != expected:
        fail(f"prefill's metrics say {by_prefill}, not {expected}")
    whole = sum((length - 1) // BLOCK for length in LENGTHS) * BLOCK
    if not ENOUGH * whole <= by_decode.loaded <= whole:
        fail(f"decode had {by_decode.loaded:,} tokens from the pool; its whole blocks hold {whole:,}")
    computed, loaded = sum(LENGTHS) - by_decode.loaded, by_decode.loaded
    expected = Counted(len(prompts), len(prompts) * ANSWER_TOKENS, computed, loaded, loaded // BLOCK)
    if by_decode != expected:
        fail(f"decode's metrics say {by_decode}, not {expected}")
    print(f"  prefill computed {sum(LENGTHS):,} tokens of prompts, and answered each with one token")
    print(f"  decode had {loaded:,} of them from the pool, of {whole:,} in whole blocks, and computed {computed:,}")
    return answers


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    options = parser.parse_args()
    model = default_folder()
    make_model(model)
    prompts = [words(length, seed=length) for length in LENGTHS]
    with scratch("run_pd") as folder, Cluster(folder, model) as cluster:
        print(f"starting an instance without connector, which takes a minute; logs are in {folder}")
        alone = cluster.start_vllm("alone", connector=False)
        cluster.wait_ready("alone", alone)
        expected = [complete(alone, prompt) for prompt in prompts]
        cluster.stop("alone")
        print("starting a prefill and a decode instance")
        prefill = cluster.start_vllm("prefill", *ONE_TOKEN)
        decode = cluster.start_vllm("decode", prefill_wait_s=PREFILL_WAIT_S)
        cluster.wait_ready("prefill", prefill)
        cluster.wait_ready("decode", decode)
        router = cluster.start_router({prefill: "prefill", decode: "decode"})
        for length, answer, own in zip(LENGTHS, ask(prefill, decode, router, prompts), expected, strict=True):
            if answer != own:
                fail(f"the answer to the prompt of {length:,} tokens is not that of the instance without connector")
        print(f"  all {len(prompts)} answers are those of the instance without connector")
        print("VERIFIED")
        if options.keep:
            print(f"router: http://127.0.0.1:{router}  prefill: {prefill}  decode: {decode}  model: m")
            wait_for_interrupt()


if __name__ == "__main__":
    main()
