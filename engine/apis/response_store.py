"""Stores responses in memory, up to a limit, so that clients can continue or read them by their ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ResponseStore", "StoredResponse"]

MAX_RESPONSES = 1024
MAX_CHARACTERS = 64 << 20
MESSAGE_CHARACTERS = 512
"""Number of characters that take as much memory as a message without text."""


@dataclass(frozen=True)
class StoredResponse:
    """A response object, and the conversation up to and including its answer, without ``instructions``."""

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]

    @property
    def num_characters(self) -> int:
        """Number of characters of the conversation and of the instructions in the response object, for the limit."""
        instructions = self.response.get("instructions") or ""
        return len(instructions) + sum(MESSAGE_CHARACTERS + len(message["content"]) for message in self.messages)


class ResponseStore:
    """Stores responses by id, and removes the least recently used responses if there are too many.

    The limits are the number of responses, and the number of characters of all their conversations together.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_characters = 0

    def store_response(self, response_id: str, response: StoredResponse) -> None:
        """Store a response, unless it alone exceeds a limit."""
        self.remove_response(response_id)
        self._responses[response_id] = response
        self._num_characters += response.num_characters
        while len(self._responses) > self._max_responses or self._num_characters > self._max_characters:
            self.remove_response(next(iter(self._responses)))

    def find_response(self, response_id: str) -> StoredResponse | None:
        """Return the response with this id, or None if it is not stored."""
        response = self._responses.get(response_id)
        if response is not None:
            self._responses.move_to_end(response_id)
        return response

    def remove_response(self, response_id: str) -> bool:
        """Remove a response; return whether it was stored."""
        response = self._responses.pop(response_id, None)
        if response is not None:
            self._num_characters -= response.num_characters
        return response is not None
