"""Prompts, requests, and reads of the instances' metrics."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from cluster import MODEL, fail, metric

from engine.make_model import WORDS

__all__ = [
    "ANSWER_TOKENS",
    "BLOCK",
    "PATHS",
    "Answer",
    "answered",
    "ask",
    "blocks",
    "complete",
    "wait_answered",
    "wait_for",
    "words",
]

BLOCK = 128
"""Tokens in a block: vLLM's default on CPU."""

ANSWER_TOKENS = 16
DEADLINE_S = 60.0

LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
PATHS = tuple(LIMITS)
"""The paths of the APIs that generate text."""


class Answer(NamedTuple):
    """The text of an answer, and the number of prompt tokens in its usage (0 for a stream)."""

    text: str
    prompt_tokens: int


def words(count: int, seed: int) -> str:
    """Return a text of ``count`` tokens: in the model's vocabulary, a space and a word are one token."""
    return "".join(f" {word}" for word in random.Random(seed).choices(WORDS, k=count))


def complete(port: int, prompt: str, *, stream: bool = False) -> str:
    """Return the text of a greedy completion; end the program if the request fails."""
    return ask(port, "/v1/completions", prompt, stream=stream).text


def ask(port: int, path: str, prompt: str, *, stream: bool = False) -> Answer:
    """Send a greedy request to one of ``PATHS`` and return the answer; end the program if the request fails."""
    messages = [{"role": "user", "content": prompt}]
    members = {"/v1/completions": ("prompt", prompt), "/v1/responses": ("input", prompt)}
    name, value = members.get(path, ("messages", messages))
    body = {"model": MODEL, name: value, LIMITS[path]: ANSWER_TOKENS, "temperature": 0, "stream": stream}
    if path != "/v1/messages":
        body["ignore_eos"] = True
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            if not stream:
                return _read_whole(path, json.load(answer))
            events = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: {")]
    except OSError as exc:
        text = exc.read().decode(errors="replace") if isinstance(exc, urllib.error.HTTPError) else ""
        fail(f"port {port} did not answer a request to {path}: {exc} {text}".rstrip())
    return Answer("".join(map(_read_event, events)), 0)


def answered(port: int) -> int:
    """Return the number of requests that an instance has answered."""
    return int(metric(port, "vllm:request_success_total"))


def blocks(port: int, operation: str) -> int:
    """Return the number of blocks that an instance successfully looked up, loaded or saved."""
    return int(metric(port, "vllm:kvstore_blocks_total", f'operation="{operation}"', 'outcome="ok"'))


def wait_for(port: int, operation: str, count: int) -> None:
    """Wait until an instance has counted ``count`` blocks. Answers do not wait for transfers."""
    _wait(lambda: blocks(port, operation), count, f"the instance on port {port} has {{}} blocks ({operation})")


def wait_answered(port: int, count: int) -> None:
    """Wait until an instance has counted ``count`` answered requests. It may count a request after the answer."""
    _wait(lambda: answered(port), count, f"the instance on port {port} has answered {{}} requests")


def _read_whole(path: str, answer: Any) -> Answer:
    usage = answer["usage"]
    if path == "/v1/messages":
        cached = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
        return Answer(answer["content"][0]["text"], usage["input_tokens"] + sum(cached))
    if path == "/v1/responses":
        return Answer(answer["output"][0]["content"][0]["text"], usage["input_tokens"])
    choice = answer["choices"][0]
    return Answer(choice["text"] if "text" in choice else choice["message"]["content"], usage["prompt_tokens"])


def _read_event(event: Any) -> str:
    """Return the text that an event of any of the APIs adds to the answer."""
    if "error" in event:
        fail(f"a stream ended with {event['error']}")
    if "choices" in event:
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"]
        )
    if event["type"] == "content_block_delta":
        return str(event["delta"].get("text", ""))
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _wait(counted: Callable[[], int], count: int, sentence: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (now := counted()) < count:
        if time.monotonic() > deadline:
            fail(f"after {DEADLINE_S:g} s {sentence.format(now)}, not {count}")
        time.sleep(0.1)
