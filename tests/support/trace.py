"""Requests of a conversation trace, scaled down to the small model, and the cached tokens of each prompt from two
sources: the usage in the response, and the log of the instance.

The ``hash_ids`` of a trace are ids of the blocks of a prompt. Equal ids mean equal text after an equal prefix. Here
each block is a few words, so prompts are shorter, but share the same prefixes as in the trace.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.make_model import WORDS
from tests.support import plain_http

__all__ = ["Row", "Told", "ask_row", "find_logged", "pick_conversations", "read_trace"]

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
# In the other APIs, the prompt is one text, so the requests of a conversation share their prefix across APIs.
_OVER_CHAT = (_CHAT, _RESPONSES, _MESSAGES)
_FINISHED = re.compile(
    r"request finished: request_id=(\S+) .*gpu_cache_token_num=(\d+) .*storage_cache_token_num=(\d+)"
)


class Row(NamedTuple):
    """A request of a trace."""

    number: int
    conversation: int
    hash_ids: Sequence[int]


class Told(NamedTuple):
    """The figures in a response."""

    request_id: str
    path: str
    prompt_tokens: int
    cached_tokens: int


def read_trace(file: Path) -> list[Sequence[int]]:
    """Return the ``hash_ids`` of each request."""
    return [json.loads(line)["hash_ids"] for line in file.read_text().splitlines()]


def pick_conversations(trace: Iterable[Sequence[int]], count: int, most_blocks: int) -> list[Row]:
    """Return ``count`` requests of conversations with several turns, in order, with at most ``most_blocks`` blocks."""
    turns: dict[int, list[tuple[int, Sequence[int]]]] = defaultdict(list)
    for number, hash_ids in enumerate(trace):
        if len(hash_ids) > 1:  # all begin with the same block
            turns[hash_ids[1]].append((number, hash_ids))
    picked: list[Row] = []
    for conversation in turns.values():
        short = [turn for turn in conversation if len(turn[1]) <= most_blocks]
        if len(short) > 1 and len(picked) < count:
            picked += [Row(number, conversation[0][0], hash_ids) for number, hash_ids in short]
    return sorted(picked)[:count]


def ask_row(url: str, row: Row, tokens_a_block: int) -> Told:
    """Send a request for a short response, in one of four APIs, with or without streaming.

    Raises:
        AssertionError: the request fails, or its usages differ.
    """
    text = " ".join(_words_of(block, tokens_a_block) for block in row.hash_ids)
    is_stream = row.number % 2 == 1
    path = _COMPLETIONS if row.conversation % 4 == 0 else _OVER_CHAT[row.number % 3]
    body: dict[str, Any] = {"model": "any", "temperature": 0, "stream": is_stream}
    if path == _COMPLETIONS:
        body |= {"prompt": text, "max_tokens": 4}
    elif path == _RESPONSES:
        body |= {"input": text, "max_output_tokens": 4}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    if is_stream and path in (_CHAT, _COMPLETIONS):
        body["stream_options"] = {"include_usage": True}
    answer = plain_http.post(f"{url}{path}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines() if is_stream else [f"data: {answer.text}"]
    told = {each for line in lines if line.startswith("data: {") for each in _read_usage(json.loads(line[6:]))}
    assert len(told) == 1, (path, told, answer.text[-1000:])
    return Told(answer.headers["x-router-request-id"], path, *told.pop())


def find_logged(logs: Iterable[str]) -> dict[str, int]:
    """Return the cached tokens of each request by its id, from a cache or the pool, as the logs report."""
    return {found[1]: int(found[2]) + int(found[3]) for log in logs for found in _FINISHED.finditer(log)}


def _words_of(block: int, count: int) -> str:
    return " ".join(random.Random(block).choices(WORDS, k=count))


def _read_usage(said: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the prompt tokens and the cached tokens in a response or in an event."""
    assert not said.get("error"), said
    usage = said.get("usage") or (said.get("response") or {}).get("usage") or (said.get("message") or {}).get("usage")
    if not usage:
        return []
    if "prompt_tokens" in usage:
        return [(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])]
    if "input_tokens_details" in usage:
        return [(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])]
    cached = usage["cache_read_input_tokens"]
    return [(usage["input_tokens"] + cached, cached)]
