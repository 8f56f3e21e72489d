"""Checks the results of run_pd_storage.sh and run.sh: sends requests with curl, reads logs, and prints a table.

Exits 0 only if every check succeeds; otherwise 1, with a message about the check that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from engine.make_model import WORDS

HERE = Path(__file__).resolve().parent  # the folder of the instances' logs
BLOCK = 64  # tokens; the engines' default --block-size
DEADLINE = 60.0  # seconds after an answer until its blocks are saved to the pool and its line is in the log

WINDS = ("north", "west", "south", "east")
HARBOUR_LOG = "\n".join(
    f"Day {day}: {5 + day * 7 % 11} ships in, {4 + day * 5 % 13} out, wind from the {WINDS[day * 3 % 4]}, "
    f"{600 + day * 37 % 500} tonnes of goods."
    for day in range(1, 32)
)
TURNS = (
    "The harbour town of Ostrand lives from the sea: forty boats land cod and herring all year, and two ferries a "
    "day carry timber, wool and visitors to the islands. The town plans a second pier, a railway to the valley "
    f"behind the mountains, and wind turbines on the old breakwater. This is its log of one month.\n{HARBOUR_LOG}\n"
    "On which day did the most ships come in?",
    "And on which day were the most goods handled? How much was it?",
    "With that in mind, which of the town's plans would you begin with?",
)
MAX_TOKENS, MIN_TOKENS = 200, 130

PROMPT_TOKENS = 2000
SAMPLES = 3
SPEEDUP = float(os.environ.get("MIN_SPEEDUP", "5"))
# If a model computes a prompt faster than this, a pool saves little time: then only the tokens are checked, not times.
JUDGED_SECONDS = 0.5
NAMESPACED, MANIFEST = "kv1-", "kvstore-manifest/"  # the beginnings of our backend's keys

Message = dict[str, str]
Seen = TypeVar("Seen")


def fail(sentence: str) -> NoReturn:
    """End the program with status 1 and this message."""
    sys.exit(f"NOT VERIFIED: {sentence}")


@dataclass(frozen=True)
class Answer:
    """One answer as the client saw it; ``seconds`` is the time to its first token."""

    request_id: str
    text: str
    seconds: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Cached:
    """The tokens of a prompt that an instance took from its own cache and from the pool, by its log."""

    own: int
    pool: int


def ask(port: int, messages: list[Message], max_tokens: int, min_tokens: int = 0) -> Answer:
    """Send a greedy chat request with curl, read the stream, and measure the time until the first text."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    command = ["curl", "-qsS", "-N", "--max-time", "600", "-H", "Content-Type: application/json", "-d", "@-", url]
    start = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdin is not None
        assert curl.stdout is not None
        curl.stdin.write(json.dumps(body))
        curl.stdin.close()
        answer = _read_stream(curl.stdout, start, url)
    if curl.returncode != 0:
        fail(f"curl {url} ended with status {curl.returncode}")
    return answer


def _read_stream(lines: Iterable[str], start: float, url: str) -> Answer:
    text, seconds, last = "", None, {}
    for line in lines:
        data = line.removeprefix("data: ").strip()
        if data in ("", "[DONE]"):
            continue
        try:
            last = json.loads(data)
        except ValueError:
            fail(f"{url} answered {data[:300]!r}, which is not JSON")
        if "choices" not in last:
            fail(f"{url} answered {data[:300]}")
        piece = "".join(choice["delta"].get("content") or "" for choice in last["choices"])
        if piece and seconds is None:
            seconds = time.monotonic() - start
        text += piece
    if seconds is None or not last.get("usage"):
        fail(f"{url} gave no whole answer; the stream ended with {json.dumps(last)[:300]}")
    usage = last["usage"]
    return Answer(last["id"], text, seconds, usage["prompt_tokens"], usage["completion_tokens"])


def logged(log: Path, answer: Answer) -> Cached:
    """Return the cached tokens of a request from the line that the instance logs at the request's end."""
    request_id = answer.request_id.removeprefix("chatcmpl-")

    def figures() -> Cached | None:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        for line in reversed(lines):
            found = dict(re.findall(r"\b(\w+_cache_token_num)\W{1,4}(\d+)", line)) if request_id in line else {}
            if "storage_cache_token_num" in found:
                own = int(found.get("gpu_cache_token_num", 0)) + int(found.get("cpu_cache_token_num", 0))
                return Cached(own, int(found["storage_cache_token_num"]))
        return None

    return wait_for(figures, f"{log} has no storage_cache_token_num of request {request_id}")


def metric(port: int, name: str) -> float | None:
    """Return the value of a metric of the server at ``port``; None if there is no such metric."""
    command = ["curl", "-qsS", "--max-time", "10", f"http://127.0.0.1:{port}/metrics"]
    page = subprocess.run(command, capture_output=True, text=True, check=False)
    if page.returncode != 0:
        fail(f"port {port} gives no metrics: {page.stderr.strip()}")
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page.stdout, re.MULTILINE)
    return float(found[1]) if found else None


def list_keys(master_metrics: int) -> list[str]:
    """Return the keys that the pool's master knows."""
    url = f"http://127.0.0.1:{master_metrics}/get_all_keys"
    page = subprocess.run(["curl", "-qsS", "--max-time", "30", url], capture_output=True, text=True, check=False)
    return page.stdout.split()


def pool_keys(master_metrics: int) -> int:
    """Return the number of keys of blocks that the pool's master knows."""
    return sum(key.startswith(NAMESPACED) for key in list_keys(master_metrics))


def check_keys_are_ours(master_metrics: int) -> None:
    """Check that our backend wrote every block in the pool: its keys begin with a namespace.

    Keys of Mooncake's own client have no namespace.
    """
    keys = [key for key in list_keys(master_metrics) if not key.startswith(MANIFEST)]
    foreign = [key for key in keys if not key.startswith(NAMESPACED)]
    if foreign or not keys:
        found = f"{len(foreign)} keys such as {foreign[0]}" if foreign else "no key"
        fail(f"the pool has {found} where all should begin with {NAMESPACED}: our backend did not write them")
    print(f"          All {len(keys)} keys in the pool are our backend's ({keys[0][:12]}...).")


def wait_until_saved(master_metrics: int, keys: int, instances: Iterable[int]) -> None:
    """Wait until the pool has ``keys`` keys of blocks and no instance is still saving.

    This is necessary because an answer may end before its blocks are saved.
    """

    def saved() -> bool:
        done = pool_keys(master_metrics) >= keys
        return done and not any(metric(port, "kvstore_pending_save_blocks") for port in instances)

    wait_for(saved, f"the pool did not get the {keys} blocks it should have by now; see log_*/nohup in {HERE}")


def wait_for(look: Callable[[], Seen | None], complaint: str) -> Seen:
    """Call ``look`` until it returns something true, and return that; at the deadline, end with ``complaint``."""
    end = time.monotonic() + DEADLINE
    while not (seen := look()):
        if time.monotonic() > end:
            fail(f"{complaint} ({DEADLINE:.0f} s waited)")
        time.sleep(0.05)
    return seen


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; the first column is aligned to the left, the others to the right."""
    cells = [heads, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print()
    for row in cells:
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))
    print()


def shorten(text: str) -> str:
    """Return the first 90 characters of an answer."""
    return f"{text[:90]} ..." if len(text) > 90 else text


def hold_conversation(port: int, after_turn: Callable[[Answer], None]) -> list[Answer]:
    """Ask the questions of TURNS one after another, each with all earlier questions and answers."""
    messages: list[Message] = []
    answers = []
    for number, question in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": question})
        print(
            f"turn {number}: curl http://127.0.0.1:{port}/v1/chat/completions  ({len(messages)} messages)", flush=True
        )
        answer = ask(port, messages, MAX_TOKENS, MIN_TOKENS)
        print(f"        {answer.prompt_tokens} + {answer.completion_tokens} tokens:{shorten(answer.text)}", flush=True)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
        after_turn(answer)
    return answers


def reference(port: int, answers: Path) -> None:
    """Hold the conversation with an instance that has neither pool nor cache, and write its answers to a file."""
    given = hold_conversation(port, lambda _: None)
    answers.write_text(json.dumps([asdict(answer) for answer in given]))


def conversation(
    port: int,
    expected: Path,
    prefill_log: Path,
    instances: list[int],
    master_metrics: int,
    keys_per_block: int,
) -> None:
    """Hold the conversation through the router, and check that each turn reads the last turn's answer from the pool."""

    def saved(answer: Answer) -> None:
        # The last token was never an input of the model, so it has no KV.
        blocks = (answer.prompt_tokens + answer.completion_tokens - 1) // BLOCK
        wait_until_saved(master_metrics, blocks * keys_per_block, instances)

    answers = hold_conversation(port, saved)
    cached = [logged(prefill_log, answer) for answer in answers]
    without_pool = [Answer(**fields) for fields in json.loads(expected.read_text())]

    print_table(
        ("request", "prompt tokens", "own cache", "pool", "computed", "first token", "without cache"),
        [
            (
                f"turn {number}",
                answer.prompt_tokens,
                found.own,
                found.pool,
                answer.prompt_tokens - found.own - found.pool,
                f"{answer.seconds * 1000:.0f} ms",
                f"{cold.seconds * 1000:.0f} ms",
            )
            for number, (answer, found, cold) in enumerate(zip(answers, cached, without_pool, strict=True), 1)
        ],
    )
    for number in range(1, len(TURNS)):
        _check_pool_was_read(number, answers[number - 1], cached[number])
    for number, (answer, cold) in enumerate(zip(answers, without_pool, strict=True), 1):
        _check_equal(f"turn {number} with the pool", answer.text, cold.text)
    print("verified: in each turn after the first, prefill read from the pool what decode had generated in the turn")
    print("          before; all answers equal those given without pool and cache.")
    check_keys_are_ours(master_metrics)


def _check_pool_was_read(number: int, before: Answer, found: Cached) -> None:
    """Check that turn ``number + 1`` found in caches at least one block of the text that turn ``number`` generated."""
    reached = found.own + found.pool - before.prompt_tokens
    if found.pool <= 0 or reached < BLOCK:
        fail(
            f"prefill found {found.own} tokens of turn {number + 1}'s prompt in its own cache and {found.pool} in the "
            f"pool; that is {reached} more than turn {number}'s prompt, but at least one block of {BLOCK} was expected"
        )


def _check_equal(name: str, text: str, expected: str) -> None:
    if text != expected:
        same = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), 0)
        fail(
            f"the answer to {name} differs from character {same} on: {shorten(text[same:])!r} "
            f"instead of {shorten(expected[same:])!r}"
        )


def sharing(ports: list[int], logs: list[Path], master_metrics: int, keys_per_block: int) -> None:
    """Check that instance 1 reads prompts from the pool that instance 0 computed, faster than it computes new ones."""
    rows: list[Sequence[object]] = []

    def timed(instance: int, name: str, seed: int) -> tuple[Answer, Cached]:
        answer = ask(ports[instance], [{"role": "user", "content": prompt(seed)}], max_tokens=20)
        found = logged(logs[instance], answer)
        computed = answer.prompt_tokens - found.own - found.pool
        first_token = f"{answer.seconds * 1000:.0f} ms"
        rows.append(
            (f"instance {instance}, {name}", answer.prompt_tokens, found.own, found.pool, computed, first_token)
        )
        print(f"  {rows[-1][0]}: first token after {first_token}", flush=True)
        return answer, found

    print("warming up")
    for instance in range(len(ports)):
        ask(ports[instance], [{"role": "user", "content": prompt(seed=1000 + instance)}], max_tokens=20)
    cold, warm = [], []
    for seed in range(SAMPLES):
        answer, found = timed(1, f"new prompt {seed + 1}", seed)
        _check_nothing_cached(found)
        cold.append(answer.seconds)
    for seed in range(100, 100 + SAMPLES):
        keys = pool_keys(master_metrics)
        first, found = timed(0, f"prompt {seed - 99}", seed)
        _check_nothing_cached(found)
        wait_until_saved(master_metrics, keys + first.prompt_tokens // BLOCK * keys_per_block, ports)
        second, found = timed(1, f"prompt {seed - 99}", seed)
        # At least one token must be computed, because its logits are needed to choose the first token.
        expected = (second.prompt_tokens - 1) // BLOCK * BLOCK
        if found.pool < expected:
            fail(f"instance 1 read {found.pool} of {expected} tokens from the pool that instance 0 had computed")
        _check_equal("a prompt read from the pool", second.text, first.text)
        warm.append(second.seconds)

    print_table(("request", "prompt tokens", "own cache", "pool", "computed", "first token"), rows)
    computing = statistics.median(cold)
    times = computing / statistics.median(warm)
    if computing > JUDGED_SECONDS and times < SPEEDUP:
        fail(f"instance 1's first token came {times:.1f} times sooner with the pool; {SPEEDUP:.0f} were expected")
    print(
        f"verified: instance 1 read from the pool what instance 0 had computed; its first token came {times:.1f} times"
    )
    print("          sooner than for a new prompt (medians), and its answers equal instance 0's, which computed them.")
    if computing <= JUDGED_SECONDS:
        print(f"          This model computes a new prompt in {computing:.2f} s, so the speed is not a criterion here.")
    check_keys_are_ours(master_metrics)


def prompt(seed: int) -> str:
    """Return a prompt of about PROMPT_TOKENS tokens; prompts of two seeds have different beginnings.

    Its words are common ones, which are one token each in most tokenizers.
    """
    words = random.Random(seed).choices(WORDS, k=PROMPT_TOKENS - 30)
    return " ".join(words)


def _check_nothing_cached(found: Cached) -> None:
    if found.own or found.pool:
        fail(f"a prompt never seen before was found in a cache: {found}")


def main() -> None:
    """Run the check that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("reference")
    one.add_argument("--port", type=int, required=True)
    one.add_argument("--answers", type=Path, required=True)
    two = commands.add_parser("conversation")
    two.add_argument("--port", type=int, required=True)
    two.add_argument("--answers", type=Path, required=True)
    two.add_argument("--prefill-log", type=Path, required=True)
    two.add_argument("--instances", type=int, nargs="+", required=True)
    two.add_argument("--master-metrics", type=int, required=True)
    three = commands.add_parser("sharing")
    three.add_argument("--ports", type=int, nargs=2, required=True)
    three.add_argument("--logs", type=Path, nargs=2, required=True)
    three.add_argument("--master-metrics", type=int, required=True)
    for each in (two, three):
        each.add_argument("--keys-per-block", type=int, default=1, help="2 where K and V are apart")
    args = parser.parse_args()
    if args.command == "reference":
        reference(args.port, args.answers)
    elif args.command == "conversation":
        conversation(
            args.port, args.answers, args.prefill_log, args.instances, args.master_metrics, args.keys_per_block
        )
    else:
        sharing(args.ports, args.logs, args.master_metrics, args.keys_per_block)


if __name__ == "__main__":
    main()
