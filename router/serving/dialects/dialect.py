"""Dialects of pairs: the members and headers by which each leg of a request gets its part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple

from router.fleet import Instance
from router.http import ConnectionPool, Usage, encode_request_id
from router.serving.reading.api import EngineIds
from router.serving.reading.parsed_request import ParsedRequest

__all__ = [
    *("MIN_HANDED_OVER_TOKENS", "NO_MEMBERS", "OF_PAIRS", "LegAsk", "NotAsPair", "NotReady", "Pair"),
    *("list_dropped", "name_in_header"),
]

# More than a prefill instance generates, even where it guesses several tokens at once.
MAX_PREFILL_TOKENS = 8
MIN_HANDED_OVER_TOKENS = 256
"""A prompt of so many tokens has blocks to hand over, whatever their size."""

NO_MEMBERS: Mapping[str, bytes] = {}
# By these members of their own, a client could have an instance hand KV over with any other.
OF_PAIRS = (
    *("disaggregate_info", "kv_transfer_params", "ec_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)


class LegAsk(NamedTuple):
    """Changes to the client's request for one leg."""

    members: Mapping[str, bytes]
    """Members to set, each as ``encode_member`` made it."""
    dropped: Collection[str] = ()
    """Members of the client's that this leg does not get."""
    head: bytes = b""
    """Header lines of its own."""


class NotAsPair(Exception):
    """This pair cannot work on the request together; the message says why."""

    def __init__(self, message: str, *, decode_serves_alone: bool) -> None:
        super().__init__(message)
        self.decode_serves_alone = decode_serves_alone


class NotReady(Exception):
    """Something has to be learnt of a pair before it can be asked; ``learn`` raises ``UpstreamError`` if it cannot."""

    def __init__(self, learn: Callable[[ConnectionPool], Awaitable[None]]) -> None:
        super().__init__("a pair is not ready")
        self.learn = learn


class Pair(ABC):
    """A prefill and a decode instance, and the way in which the two are asked for one answer."""

    is_prefill_first = False
    """Whether decode is asked once prefill has answered; otherwise both are asked at once."""
    merges_segments = False
    """Whether decode may preempt a request half-way, which is then continued by another."""
    may_err_late = False
    """Whether decode says that it could not have prefill's KV in an event of a stream that has begun."""

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        self.registrations = prefill.registration, decode.registration
        """Of the two, as they were when it was made."""

    @abstractmethod
    def ask(self, parsed: ParsedRequest, request_id: str) -> tuple[LegAsk, LegAsk, EngineIds | None]:
        """The changes for prefill and for decode: the same object twice where they are the same.

        And the ids by which the request is aborted at the engines; None where closing the connections does it.

        Raises:
            NotAsPair: these instances cannot serve the request together.
            NotReady: something has to be learnt of them first.
        """

    def ask_after(self, answer: bytes) -> Mapping[str, bytes]:
        """Members that decode is asked because of prefill's answer, where prefill is first."""
        return NO_MEMBERS

    def find_lost_hand_over(self, answer: bytes, prefill: Usage, decode: Usage) -> str:
        """Why it seems that decode computed the prompt itself; "" where nothing tells so.

        Args:
            answer: prefill's.
            prefill: its figures.
            decode: the figures of decode's answer.
        """
        if (prefill.completion_tokens or 0) > MAX_PREFILL_TOKENS and prefill is not decode:
            return f"prefill generated {prefill.completion_tokens} tokens, as if it were alone"
        return ""


def list_dropped(parsed: ParsedRequest, *more: str) -> list[str]:
    """Members that a client sent, and that no instance gets: those by which pairs know each other."""
    assert parsed.body is not None
    given = parsed.body.members
    return [name for name in (*OF_PAIRS, *more) if name in given]


def name_in_header(request_id: str) -> bytes:
    """The header line by which engines of OpenAI's form take a request's id."""
    return b"%s: %s\r\n" % encode_request_id(request_id)
