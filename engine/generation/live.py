"""All requests that are being answered: created for the instance's role, looked up to be aborted."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeAlias

from engine.core import EngineCore
from engine.disaggregation import BlockMemory, HandoverReceiver
from engine.generation.base import Generation, Piece, SharedParts
from engine.generation.choices import Choices, derive_choice
from engine.generation.decode import DecodeGeneration
from engine.generation.prefill import PrefillGeneration
from engine.protocol import ApiError, DisaggregateInfo
from engine.scheduling.request import Request
from engine.telemetry.tracing import Tracer

__all__ = ["BROKEN", "Generations", "MixedGeneration", "PairInfo", "list_unknown_ids"]

PairInfo: TypeAlias = DisaggregateInfo | Callable[[SharedParts, Request], Generation]
"""The instance's role for a request of a pair: FastDeploy's names decode's address; others begin the generation."""


class MixedGeneration(Generation):
    """A request that one instance answers alone, even if a router names a pair for it."""

    def __init__(self, parts: SharedParts, request: Request, _: DisaggregateInfo | None = None) -> None:
        super().__init__(parts, request)

    def _answer(self) -> AsyncIterator[Piece]:
        return self._run_sequence()


_FOR_PAIRS: dict[str, Callable[[SharedParts, Request, DisaggregateInfo], Generation]] = {
    "mixed": MixedGeneration,
    "prefill": PrefillGeneration,
    "decode": DecodeGeneration,
}
"""The generation class for each role, if the router names a pair for the request."""

PAUSED = "Request is aborted since LLM Engine is paused; POST /v1/resume to this instance lets it answer again"
"""FastDeploy's message; scripts of its users match the beginning."""

BROKEN = "an update of this instance's weights has failed halfway; POST /v1/wakeup to it loads them again"
"""The answer to every request while an instance is broken."""

_ID_PREFIXES = ("", "chatcmpl-", "cmpl-", "resp_", "msg_")
"""Prefixes of a request's id in the ids of its answers."""


class Generations:
    """All requests that are being answered.

    Args:
        core: runs them.
        tokenizer: a transformers tokenizer.
        role: ``mixed``, ``prefill`` or ``decode``.
        block_size: tokens in a block.
        receiver: receives prompts from prefill instances.
        memory: the blocks that direct hand-overs read and write; None: prompts go through the pool only.
        tracer: traces requests.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Any,
        role: str,
        block_size: int,
        receiver: HandoverReceiver,
        memory: BlockMemory | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._parts = SharedParts(core, tokenizer, role, block_size, receiver, memory, tracer)
        self._answer_for_pair = _FOR_PAIRS[role]
        self.is_paused = False
        """Whether new requests are refused."""
        self.is_broken = False
        """Whether new requests are refused because the weights are incomplete, or the KV is of other weights."""

    def begin(self, request: Request, info: PairInfo | None) -> Generation:
        """Create a generation; nothing runs until its ``pieces`` are iterated.

        Args:
            request: the request to answer.
            info: this instance's role in the pair that the router chose; None: there is no pair.
        """
        if info is None:
            return MixedGeneration(self._parts, request)
        if isinstance(info, DisaggregateInfo):
            return self._answer_for_pair(self._parts, request, info)
        return info(self._parts, request)

    def begin_choices(self, prompts: Sequence[tuple[Request, PairInfo | None]], count: int) -> Choices:
        """Create ``count`` generations for each of a request's prompts, which have its id and its seed.

        Raises:
            ApiError: 503, ``is_broken``; 500, ``is_paused``.
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
        """Number of requests that are being answered."""
        return len(self._parts.live)

    def abort_requests(self, req_ids: Iterable[str]) -> list[str]:
        """Abort all choices of requests by id, as clients and routers write it; return the ids of the running ones."""
        asked = set(req_ids)
        return _abort_each(
            [each for each in self._parts.live if not asked.isdisjoint(_names_of(_asked_id(each.request)))]
        )

    def abort_all(self) -> list[str]:
        """Abort everything that was not aborted before; return the request ids."""
        return _abort_each([each for each in self._parts.live if not each.is_aborted])


def list_unknown_ids(asked: Iterable[str], aborted: Iterable[str]) -> list[str]:
    """Return those of ``asked`` that name none of the requests that were ``aborted``."""
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
    """Return the id that the client used, also for a further choice."""
    return request.choice_of or request.request_id


def _names_of(request_id: str) -> set[str]:
    """Return the names of a request: its own id, the ids of its answers, and the id in FastDeploy's engine."""
    return {f"{prefix}{request_id}{suffix}" for prefix in _ID_PREFIXES for suffix in ("", "_0")}
