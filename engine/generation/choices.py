"""All answers to one request, ``n`` for each prompt. Each prompt is computed once, and then its answers together."""

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
    """Return the engine's request for one of the answers to a client's request.

    The first answer uses the request itself. The others get their own ids.

    Args:
        request: the client's request.
        index: the index of the answer among all answers to the request.
        number: the index of the answer among the answers to the same prompt. It is added to the seed.
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
    """All answers to one request; each is a generation.

    Args:
        generations: the generations, at least one, in the order of their prompts.
        per_prompt: number of answers to each prompt, or None if all answers are to one prompt.
    """

    def __init__(self, generations: Sequence[Generation], per_prompt: int | None = None) -> None:
        self._generations = generations
        self._per_prompt = per_prompt or len(generations)
        self._firsts = generations[:: self._per_prompt]

    @property
    def request(self) -> Request:
        """The client's request. If it has several prompts, this has the first prompt."""
        return self._generations[0].request

    def __len__(self) -> int:
        return len(self._generations)

    def prompt_of(self, index: int) -> Sequence[int]:
        """Return the token ids of the prompt of answer ``index``."""
        return self._generations[index].request.prompt_token_ids

    def usage(self) -> dict[str, Any]:
        """Return the ``usage`` object for all answers together.

        Each prompt counts once, with the cached tokens of its first answer.
        """
        usage: dict[str, Any] = {}
        for number, each in enumerate(self._generations):
            own = each.usage()
            if number % self._per_prompt:
                own = {name: own[name] for name in ("completion_tokens", "retrieval_details") if name in own}
                own["total_tokens"] = own["completion_tokens"]
            _add_figures(usage, own)
        return usage

    def describe_transfer(self) -> dict[str, Any]:
        """Return members to add to the response, by which another instance finds the first prompt's KV."""
        return self._generations[0].describe_transfer()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the pieces of all answers as they arrive, each with the index of its answer.

        The other answers to a prompt start when the first answer has a token, because then they find the prompt's
        blocks in the prefix cache. If the iterator is closed, all answers are aborted.
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
        """Start the other answers to a prompt, whose first answer has the index ``first``.

        If the first answer was aborted, the other answers end immediately.
        """
        others = range(first + 1, first + self._per_prompt)
        if self._generations[first].is_aborted:
            for index in others:
                self._generations[index].abort()
        return [asyncio.create_task(_relay_pieces(index, self._generations[index], queue)) for index in others]


def _add_figures(usage: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the numbers of the usage object ``more`` to ``usage``, which may lack members of ``more``."""
    for name, value in more.items():
        if isinstance(value, dict):
            _add_figures(usage.setdefault(name, {}), value)
        else:
            usage[name] = usage.get(name, 0) + value


async def _relay_pieces(index: int, generation: Generation, queue: _Queue) -> None:
    """Put each piece of the answer ``index`` into the queue; then None, or the exception that ended the answer."""
    try:
        async with contextlib.aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))
        queue.put_nowait((index, None))
    except Exception as exc:
        queue.put_nowait((index, exc))
