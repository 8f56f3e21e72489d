"""vLLM on CPU with prefill and decode apart, our router in splitwise mode before them.

    python examples/vllm/run_pd.py [--connector kvstore|nixl] [--prompts N] [--runs N] [--keep]

The router asks prefill first, for one token, then decode. With our connector (``kvstore``) prefill's answer says that
the prompt's blocks are in the pool, a Mooncake one, from which decode loads them; with vLLM's own NixlConnector
(``nixl``, on CPU too) the answer has ``kv_transfer_params``, which decode takes to fetch them from prefill. Requests
come by four APIs in turn, every other one as a stream. Exits 0 only if vLLM's own metrics say, for each run, that
prefill computed every prompt and said one token, that decode was given at least 95 % of the prompt tokens that it can
be given (our connector: of whole blocks; NixlConnector: of all), and if all answers are those of an instance without
connector, asked before. What must be installed: ``README.md`` here.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Sequence
from typing import NamedTuple

from asking import ANSWER_TOKENS, BLOCK, PATHS, Answer, answered, ask, wait_answered, words
from cluster import Cluster, Connector, fail, metric, scratch, wait_for_interrupt

from engine.make_model import default_folder, make_model

# The first transfers open connections and commit memory, which may take longer than the pool allows.
WARM_UPS = 2
ENOUGH = 0.95
LENGTHS = (640, 300, 1025, 100, 700, 1900, 129, 500)  # words; one prompt is shorter than a block


class Prompt(NamedTuple):
    """A text, by which API it is asked, and what an instance alone answers."""

    text: str
    path: str
    stream: bool
    alone: Answer


class Counted(NamedTuple):
    """What an instance's metrics say it has done."""

    requests: int
    generated: int
    computed: int
    """Tokens of prompts; those that it was given follow."""
    given: int

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
        )

    def __sub__(self, before: Counted) -> Counted:
        return Counted(*map(operator.sub, self, before))


class Pair(NamedTuple):
    """A prefill and a decode instance, and the router before them, by their ports."""

    prefill: int
    decode: int
    router: int
    connector: Connector

    def run(self, prompts: Sequence[Prompt]) -> str:
        """Ask the router, and see by the instances' metrics who did what; in one line, what they did."""
        before = Counted.of(self.prefill), Counted.of(self.decode)
        for prompt in prompts:
            said = ask(self.router, prompt.path, prompt.text, stream=prompt.stream)
            if said.text != prompt.alone.text:
                fail(
                    f"{prompt.path} answers {said.text!r} to a prompt of {prompt.alone.prompt_tokens:,} tokens, "
                    f"and an instance without connector {prompt.alone.text!r}"
                )
        for port, count in zip((self.prefill, self.decode), before, strict=True):
            wait_answered(port, count.requests + len(prompts))
        by_prefill, by_decode = Counted.of(self.prefill) - before[0], Counted.of(self.decode) - before[1]
        total = sum(prompt.alone.prompt_tokens for prompt in prompts)
        if by_prefill != (expected := Counted(len(prompts), len(prompts), total, 0)):
            fail(f"prefill's metrics say {by_prefill}, not {expected}")
        most = sum(map(self.most_given, prompts))
        if not ENOUGH * most <= by_decode.given <= most:
            fail(f"decode was given {by_decode.given:,} tokens of prompts, of {most:,}")
        given = by_decode.given
        if by_decode != (expected := Counted(len(prompts), len(prompts) * ANSWER_TOKENS, total - given, given)):
            fail(f"decode's metrics say {by_decode}, not {expected}")
        share = 100 * given / most
        return f"prefill computed {total:,} tokens, decode was given {given:,} of {most:,} ({share:.1f} %)"

    def most_given(self, prompt: Prompt) -> int:
        """How many of a prompt's tokens decode may be given."""
        tokens = prompt.alone.prompt_tokens
        return tokens if self.connector == "nixl" else (tokens - 1) // BLOCK * BLOCK


def ask_alone(port: int, run: int, count: int) -> list[Prompt]:
    """The prompts of one run, which no other run has, and what an instance without connector answers."""
    prompts = []
    for number in range(count):
        text = words(LENGTHS[number % len(LENGTHS)], seed=1000 * run + number)
        path = PATHS[number // 2 % len(PATHS)]
        prompts.append(Prompt(text, path, bool(number % 2), ask(port, path, text)))
    return prompts


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connector", choices=("kvstore", "nixl"), default="kvstore", help="default: kvstore, ours")
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="in each run; default: 16")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="how often, with new prompts; default: 1")
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    options = parser.parse_args()
    model = default_folder()
    make_model(model)
    with scratch("run_pd") as folder, Cluster(folder, model) as cluster:
        print(f"starting an instance without connector, which takes a minute; logs are in {folder}", flush=True)
        alone = cluster.start_vllm("alone", connector=None)
        cluster.wait_ready("alone", alone)
        runs = [ask_alone(alone, run, options.prompts) for run in range(options.runs)]
        cluster.stop("alone")
        print(f"starting a prefill and a decode instance, connector {options.connector}", flush=True)
        prefill, decode = (cluster.start_vllm(name, connector=options.connector) for name in ("prefill", "decode"))
        cluster.wait_ready("prefill", prefill)
        cluster.wait_ready("decode", decode)
        router = cluster.start_router({prefill: "prefill", decode: "decode"}, options.connector)
        pair = Pair(prefill, decode, router, options.connector)
        for seed in range(WARM_UPS):
            ask(router, "/v1/completions", words(1200, seed=10**6 + seed))
        for port in (prefill, decode):
            wait_answered(port, WARM_UPS)
        for number, prompts in enumerate(runs, 1):
            print(
                f"run {number} of {len(runs)}: {len(prompts)} prompts by {len(PATHS)} APIs, half as streams", flush=True
            )
            print(f"  {pair.run(prompts)}; all answers are those of the instance without connector", flush=True)
        print("VERIFIED")
        if options.keep:
            print(f"router: http://127.0.0.1:{router}  prefill: {prefill}  decode: {decode}  model: m")
            wait_for_interrupt()


if __name__ == "__main__":
    main()
