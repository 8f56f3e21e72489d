"""The header ``X-Request-Id``, with which clients name their requests."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MAX_ID_CHARACTERS", "REQUEST_ID", "encode_request_id", "find_request_id"]

REQUEST_ID = b"x-request-id"
# Longer ids are refused: they are stored in records, and sent back in a header.
MAX_ID_CHARACTERS = 256


def find_request_id(headers: Iterable[tuple[bytes, bytes]], server: str) -> str:
    """Return the id in the header; "" if there is none.

    Args:
        headers: headers with lower-case names.
        server: ``this router`` or ``this instance``, for the message.

    Raises:
        ValueError: the header is not a valid id; the message is one sentence.
    """
    for name, value in headers:
        if name == REQUEST_ID:
            try:
                text = value.decode()
            except UnicodeDecodeError:
                text = "\0"
            if not text.isprintable():
                raise ValueError(f"X-Request-Id is {value!r}; it must be a text of printable characters")
            if len(text) > MAX_ID_CHARACTERS:
                raise ValueError(f"X-Request-Id is longer than the {MAX_ID_CHARACTERS} characters {server} takes")
            return text
    return ""


def encode_request_id(request_id: str) -> tuple[bytes, bytes]:
    """Encode the header of a response."""
    return REQUEST_ID, request_id.encode()
