"""A prefill and a decode instance with the dialect of another engine, in one process, without a router."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.apis.completions import Completions, PairDialect
from engine.protocol import ChatBody, CompletionBody, check_body
from simulation.actors.dialects import retain_prompts
from tests.engine.event_loop import eventually
from tests.engine.pair import HOST, PROMPT, Pair, Side, pair_of

__all__ = ["Client", "DialectPair", "dialect_pair", "prompt_of"]


def prompt_of(length: int, first: int = 1) -> list[int]:
    """Return a prompt. Prompts with different values of ``first`` share no block."""
    return [(first + i) % 250 for i in range(length)]


@dataclass(frozen=True)
class Client:
    """An instance, and its API for clients."""

    side: Side
    completions: Completions

    async def complete(self, **fields: Any) -> Any:
        """Send a completion request; return the whole response."""
        body = {"prompt": list(PROMPT), "temperature": 0, "max_tokens": 8, "return_token_ids": True, **fields}
        return await (await self.completions.begin_completion(check_body(CompletionBody, body))).collect_whole()

    async def chat(self, **fields: Any) -> Any:
        """Send a chat request with the tokens of its prompt; return the whole response."""
        body = {"messages": [{"role": "user", "content": "x"}], "prompt_token_ids": list(PROMPT), **fields}
        return await (await self.completions.begin_chat(check_body(ChatBody, body))).collect_whole()


@dataclass(frozen=True)
class DialectPair:
    """A prefill and a decode instance, and a mixed one for comparison."""

    pair: Pair
    prefill: Client
    decode: Client
    alone: Client


@contextlib.asynccontextmanager
async def dialect_pair(
    folder: Path, tokenizer: Any, make_dialect: Callable[[str, int], PairDialect], **options: Any
) -> AsyncIterator[DialectPair]:
    """Start a pair. At the end, assert that all its blocks are free and that no prompt is retained.

    Args:
        make_dialect: makes a dialect from a role and the instance's connector port.
        options: options of ``pair_of``.
    """
    async with pair_of(folder, tokenizer, **options) as pair:
        retained = retain_prompts(pair.prefill.receiver, pair.prefill.memory)
        await pair.prefill.receiver.start_listening(socket.create_server((HOST, 0)))

        def make_client(side: Side, dialect: PairDialect | None) -> Client:
            vocab_size = side.engine.runner.vocab_size
            return Client(side, Completions(side.generations, tokenizer, "tiny", 200, vocab_size, dialect=dialect))

        try:
            yield DialectPair(
                pair,
                make_client(pair.prefill, make_dialect("prefill", pair.prefill.receiver.port)),
                make_client(pair.decode, make_dialect("decode", pair.decode.receiver.port)),
                make_client(pair.prefill, None),
            )
            await eventually(lambda: len(retained) == 0, "all retained prompts to be released")
        finally:
            await pair.prefill.receiver.stop_listening()
