"""The base of pairs, and the changes of the client's request for each leg."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple

from router.fleet import Instance
from router.http import ConnectionPool, Usage, encode_request_id
from router.serving.reading.api import EngineIds
from router.serving.reading.parsed_request import ParsedRequest

__all__ = [
    *("MIN_HANDED_OVER_TOKENS", "NO_MEMBERS", "OF_PAIRS", "LegPlan", "NotAsPair", "NotReady", "Pair"),
    *("members_to_strip", "request_id_header"),
]

# Maximum number of tokens that a prefill instance generates, even with speculative decoding.
MAX_PREFILL_TOKENS = 8
MIN_HANDED_OVER_TOKENS = 2048
"""A prompt with this number of tokens has at least one whole block.

Blocks of most models have 16 to 256 tokens. In vLLM, models with recurrent layers have blocks of about 1,000 tokens.
"""

NO_MEMBERS: Mapping[str, bytes] = {}
# Members that only the router may set. With its own values, a client could make an instance exchange KV with any host.
OF_PAIRS = (
    *("disaggregate_info", "kv_transfer_params", "ec_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)


class LegPlan(NamedTuple):
    """The changes of the client's request for one leg."""

    members: Mapping[str, bytes]
    """Members to set, each encoded by ``encode_member``."""
    dropped: Collection[str] = ()
    """Members of the client's request that are removed for this leg."""
    head: bytes = b""
    """Header lines that are added to the request of this leg."""


class NotAsPair(Exception):
    """A pair cannot serve the request, but perhaps decode alone can. The message is the reason."""

    def __init__(self, message: str, *, decode_serves_alone: bool) -> None:
        super().__init__(message)
        self.decode_serves_alone = decode_serves_alone


class NotReady(Exception):
    """A pair cannot be used before the router knows the id of prefill's engine (only with vLLM's MooncakeConnector).

    ``learn`` queries the id at prefill's bootstrap server, or raises ``UpstreamError``.
    """

    def __init__(self, learn: Callable[[ConnectionPool], Awaitable[None]]) -> None:
        super().__init__("a pair is not ready")
        self.learn = learn


class Pair(ABC):
    """A prefill and a decode instance, and how both are used for one response."""

    is_prefill_first = False
    """Whether decode's request is sent after prefill has responded. If false, both are sent together."""
    merges_segments = False
    """Whether decode may preempt a request in the middle of the response, so that another instance continues it."""
    may_err_late = False
    """Whether decode reports missing KV of prefill in an event of a stream that has already begun."""

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        self.registrations = prefill.registration, decode.registration
        """The registrations of the prefill and the decode instance."""

    @abstractmethod
    def plan(self, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, LegPlan, EngineIds | None]:
        """Return the changes for prefill, the changes for decode, and the ids for an abort.

        If the changes are equal, both are the same object. The ids are those with which the request is aborted at the
        engines; None if closing the connections is enough.

        Raises:
            NotAsPair: this pair cannot serve the request.
            NotReady: the router must first query the id of prefill's engine.
        """

    def plan_decode(self, answer: bytes) -> Mapping[str, bytes]:
        """Return the members of decode's request that depend on prefill's response, if prefill is sent first."""
        return NO_MEMBERS

    def find_lost_hand_over(self, answer: bytes, prefill: Usage, decode: Usage) -> str:
        """Return why decode seems to have computed the prompt again; ``""`` if nothing indicates that.

        Args:
            answer: prefill's response.
            prefill: usage in prefill's response.
            decode: usage in decode's response.
        """
        if (prefill.completion_tokens or 0) > MAX_PREFILL_TOKENS and prefill is not decode:
            return f"prefill generated {prefill.completion_tokens} tokens, as if it served the request alone"
        return ""


def members_to_strip(parsed: ParsedRequest, *more: str) -> list[str]:
    """Return the members to remove from the request: ``OF_PAIRS``, which only the router sets, and ``more``."""
    assert parsed.body is not None
    given = parsed.body.members
    return [name for name in (*OF_PAIRS, *more) if name in given]


def request_id_header(parsed: ParsedRequest, request_id: str) -> bytes:
    """Return the header line with a request's id, for engines with OpenAI's API.

    Return ``b""`` if the id is not ASCII and the body has it, too. These engines prefer the header's id, but read
    headers as Latin-1, which would damage this id.
    """
    if not request_id.isascii() and parsed.body is not None and parsed.body.request_id:
        return b""
    return b"%s: %s\r\n" % encode_request_id(request_id)
