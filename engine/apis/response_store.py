"""Stored responses, which clients continue by ``previous_response_id`` and read again: in memory and bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["KeptResponse", "ResponseStore"]

MAX_RESPONSES = 1024
MAX_CHARACTERS = 64 << 20


@dataclass(frozen=True)
class KeptResponse:
    """A response and the conversation that ends with its answer. Instructions are not part of the conversation."""

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]

    @property
    def num_characters(self) -> int:
        """The length of the conversation's texts."""
        return sum(len(message["content"]) for message in self.messages)


class ResponseStore:
    """Stores responses by id and evicts the least recently used ones.

    Args:
        max_responses: the maximum number of responses stored.
        max_characters: the maximum total length of their conversations; each response counts its whole conversation.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._num_characters = 0

    def keep_response(self, response_id: str, kept: KeptResponse) -> None:
        """Store a response, unless it alone exceeds the limits."""
        self.remove_response(response_id)
        self._kept[response_id] = kept
        self._num_characters += kept.num_characters
        while len(self._kept) > self._max_responses or self._num_characters > self._max_characters:
            self.remove_response(next(iter(self._kept)))

    def find_response(self, response_id: str) -> KeptResponse | None:
        """Return the response with this id, if it is stored."""
        kept = self._kept.get(response_id)
        if kept is not None:
            self._kept.move_to_end(response_id)
        return kept

    def remove_response(self, response_id: str) -> bool:
        """Remove a response; return whether it was stored."""
        kept = self._kept.pop(response_id, None)
        if kept is not None:
            self._num_characters -= kept.num_characters
        return kept is not None
