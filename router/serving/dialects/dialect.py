"""Dialects of pairs: the members and headers that give each leg of a request its part."""

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

# More than a prefill instance generates, even if it speculates several tokens ahead.
MAX_PREFILL_TOKENS = 8
MIN_HANDED_OVER_TOKENS = 256
"""A prompt of this many tokens has blocks to transfer, for any block size."""

NO_MEMBERS: Mapping[str, bytes] = {}
# With its own values of these members, a client could make an instance transfer KV with any other.
OF_PAIRS = (
    *("disaggregate_info", "kv_transfer_params", "ec_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)


class LegPlan(NamedTuple):
    """Changes to the client's request for one leg."""

    members: Mapping[str, bytes]
    """Members to set, each encoded by ``encode_member``."""
    dropped: Collection[str] = ()
    """Members of the client that are removed for this leg."""
    head: bytes = b""
    """Additional header lines."""


class NotAsPair(Exception):
    """This pair cannot serve the request together. The message has the reason."""

    def __init__(self, message: str, *, decode_serves_alone: bool) -> None:
        super().__init__(message)
        self.decode_serves_alone = decode_serves_alone


class NotReady(Exception):
    """A fact about a pair must be learned before it can be used. ``learn`` raises ``UpstreamError`` if it cannot."""

    def __init__(self, learn: Callable[[ConnectionPool], Awaitable[None]]) -> None:
        super().__init__("a pair is not ready")
        self.learn = learn


class Pair(ABC):
    """A prefill and a decode instance, and how the two are used for one answer."""

    is_prefill_first = False
    """Whether decode's request is sent after prefill has answered; otherwise both are sent together."""
    merges_segments = False
    """Whether decode may preempt a request in the middle of the answer, which another instance then continues."""
    may_err_late = False
    """Whether decode reports missing prefill KV in an event of a stream that has already begun."""

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        self.registrations = prefill.registration, decode.registration
        """Registrations of the two at the creation of the pair."""

    @abstractmethod
    def plan(self, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, LegPlan, EngineIds | None]:
        """Return the changes for prefill and for decode (one object twice if they are equal), and the ids for an abort.

        The ids are those by which the request is aborted at the engines; None if closing the connections is sufficient.

        Raises:
            NotAsPair: these instances cannot serve the request together.
            NotReady: a fact about them has to be learned first.
        """

    def plan_decode(self, answer: bytes) -> Mapping[str, bytes]:
        """Return the members of decode's request that depend on prefill's answer, if prefill comes first."""
        return NO_MEMBERS

    def find_lost_hand_over(self, answer: bytes, prefill: Usage, decode: Usage) -> str:
        """Return why decode seems to have computed the prompt itself; "" if there is no sign of it.

        Args:
            answer: prefill's answer.
            prefill: usage of prefill's answer.
            decode: usage of decode's answer.
        """
        if (prefill.completion_tokens or 0) > MAX_PREFILL_TOKENS and prefill is not decode:
            return f"prefill generated {prefill.completion_tokens} tokens, as if it were alone"
        return ""


def members_to_strip(parsed: ParsedRequest, *more: str) -> list[str]:
    """Return the members sent by the client that no instance gets: those that connect the two legs of a pair."""
    assert parsed.body is not None
    given = parsed.body.members
    return [name for name in (*OF_PAIRS, *more) if name in given]


def request_id_header(request_id: str) -> bytes:
    """Return the header line with a request's id for engines with OpenAI's API."""
    return b"%s: %s\r\n" % encode_request_id(request_id)
