"""Prompts, answers, and what instances counted meanwhile."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from cluster import MODEL, fail, metric

from engine.make_model import WORDS

__all__ = ["ANSWER_TOKENS", "BLOCK", "answered", "blocks", "complete", "wait_answered", "wait_for", "words"]

BLOCK = 128
"""Tokens in a block: what vLLM takes on CPU where nobody says otherwise."""

ANSWER_TOKENS = 16
DEADLINE_S = 60.0


def words(count: int, seed: int) -> str:
    """A text of this many tokens: in the model's vocabulary each word is one, with the space before it."""
    return "".join(f" {word}" for word in random.Random(seed).choices(WORDS, k=count))


def complete(port: int, prompt: str, *, stream: bool = False) -> str:
    """A greedy answer; one that does not come ends the program."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body["stream"] = stream
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            if not stream:
                return str(json.load(answer)["choices"][0]["text"])
            events = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
    except OSError as exc:
        said = exc.read().decode(errors="replace") if isinstance(exc, urllib.error.HTTPError) else ""
        fail(f"port {port} did not answer a request: {exc} {said}".rstrip())
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def answered(port: int) -> int:
    """Requests that an instance has answered."""
    return int(metric(port, "vllm:request_success_total"))


def blocks(port: int, operation: str) -> int:
    """Blocks that an instance looked up, loaded or saved with success."""
    return int(metric(port, "vllm:kvstore_blocks_total", f'operation="{operation}"', 'outcome="ok"'))


def wait_for(port: int, operation: str, count: int) -> None:
    """Until an instance has counted so many blocks; transfers do not hold answers up."""
    _wait(lambda: blocks(port, operation), count, f"the instance on port {port} has {{}} blocks ({operation})")


def wait_answered(port: int, count: int) -> None:
    """Until an instance has answered so many requests; a router's client may have its answer before prefill ends."""
    _wait(lambda: answered(port), count, f"the instance on port {port} has answered {{}} requests")


def _wait(counted: Callable[[], int], count: int, sentence: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (now := counted()) < count:
        if time.monotonic() > deadline:
            fail(f"after {DEADLINE_S:g} s {sentence.format(now)}, not {count}")
        time.sleep(0.1)
