"""Reads and writes the header ``X-Request-Id``, in which a client gives its request an id."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MAX_ID_CHARACTERS", "REQUEST_ID", "encode_request_id", "find_request_id"]

REQUEST_ID = b"x-request-id"
# Longer ids are refused, because an id is stored in records and sent back in a header.
MAX_ID_CHARACTERS = 256


def find_request_id(headers: Iterable[tuple[bytes, bytes]], server: str) -> str:
    """Return the request's id from the header ``X-Request-Id``; "" if the header is missing.

    Args:
        headers: headers of the request, with lower-case names.
        server: ``this router`` or ``this instance``, for the message.

    Raises:
        ValueError: the header's value is not a valid id; the message is one sentence.
    """
    for name, value in headers:
        if name == REQUEST_ID:
            try:
                text = value.decode()
            except UnicodeDecodeError:
                text = "\0"
            if not text.isprintable():
                raise ValueError(f"X-Request-Id is {value!r}; it must consist of printable characters in UTF-8")
            if len(text) > MAX_ID_CHARACTERS:
                raise ValueError(
                    f"X-Request-Id is longer than the {MAX_ID_CHARACTERS} characters that {server} accepts"
                )
            return text
    return ""


def encode_request_id(request_id: str) -> tuple[bytes, bytes]:
    """Return name and value of the header ``X-Request-Id`` for a response."""
    return REQUEST_ID, request_id.encode()
