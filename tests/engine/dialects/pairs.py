"""A prefill and a decode instance that understand another engine's dialect, in one process, without a router."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.apis.completions import Completions, PairDialect
from engine.protocol import ChatBody, CompletionBody, check_body
from simulation.actors.dialects import keep_prompts
from tests.engine.event_loop import eventually
from tests.engine.pair import HOST, PROMPT, Pair, Side, pair_of

__all__ = ["Asked", "DialectPair", "dialect_pair", "prompt_of"]


def prompt_of(length: int, first: int = 1) -> list[int]:
    """A prompt that has no block in common with one of another ``first``."""
    return [(first + i) % 250 for i in range(length)]


@dataclass(frozen=True)
class Asked:
    """An instance as clients ask it."""

    side: Side
    completions: Completions

    async def complete(self, **fields: Any) -> Any:
        """The whole answer to a completion."""
        body = {"prompt": list(PROMPT), "temperature": 0, "max_tokens": 8, "return_token_ids": True, **fields}
        return await (await self.completions.begin_completion(check_body(CompletionBody, body))).collect_whole()

    async def chat(self, **fields: Any) -> Any:
        """The whole answer to a chat whose prompt is given as tokens."""
        body = {"messages": [{"role": "user", "content": "x"}], "prompt_token_ids": list(PROMPT), **fields}
        return await (await self.completions.begin_chat(check_body(ChatBody, body))).collect_whole()


@dataclass(frozen=True)
class DialectPair:
    """Both, and one that answers by itself."""

    pair: Pair
    prefill: Asked
    decode: Asked
    alone: Asked


@contextlib.asynccontextmanager
async def dialect_pair(
    folder: Path, tokenizer: Any, make_dialect: Callable[[str, int], PairDialect], **options: Any
) -> AsyncIterator[DialectPair]:
    """A pair that answers; at the end all of its blocks must have come back, and nothing may be kept.

    Args:
        make_dialect: from a role and the instance's connector port.
        options: of ``pair_of``.
    """
    async with pair_of(folder, tokenizer, **options) as pair:
        kept = keep_prompts(pair.prefill.receiver, pair.prefill.memory)
        await pair.prefill.receiver.start_listening(socket.create_server((HOST, 0)))

        def ask(side: Side, dialect: PairDialect | None) -> Asked:
            vocab_size = side.engine.runner.vocab_size
            return Asked(side, Completions(side.generations, tokenizer, "tiny", 200, vocab_size, dialect=dialect))

        try:
            yield DialectPair(
                pair,
                ask(pair.prefill, make_dialect("prefill", pair.prefill.receiver.port)),
                ask(pair.decode, make_dialect("decode", pair.decode.receiver.port)),
                ask(pair.prefill, None),
            )
            await eventually(lambda: len(kept) == 0, "all kept prompts to be taken or dropped")
        finally:
            await pair.prefill.receiver.stop_listening()
