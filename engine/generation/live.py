"""Creates the generations of an instance for its role, and aborts running generations by the ids of their requests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeAlias

from engine.generation.base import Generation, Piece, SharedParts
from engine.generation.choices import Choices, derive_choice
from engine.generation.decode import DecodeGeneration
from engine.generation.prefill import PrefillGeneration
from engine.protocol import ApiError, DisaggregateInfo
from engine.scheduling.request import Request

__all__ = ["BROKEN", "Generations", "MixedGeneration", "PairInfo", "list_unknown_ids"]

PairInfo: TypeAlias = DisaggregateInfo | Callable[[SharedParts, Request], Generation]
"""A request's pair of instances: FastDeploy's field or, in other dialects, a function that creates the generation."""


class MixedGeneration(Generation):
    """The answer to a prompt that this instance computes itself."""

    def _answer(self) -> AsyncIterator[Piece]:
        return self._run_sequence()


PAUSED = "Request is aborted since LLM Engine is paused; resume this instance with POST /v1/resume"
"""Error message of a paused instance. The beginning is FastDeploy's, because scripts of its users look for it."""

BROKEN = "an update of this instance's weights failed before it was complete; load them again with POST /v1/wakeup"
"""Error message of an instance with incomplete weights."""

_ID_PREFIXES = ("", "chatcmpl-", "cmpl-", "resp_", "msg_")
"""Prefixes before the request's id in the ids of responses."""


class Generations:
    """Creates generations, and has a list of the running generations.

    Args:
        parts: what all generations of the instance share, such as the engine core and the tokenizer.
    """

    def __init__(self, parts: SharedParts) -> None:
        self._parts = parts
        self.is_paused = False
        """Whether new requests are refused, because the instance is paused."""
        self.is_broken = False
        """Whether new requests are refused, because an update of the weights has failed."""

    def begin(self, request: Request, info: PairInfo | None) -> Generation:
        """Create the generation that answers ``request``. It starts when its ``pieces`` are iterated.

        ``info`` is what the request says about its pair of prefill and decode instance, or None if this instance
        answers alone.
        """
        if isinstance(info, DisaggregateInfo):
            if self._parts.role == "prefill":
                return PrefillGeneration(self._parts, request, info)
            info = DecodeGeneration if self._parts.role == "decode" else None
        return (info or MixedGeneration)(self._parts, request)

    def begin_choices(self, prompts: Sequence[tuple[Request, PairInfo | None]], count: int) -> Choices:
        """Create ``count`` generations for each prompt of a client's request.

        Args:
            prompts: the engine's request and the pair for each prompt. All have the id and the seed of the client's
                request.
            count: number of answers to each prompt.

        Raises:
            ApiError: 503 if ``is_broken``; 500 if ``is_paused``.
        """
        if self.is_broken:
            raise ApiError(503, BROKEN)
        if self.is_paused:
            raise ApiError(500, PAUSED)
        generations = [
            self.begin(derive_choice(request, index, number), info)
            for first, (request, info) in zip(itertools.count(0, count), prompts)
            for number, index in enumerate(range(first, first + count))
        ]
        return Choices(generations, count)

    @property
    def num_live(self) -> int:
        """Number of generations that are running."""
        return len(self._parts.live)

    def abort_requests(self, req_ids: Iterable[str]) -> list[str]:
        """Abort all answers to the requests with these ids.

        Args:
            req_ids: ids of requests or of their responses.

        Returns:
            The ids of the requests that were running.
        """
        asked = set(req_ids)
        return _abort_each(
            [each for each in self._parts.live if not asked.isdisjoint(_names_of(_asked_id(each.request)))]
        )

    def abort_all(self) -> list[str]:
        """Abort all running generations that were not aborted before, and return the ids of their requests."""
        return _abort_each([each for each in self._parts.live if not each.is_aborted])


def list_unknown_ids(asked: Iterable[str], aborted: Iterable[str]) -> list[str]:
    """Return the ids in ``asked`` that belong to none of the requests in ``aborted``."""
    known = {name for request_id in aborted for name in _names_of(request_id)}
    return [each for each in asked if each not in known]


def _abort_each(generations: list[Generation]) -> list[str]:
    for generation in generations:
        generation.abort()
    requests = [generation.request for generation in generations]
    ids = [request.request_id for request in requests if not request.choice_of]
    further = {request.choice_of for request in requests if request.choice_of}
    return ids + sorted(further.difference(ids))


def _asked_id(request: Request) -> str:
    """Return the id of the client's request to which ``request`` belongs."""
    return request.choice_of or request.request_id


def _names_of(request_id: str) -> set[str]:
    """Return all ids of a request: ``request_id``, the ids of its responses, and the ids in FastDeploy's engine."""
    return {f"{prefix}{request_id}{suffix}" for prefix in _ID_PREFIXES for suffix in ("", "_0")}
