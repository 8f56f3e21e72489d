"""The ``n`` choices of one request: the prompt is computed once, the answers beside each other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeAlias

from engine.generation.base import Generation, Piece
from engine.request import Request

__all__ = ["Choices", "derive_choice"]

_Queue: TypeAlias = "asyncio.Queue[tuple[int, Piece | Exception | None]]"


def derive_choice(request: Request, index: int) -> Request:
    """The request of the ``index``-th choice: the first is the request itself, the others have seeds of their own."""
    if index == 0:
        return request
    params = request.params
    seed = None if params.seed is None else params.seed + index
    return dataclasses.replace(
        request,
        request_id=f"{request.request_id}_{index}",
        params=dataclasses.replace(params, seed=seed),
        choice_of=request.request_id,
    )


class Choices:
    """One request's generations, one for each choice; at least one."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations

    @property
    def request(self) -> Request:
        """The request as the client sent it."""
        return self._generations[0].request

    def __len__(self) -> int:
        return len(self._generations)

    def usage(self) -> dict[str, Any]:
        """Token counts of all choices, with the prompt once, and where the first choice had its KV from."""
        usage = self._generations[0].usage()
        further = sum(generation.num_output_tokens for generation in self._generations[1:])
        usage["completion_tokens"] += further
        usage["total_tokens"] += further
        return usage

    def describe_transfer(self) -> dict[str, Any]:
        """Members of the response that tell another instance of the prompt's KV."""
        return self._generations[0].describe_transfer()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces of all choices as they come, each with the index of its choice; closing it aborts all of them.

        The others begin when the first choice has its first token: the prompt's blocks are in the prefix cache then.
        """
        first, *others = self._generations
        if not others:
            async for only in first.pieces():
                yield 0, only
            return
        queue: _Queue = asyncio.Queue()
        tasks = [asyncio.create_task(_relay_pieces(0, first, queue))]
        has_begun_others, num_running = False, len(self._generations)
        try:
            while num_running:
                index, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                if not has_begun_others:
                    has_begun_others = True
                    tasks += _begin_others(others, queue, is_aborted=first.is_aborted)
                if piece is None:
                    num_running -= 1
                else:
                    yield index, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _begin_others(others: Sequence[Generation], queue: _Queue, *, is_aborted: bool) -> list[asyncio.Task[None]]:
    """Answer the choices after the first, which end at once where that was aborted before they could be."""
    if is_aborted:
        for generation in others:
            generation.abort()
    return [asyncio.create_task(_relay_pieces(i, generation, queue)) for i, generation in enumerate(others, 1)]


async def _relay_pieces(index: int, generation: Generation, queue: _Queue) -> None:
    """Queue a choice's pieces, and at its end None or the exception that ended it."""
    try:
        async with contextlib.aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))
        queue.put_nowait((index, None))
    except Exception as exc:
        queue.put_nowait((index, exc))
