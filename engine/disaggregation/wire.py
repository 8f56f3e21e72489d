"""The connection of a hand-over: how its messages are sent and received, and how they describe a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.scheduling.request import Sequence, TokenLogprobs
from kvstore_backend.block_hash import extend_block_hashes, root_hash

__all__ = [
    "LINE_LIMIT",
    "SILENCE_SECONDS",
    "Prompt",
    "decode_logprobs",
    "decode_number",
    "encode_logprobs",
    "open_connection",
    "receive_message",
    "send_message",
    "wait_at_most",
]

_T = TypeVar("_T")

SILENCE_SECONDS = 5.0
LINE_LIMIT = 4 << 20
"""Maximum length of a message in bytes: a block's hash takes 68, so prompts of 60,000 blocks fit."""


@dataclass(frozen=True)
class Prompt:
    """A prompt without its tokens: their number, the chained hashes of its full blocks, and a digest of all of it.

    The hashes leave out the last, partly filled block. Equal digests mean equal tokens and an equal ``cache_salt``, but
    the number and the hashes that another instance sends may be wrong even if the digest is right.
    """

    num_tokens: int
    hashes: tuple[bytes, ...]
    digest: str

    @classmethod
    def of_sequence(cls, sequence: Sequence) -> Prompt:
        """Describe the prompt of a sequence that has not been submitted yet."""
        tokens, root = sequence.request.prompt_token_ids, root_hash(sequence.request.cache_salt)
        (digest,) = extend_block_hashes([], tokens, len(tokens), root)
        return cls(len(tokens), tuple(sequence.hashes()), digest.hex())

    def to_message(self) -> dict[str, object]:
        """Return the prompt as members of a "begin" message."""
        hashes = [block_hash.hex() for block_hash in self.hashes]
        return {"num_tokens": self.num_tokens, "hashes": hashes, "digest": self.digest}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Prompt:
        """Parse a "begin" message from an untrusted sender.

        Raises:
            ValueError, KeyError, TypeError: it does not describe a prompt.
        """
        num_tokens, digest = message["num_tokens"], message["digest"]
        if not isinstance(num_tokens, int) or num_tokens < 1 or not isinstance(digest, str):
            raise ValueError(f"num_tokens is {num_tokens!r} and digest {digest!r}")
        return cls(num_tokens, tuple(map(bytes.fromhex, message["hashes"])), digest)


def encode_logprobs(logprobs: TokenLogprobs | None) -> object:
    """Encode log probabilities as JSON."""
    return None if logprobs is None else [logprobs.chosen, logprobs.top]


def decode_logprobs(value: Any, vocab_size: int) -> TokenLogprobs | None:
    """Parse the output of ``encode_logprobs``, for tokens below ``vocab_size``.

    Raises:
        ValueError, TypeError: it is something else.
    """
    if value is None:
        return None
    chosen, top = value
    pairs = [(decode_number(token, vocab_size), float(logprob)) for token, logprob in top]
    return TokenLogprobs(float(chosen), tuple(pairs))


def decode_number(value: Any, limit: int) -> int:
    """Parse an integer from 0 to below ``limit``.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{str(value)[:80]} is no whole number below {limit}")
    return value


async def wait_at_most(awaitable: Awaitable[_T], seconds: float | None) -> _T:
    """Wait for a result; unlike ``asyncio.wait_for`` of Python 3.11, raise a cancellation that comes with the result.

    Raises:
        asyncio.TimeoutError: it did not come within ``seconds``.
    """
    if seconds is None:
        return await awaitable
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def open_connection(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to another instance's connector port.

    Raises:
        asyncio.TimeoutError: it was not reached in ``SILENCE_SECONDS``.
        OSError: it was not reached.
    """
    opening = asyncio.ensure_future(asyncio.open_connection(host, port, limit=LINE_LIMIT))
    try:
        return await wait_at_most(opening, SILENCE_SECONDS)
    except BaseException:
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            opening.result()[1].close()  # it came with the cancellation
        raise


def send_message(writer: asyncio.StreamWriter, kind: str, **members: object) -> None:
    """Write one message; it is lost without an error when the other side has closed the connection."""
    if not writer.is_closing():
        writer.write(json.dumps({"type": kind, **members}).encode() + b"\n")


async def receive_message(reader: asyncio.StreamReader, silence_seconds: float | None) -> dict[str, Any]:
    """Wait for the next message.

    Raises:
        asyncio.TimeoutError: none arrived for ``silence_seconds``.
        EOFError: the other side closed the connection.
        ValueError: it is not a JSON object with a type, or longer than ``LINE_LIMIT``.
        OSError: the connection was lost.
    """
    line = await wait_at_most(reader.readline(), silence_seconds)
    if not line:
        raise EOFError("the other side closed the connection")
    try:
        message = json.loads(line)
    except RecursionError as exc:
        raise ValueError("the message is nested too deeply") from exc
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError(f"expected an object with a type, got {str(message)[:80]}")
    return message
