"""Measures whether loading KV from a pool is faster than computing it on an instance.

Loading a hit of ``n`` tokens takes ``fixed + n * load`` seconds, and computing it takes ``n * compute`` seconds. So
loading saves time for hits of at least ``fixed / (compute - load)`` tokens, or never. Running instances decide for each
request (``load_or_compute.py``); this module is for an operator who wants to know the result before.
"""

from __future__ import annotations

import math
import os
import random
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import numpy as np

from kvstore_backend.backend import PoolUnavailable, Span
from kvstore_backend.config import PoolConfig
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import BlockPool, open_pool

__all__ = ["Comparison", "InstanceUnavailable", "time_computing", "time_loading"]

_BLOCK_TOKENS = 64
_MAX_LOAD_BYTES = 64 << 20
_MAX_BLOCKS = 32
_TRIES = 3
# Number of words in the first prompt and in the longest one. Each prompt is twice as long as the one before, until a
# prompt takes long enough to measure.
_SHORT_WORDS = 32
_MAX_WORDS = 4096
_LONG_ENOUGH_SECONDS = 0.5
_ASK_SECONDS = 60.0


class InstanceUnavailable(Exception):
    """Error: an instance did not answer a request as expected. The message is one sentence."""


@dataclass(frozen=True)
class Comparison:
    """Measured seconds to load and to compute the KV of a prompt.

    Attributes:
        fixed_seconds: seconds that every load takes, independent of its tokens.
        load_seconds: additional seconds for each token that is loaded.
        compute_seconds: seconds for each token that is computed.
    """

    fixed_seconds: float
    load_seconds: float
    compute_seconds: float

    @property
    def least_tokens(self) -> int | None:
        """Smallest number of tokens for which loading is faster than computing; ``None`` if it never is."""
        saved = self.compute_seconds - self.load_seconds
        return math.ceil(self.fixed_seconds / saved) if saved > 0 else None

    def seconds_to_load(self, num_tokens: int) -> float:
        """Return the seconds to load the KV of ``num_tokens`` tokens."""
        return self.fixed_seconds + num_tokens * self.load_seconds


def time_loading(config: PoolConfig, token_bytes: int) -> tuple[float, float]:
    """Measure loads from a pool; return ``fixed_seconds`` and ``load_seconds`` of ``Comparison``.

    Blocks of random bytes are put, read and removed, in a namespace that no other client uses.

    Args:
        config: configuration of the pool.
        token_bytes: bytes of the KV of one token.

    Raises:
        PoolUnavailable: the pool cannot be opened, or the blocks cannot be put or read.
    """
    block_bytes = _BLOCK_TOKENS * token_bytes
    count = max(2, min(_MAX_BLOCKS, _MAX_LOAD_BYTES // block_bytes))
    memory = np.frombuffer(os.urandom(block_bytes), dtype=np.uint8).repeat(count)
    namespace = Namespace(f"kvstore-doctor-{os.urandom(8).hex()}", "uint8", _BLOCK_TOKENS, 1, 1, 1, "bytes")
    with open_pool(config, namespace, background=False) as pool:
        pool.register(memory.ctypes.data, memory.nbytes)
        try:
            one, all_ = _time_reads(pool, memory.ctypes.data, block_bytes, (1, count))
        finally:
            pool.clear()
            pool.unregister(memory.ctypes.data, memory.nbytes)
    slope = max(0.0, all_ - one) / ((count - 1) * _BLOCK_TOKENS)
    return max(0.0, one - slope * _BLOCK_TOKENS), slope


def _time_reads(pool: BlockPool, address: int, block_bytes: int, counts: tuple[int, ...]) -> Iterator[float]:
    """Put blocks; yield for each number in ``counts`` the seconds to look up and read this number of blocks."""
    hashes = [os.urandom(32) for _ in range(max(counts))]
    values = [(Span(address + i * block_bytes, block_bytes),) for i in range(len(hashes))]
    if not all(pool.put_blocks(hashes, values)):
        raise PoolUnavailable(f"{len(hashes)} blocks of {block_bytes} bytes could not be stored; the pool may be full")
    for count in counts:
        yield min(_time_read(pool, hashes[:count], values[:count]) for _ in range(_TRIES))


def _time_read(pool: BlockPool, hashes: list[bytes], values: list[tuple[Span]]) -> float:
    start = time.perf_counter()
    if pool.lookup(hashes) != len(hashes) or not all(pool.get_blocks(hashes, values)):
        raise PoolUnavailable(
            f"{len(hashes)} blocks that were just stored could not be read again; the pool may be full, or too slow"
        )
    return time.perf_counter() - start


def time_computing(instance: str) -> float:
    """Measure the seconds that an idle instance with OpenAI's endpoints needs to compute one token of a prompt.

    The instance receives some prompts of random words, and generates two tokens for each. If it saves blocks, their KV
    is in the pool afterwards.

    Args:
        instance: URL of the instance, such as ``http://127.0.0.1:52400``.

    Raises:
        InstanceUnavailable: the instance does not answer, or is not a server with OpenAI's endpoints.
    """
    with httpx.Client(base_url=instance, timeout=_ASK_SECONDS, trust_env=False) as client:
        try:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            return _time_prompts(lambda words: _ask(client, model, words))
        except httpx.HTTPError as exc:
            raise InstanceUnavailable(f"the instance at {instance} does not answer: {exc}") from exc
        except (ValueError, KeyError, IndexError, TypeError) as exc:
            raise InstanceUnavailable(f"the server at {instance} has no OpenAI endpoints") from exc


def _time_prompts(ask: Callable[[int], tuple[int, float]]) -> float:
    """Return the seconds that an instance needs to compute one token of a prompt, from prompts of several lengths.

    Args:
        ask: sends a prompt with a given number of words; returns its number of tokens, and the request's seconds.

    Raises:
        InstanceUnavailable: the instance's context is too short for a second prompt.
    """
    ask(_SHORT_WORDS)  # the first request of an instance may take longer
    short_tokens, short_seconds = min((ask(_SHORT_WORDS) for _ in range(_TRIES)), key=lambda pair: pair[1])
    words, tokens, seconds = 2 * _SHORT_WORDS, short_tokens, short_seconds
    while words <= _MAX_WORDS and seconds - short_seconds < _LONG_ENOUGH_SECONDS:
        try:
            tokens, seconds = ask(words)
        except httpx.HTTPStatusError:  # the prompt is longer than the instance's context
            break
        words *= 2
    if tokens == short_tokens:
        raise InstanceUnavailable(
            f"the instance accepted no prompt of more than {_SHORT_WORDS} words; the measurement needs longer prompts"
        )
    return max(0.0, seconds - short_seconds) / (tokens - short_tokens)


def _ask(client: httpx.Client, model: str, words: int) -> tuple[int, float]:
    """Send a prompt of random words; return its number of tokens, and the seconds until two tokens were generated.

    The request is not for one token, because an instance may take such a request for prefill, and respond only when the
    prompt's blocks are in the pool.
    """
    prompt = " ".join("".join(random.choices(string.ascii_lowercase, k=5)) for _ in range(words))
    start = time.perf_counter()
    answer = client.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 2})
    seconds = time.perf_counter() - start
    return int(answer.raise_for_status().json()["usage"]["prompt_tokens"]), seconds
