"""The answers of one request, ``n`` for each prompt: each prompt is computed once, the answers concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeAlias

from engine.generation.base import Generation, Piece
from engine.scheduling.request import Request

__all__ = ["Choices", "derive_choice"]

_Queue: TypeAlias = "asyncio.Queue[tuple[int, Piece | Exception | None]]"


def derive_choice(request: Request, index: int, number: int) -> Request:
    """Return the request of the ``index``-th answer: the first is the request itself, the others get their own ids.

    Args:
        request: the client's request.
        index: the answer's number in the request.
        number: its number among the answers to its prompt; the first has the request's seed, the others get their own.
    """
    if index == 0:
        return request
    params = request.params
    seed = None if params.seed is None else params.seed + number
    return dataclasses.replace(
        request,
        request_id=f"{request.request_id}_{index}",
        params=dataclasses.replace(params, seed=seed),
        choice_of=request.request_id,
    )


class Choices:
    """The generations of one request, one for each answer; at least one.

    Args:
        generations: in the order of their prompts.
        per_prompt: the number of answers for each prompt; None: there is one prompt, and all answers are for it.
    """

    def __init__(self, generations: Sequence[Generation], per_prompt: int | None = None) -> None:
        self._generations = generations
        self._per_prompt = per_prompt or len(generations)
        self._firsts = generations[:: self._per_prompt]

    @property
    def request(self) -> Request:
        """The request as the client sent it, with its first prompt."""
        return self._generations[0].request

    def __len__(self) -> int:
        return len(self._generations)

    def prompt_of(self, index: int) -> Sequence[int]:
        """Return the token ids of the prompt that the ``index``-th generation answers."""
        return self._generations[index].request.prompt_token_ids

    def usage(self) -> dict[str, Any]:
        """Return token counts of all answers, with each prompt once, and where its first answer had its KV from."""
        usage = self._firsts[0].usage()
        for first in self._firsts[1:]:
            _add_figures(usage, first.usage())
        further = sum(each.num_output_tokens for each in self._generations)
        further -= sum(first.num_output_tokens for first in self._firsts)
        usage["completion_tokens"] += further
        usage["total_tokens"] += further
        return usage

    def describe_transfer(self) -> dict[str, Any]:
        """Return the members of the response by which another instance finds the prompt's KV."""
        return self._generations[0].describe_transfer()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the pieces of all choices as they arrive, each with its choice's index; closing it aborts all choices.

        The other choices of a prompt begin when its first has its first token: then the prefix cache has the prompt's
        blocks.
        """
        if len(self._generations) == 1:
            async for only in self._generations[0].pieces():
                yield 0, only
            return
        queue: _Queue = asyncio.Queue()
        tasks = [
            asyncio.create_task(_relay_pieces(number * self._per_prompt, first, queue))
            for number, first in enumerate(self._firsts)
        ]
        waiting = set(range(0, len(self), self._per_prompt)) if self._per_prompt > 1 else set()
        num_running = len(self)
        try:
            while num_running:
                index, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                if index in waiting:
                    waiting.remove(index)
                    tasks += self._begin_others(index, queue)
                if piece is None:
                    num_running -= 1
                else:
                    yield index, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin_others(self, first: int, queue: _Queue) -> list[asyncio.Task[None]]:
        """Start a prompt's other answers when its first has begun; they end immediately if they were aborted before."""
        others = range(first + 1, first + self._per_prompt)
        if self._generations[first].is_aborted:
            for index in others:
                self._generations[index].abort()
        return [asyncio.create_task(_relay_pieces(index, self._generations[index], queue)) for index in others]


def _add_figures(usage: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the counts of another usage, which may have some that this one lacks."""
    for name, value in more.items():
        if isinstance(value, dict):
            _add_figures(usage.setdefault(name, {}), value)
        else:
            usage[name] = usage.get(name, 0) + value


async def _relay_pieces(index: int, generation: Generation, queue: _Queue) -> None:
    """Queue a choice's pieces, and at its end None or the exception that ended it."""
    try:
        async with contextlib.aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))
        queue.put_nowait((index, None))
    except Exception as exc:
        queue.put_nowait((index, exc))
