"""Run a prefill and a decode instance of vLLM on CPU, behind our router in splitwise mode.

    python examples/vllm/run_pd.py [--connector kvstore|nixl] [--prompts N] [--runs N] [--at-once N] [--answers FILE]
        [--model FOLDER] [--path PATH] [--keep]

The router first requests one token from prefill; then it sends the request to decode. With our connector
(``kvstore``), prefill's answer states that the prompt's blocks are in the Mooncake pool, and decode loads them
from there. With vLLM's own NixlConnector (``nixl``, also on CPU), the answer has ``kv_transfer_params``, with which
decode fetches the blocks from prefill. Requests use four APIs in turn, or only that of ``--path``; every other request
is a stream.

Exits 0 only if vLLM's own metrics show the following for each run: prefill computed every prompt and generated one
token, and decode got at least 95 % of the prompt tokens that it can get (our connector: tokens in whole blocks;
NixlConnector: all tokens). In addition, all answers must equal those of an instance without connector, which gets the
same requests before. ``README.md`` in this folder lists the required packages.
"""

from __future__ import annotations

import hashlib
import json
import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from asking import ANSWER_TOKENS, BLOCK, PATHS, Answer, answered, ask, wait_answered, words
from cluster import Cluster, Connector, fail, find_model, make_parser, metric, scratch, wait_for_interrupt

# The first transfers open connections and allocate memory, which may take longer than the pool's time limits.
WARM_UPS = 2
ENOUGH = 0.95
LENGTHS = (320, 150, 513, 100, 350, 900, 129, 260)  # words; one prompt is shorter than a block


Item = TypeVar("Item")
Given = TypeVar("Given")


class Prompt(NamedTuple):
    """A prompt, the path of its API, and the answer of an instance without connector."""

    text: str
    path: str
    stream: bool
    alone: Answer


class Counted(NamedTuple):
    """Counters of an instance's metrics.

    Attributes:
        requests: answered requests.
        generated: generated tokens.
        computed: tokens of prompts that the instance computed.
        given: tokens of prompts that the connector loaded.
    """

    requests: int
    generated: int
    computed: int
    given: int

    @classmethod
    def of(cls, port: int) -> Counted:
        """Read the present counters of the instance at ``port``."""

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


def ask_all(at_once: int, ask_one: Callable[[Item], Given], items: Sequence[Item]) -> list[Given]:
    """Call ``ask_one`` for all items, ``at_once`` at the same time; return the answers in the order of the items."""
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(ask_one, items))


class Pair(NamedTuple):
    """The ports of a prefill instance, a decode instance and their router.

    Attributes:
        connector: the connector of both instances.
        at_once: number of requests at the same time.
    """

    prefill: int
    decode: int
    router: int
    connector: Connector
    at_once: int

    def run(self, prompts: Sequence[Prompt]) -> float:
        """Send all prompts to the router, and check the answers and the instances' metrics.

        Returns:
            Of the prompt tokens that decode can get from prefill, the share that it got.
        """
        before = Counted.of(self.prefill), Counted.of(self.decode)
        texts = ask_all(
            self.at_once,
            lambda prompt: ask(self.router, prompt.path, prompt.text, stream=prompt.stream).text,
            prompts,
        )
        for prompt, text in zip(prompts, texts, strict=True):
            if text != prompt.alone.text:
                fail(
                    f"{prompt.path} answers {text!r} to a prompt of {prompt.alone.prompt_tokens:,} tokens, "
                    f"and an instance without connector {prompt.alone.text!r}"
                )
        for port, count in zip((self.prefill, self.decode), before, strict=True):
            wait_answered(port, count.requests + len(prompts))
        by_prefill, by_decode = Counted.of(self.prefill) - before[0], Counted.of(self.decode) - before[1]
        total = sum(prompt.alone.prompt_tokens for prompt in prompts)
        if by_prefill != (expected := Counted(len(prompts), len(prompts), total, 0)):
            fail(f"prefill's metrics are {by_prefill}, not {expected}")
        most = sum(map(self.most_given, prompts))
        given = by_decode.given
        if by_decode != (expected := Counted(len(prompts), len(prompts) * ANSWER_TOKENS, total - given, given)):
            fail(f"decode's metrics are {by_decode}, not {expected}")
        if given > most:
            fail(f"decode got {given:,} prompt tokens from prefill, more than the possible {most:,}")
        share = f"prefill computed {total:,} tokens, decode got {given:,} of {most:,} ({100 * given / most:.1f} %)"
        print(f"  {share}; all answers equal those of the instance without connector", flush=True)
        return given / most

    def most_given(self, prompt: Prompt) -> int:
        """Return the most tokens of a prompt that decode can get from prefill."""
        tokens = prompt.alone.prompt_tokens
        return tokens if self.connector == "nixl" else (tokens - 1) // BLOCK * BLOCK


class Alone:
    """An instance without connector, and its answers. It starts only if the answer to a prompt is not known yet.

    Args:
        cluster: the cluster that starts it.
        file: stores the answers for later runs with the same model and vLLM.
        at_once: number of requests at the same time.
        paths: the APIs of the prompts.
    """

    def __init__(self, cluster: Cluster, file: Path | None, at_once: int, paths: Sequence[str]) -> None:
        self._cluster = cluster
        self._file = file
        self._at_once = at_once
        self._paths = paths
        self._known = {key: Answer(*known) for key, known in self._read().items()}
        self._starting = threading.Lock()
        self._port: int | None = None

    def ask_run(self, run: int, count: int) -> list[Prompt]:
        """Return the prompts of one run with their answers; no other run has the same prompts."""
        asked = []
        for number in range(count):
            # Each API gets each length, with and without a stream.
            length = LENGTHS[(number + number // len(LENGTHS)) % len(LENGTHS)]
            text = words(length, seed=1000 * run + number)
            path = self._paths[number // 2 % len(self._paths)]
            asked.append((path, text))
        answers = ask_all(self._at_once, lambda one: self._ask(*one), asked)
        prompts = [
            Prompt(text, path, bool(number % 2), answer)
            for number, ((path, text), answer) in enumerate(zip(asked, answers, strict=True))
        ]
        if self._file is not None:
            self._file.write_text(json.dumps(self._known))
        return prompts

    def stop(self) -> None:
        """Stop the instance, if it was started."""
        if self._port is not None:
            self._cluster.stop("alone")

    def _ask(self, path: str, text: str) -> Answer:
        key = hashlib.sha256(f"{path} {text}".encode()).hexdigest()
        if key not in self._known:
            self._known[key] = ask(self._start(), path, text)
        return self._known[key]

    def _start(self) -> int:
        with self._starting:
            if self._port is None:
                print("starting an instance without connector, which takes a minute", flush=True)
                port = self._cluster.start_vllm("alone", connector=None)
                self._cluster.wait_ready("alone", port)
                self._port = port
        return self._port

    def _read(self) -> dict[str, list[Any]]:
        if self._file is None or not self._file.exists():
            return {}
        known: dict[str, list[Any]] = json.loads(self._file.read_text())
        return known


def main() -> None:
    """Start everything and run the checks."""
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="in each run; default: 16")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="how often, with new prompts; default: 1")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="requests at the same time; default: 1")
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="store the answers of the instance without connector for later runs",
    )
    parser.add_argument("--path", choices=PATHS, help="by this API only; default: four APIs")
    parser.add_argument("--keep", action="store_true", help="keep all processes running until Ctrl-C")
    options = parser.parse_args()
    with scratch(f"run_pd_{options.connector}") as folder, Cluster(folder, find_model(options.model)) as cluster:
        print(f"logs are in {folder}", flush=True)
        paths = [options.path] if options.path else PATHS
        alone = Alone(cluster, options.answers, options.at_once, paths)
        runs = [alone.ask_run(run, options.prompts) for run in range(options.runs)]
        alone.stop()
        print(f"starting a prefill and a decode instance, connector {options.connector}", flush=True)
        prefill, decode = (cluster.start_vllm(name, connector=options.connector) for name in ("prefill", "decode"))
        cluster.wait_ready("prefill", prefill)
        cluster.wait_ready("decode", decode)
        router = cluster.start_router({prefill: "prefill", decode: "decode"}, options.connector)
        pair = Pair(prefill, decode, router, options.connector, options.at_once)
        for seed in range(WARM_UPS):
            ask(router, "/v1/completions", words(1200, seed=10**6 + seed))
        for port in (prefill, decode):
            wait_answered(port, WARM_UPS)
        shares = []
        for number, prompts in enumerate(runs, 1):
            apis = options.path or f"{len(paths)} APIs"
            print(f"run {number} of {len(runs)}: {len(prompts)} prompts by {apis}, half as streams", flush=True)
            shares.append(pair.run(prompts))
        if (short := sum(share < ENOUGH for share in shares)) > 0:
            fail(f"decode got less than {ENOUGH:.0%} from prefill in {short} of {len(shares)} runs")
        print("VERIFIED")
        if options.keep:
            print(f"router: http://127.0.0.1:{router}  prefill: {prefill}  decode: {decode}  model: m")
            wait_for_interrupt()


if __name__ == "__main__":
    main()
