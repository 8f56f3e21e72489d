"""The answers of one request, ``n`` to each of its prompts: each prompt is computed once, the answers side by side."""

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
    """The request of the ``index``-th answer: the first is the request itself, the others have ids of their own.

    Args:
        number: which answer to its prompt it is; the first has the request's seed, the others have seeds of their own.
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
    """One request's generations, one for each answer; at least one.

    Args:
        generations: in the order of their prompts.
        per_prompt: how many answer each prompt; None: all of them, the only one.
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
        """The token ids of the prompt that the ``index``-th generation answers."""
        return self._generations[index].request.prompt_token_ids

    def usage(self) -> dict[str, Any]:
        """Token counts of all answers, with each prompt once, and where its first answer had its KV from."""
        usage = self._firsts[0].usage()
        for first in self._firsts[1:]:
            _add_figures(usage, first.usage())
        further = sum(each.num_output_tokens for each in self._generations)
        further -= sum(first.num_output_tokens for first in self._firsts)
        usage["completion_tokens"] += further
        usage["total_tokens"] += further
        return usage

    def describe_transfer(self) -> dict[str, Any]:
        """Members of the response that tell another instance of the prompt's KV."""
        return self._generations[0].describe_transfer()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces of all choices as they come, each with the index of its choice; closing it aborts all of them.

        The others of a prompt begin when its first has its first token: then the prompt's blocks are in the prefix
        cache.
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
        """Answer a prompt again, as its first answer has begun; at once at an end where that was aborted before."""
        others = range(first + 1, first + self._per_prompt)
        if self._generations[first].is_aborted:
            for index in others:
                self._generations[index].abort()
        return [asyncio.create_task(_relay_pieces(index, self._generations[index], queue)) for index in others]


def _add_figures(usage: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the figures of another usage, which may have some that this one lacks."""
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
