"""Sends and receives the messages of a hand-over, and converts a prompt and log probabilities to JSON and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from engine.scheduling.request import SamplingParams, Sequence, TokenLogprobs
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
"""Maximum time to wait for a message from the other instance."""
LINE_LIMIT = 4 << 20
"""Maximum length of a message in bytes. A block hash takes 68 bytes, so a prompt may have 60,000 blocks."""


@dataclass(frozen=True)
class Prompt:
    """Description of a prompt in the messages of a hand-over, without its tokens.

    Attributes:
        num_tokens: number of tokens.
        hashes: the block hashes of the full blocks.
        digest: a digest of all tokens and of the ``cache_salt``. If it is equal in both instances, the prompts are
            equal. But ``num_tokens`` and ``hashes`` from another instance may still be wrong.
        sampling: how the first token of the answer is sampled. If the request at the decode instance samples in another
            way, the decode instance uses the KV of prefill, but not the token. None: the prefill instance is of a
            version that does not send this.
    """

    num_tokens: int
    hashes: tuple[bytes, ...]
    digest: str
    sampling: str | None = field(compare=False)

    @classmethod
    def of_sequence(cls, sequence: Sequence) -> Prompt:
        """Return the description of the prompt of a sequence that was not submitted yet."""
        tokens, root = sequence.request.prompt_token_ids, root_hash(sequence.request.cache_salt)
        (digest,) = extend_block_hashes([], tokens, len(tokens), root)
        sampling = _describe_sampling(sequence.request.params)
        return cls(len(tokens), tuple(sequence.hashes()), digest.hex(), sampling)

    def to_message(self) -> dict[str, object]:
        """Return the members of a "begin" message that describe this prompt."""
        hashes = [block_hash.hex() for block_hash in self.hashes]
        return {"num_tokens": self.num_tokens, "hashes": hashes, "digest": self.digest, "sampling": self.sampling}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Prompt:
        """Return the description of a prompt in a "begin" message.

        Raises:
            ValueError, KeyError, TypeError: a member is missing or wrong.
        """
        num_tokens, digest = message["num_tokens"], message["digest"]
        if not isinstance(num_tokens, int) or num_tokens < 1 or not isinstance(digest, str):
            raise ValueError(
                f"num_tokens is {num_tokens!r} and digest is {digest!r}; they must be a positive number and a text"
            )
        sampling = message.get("sampling")
        hashes = tuple(map(bytes.fromhex, message["hashes"]))
        return cls(num_tokens, hashes, digest, None if sampling is None else str(sampling))


def _describe_sampling(params: SamplingParams) -> str:
    """Return a text that is equal for two requests if both sample the first token, with its logprobs, in the same way.

    The text leaves out limits and stop conditions, but has the tokens that ``min_tokens`` excludes.
    """
    excluded = sorted(params.stop_token_ids) if params.min_tokens else None
    rest = replace(params, max_tokens=1, min_tokens=0, stop=(), stop_token_ids=frozenset(), ignore_eos=False)
    return f"{rest} {excluded}"


def encode_logprobs(logprobs: TokenLogprobs | None) -> object:
    """Return log probabilities as an object for JSON; None for None."""
    return None if logprobs is None else [logprobs.chosen, logprobs.top]


def decode_logprobs(value: Any, vocab_size: int) -> TokenLogprobs | None:
    """Return the log probabilities from an object of ``encode_logprobs``; token ids must be below ``vocab_size``.

    Raises:
        ValueError, TypeError: the object has another form.
    """
    if value is None:
        return None
    chosen, top = value
    pairs = [(decode_number(token, vocab_size), float(logprob)) for token, logprob in top]
    return TokenLogprobs(float(chosen), tuple(pairs))


def decode_number(value: Any, limit: int) -> int:
    """Return ``value``, which must be an integer from 0 to below ``limit``.

    Raises:
        ValueError: ``value`` is something else.
    """
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{str(value)[:80]} is not a whole number below {limit}")
    return value


async def wait_at_most(awaitable: Awaitable[_T], seconds: float | None) -> _T:
    """Wait for a result for at most ``seconds``, or without a limit if this is None.

    ``asyncio.wait_for`` of Python 3.11 loses a cancellation that comes at the same moment as the result. This function
    raises it.

    Raises:
        asyncio.TimeoutError: there was no result within ``seconds``.
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
    """Connect to the connector port of another instance.

    Raises:
        asyncio.TimeoutError: there was no connection within ``SILENCE_SECONDS``.
        OSError: the port cannot be reached.
    """
    opening = asyncio.ensure_future(asyncio.open_connection(host, port, limit=LINE_LIMIT))
    try:
        return await wait_at_most(opening, SILENCE_SECONDS)
    except BaseException:
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            opening.result()[1].close()  # the connection was opened at the moment of the cancellation
        raise


def send_message(writer: asyncio.StreamWriter, kind: str, **members: object) -> None:
    """Send one message. If the other side has closed the connection, the message is lost without an error."""
    if not writer.is_closing():
        writer.write(json.dumps({"type": kind, **members}).encode() + b"\n")


async def receive_message(reader: asyncio.StreamReader, silence_seconds: float | None) -> dict[str, Any]:
    """Wait for the next message.

    Raises:
        asyncio.TimeoutError: no message arrived within ``silence_seconds``, if this is not None.
        EOFError: the other side has closed the connection.
        ValueError: the message is not a JSON object with a type, or is longer than ``LINE_LIMIT``.
        OSError: the connection was lost.
    """
    line = await wait_at_most(reader.readline(), silence_seconds)
    if not line:
        raise EOFError("the other instance closed the connection")
    try:
        message = json.loads(line)
    except RecursionError as exc:
        raise ValueError("the message is nested too deeply") from exc
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError(f"a message must be a JSON object with a type, but it is {str(message)[:80]}")
    return message
