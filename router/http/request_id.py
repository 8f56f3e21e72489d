"""The id that a client gives its request in the header ``X-Request-Id``."""

from __future__ import annotations

from router.http.large_body import BadBody
from router.http.message import Headers

__all__ = ["MAX_ID_CHARACTERS", "echo_request_id", "encode_request_id", "find_request_id"]

# Longer ids are not taken: they are kept in memory, and sent back in a header.
MAX_ID_CHARACTERS = 256


def find_request_id(headers: Headers) -> str:
    """The id that ``X-Request-Id`` gives; "" where it gives none.

    Raises:
        BadBody: it cannot be an id.
    """
    for name, value in headers:
        if name == b"x-request-id":
            try:
                text = value.decode()
            except UnicodeDecodeError:
                text = "\0"
            if not text.isprintable():
                raise BadBody(f"X-Request-Id is {value!r}; it must be a text of printable characters", "X-Request-Id")
            if len(text) > MAX_ID_CHARACTERS:
                message = f"X-Request-Id is longer than the {MAX_ID_CHARACTERS} characters this router takes"
                raise BadBody(message, "X-Request-Id")
            return text
    return ""


def echo_request_id(headers: Headers) -> Headers:
    """The header by which a client gets back the id it sent; none where it sent none that can be one."""
    try:
        sent = find_request_id(headers)
    except BadBody:
        return []
    return [encode_request_id(sent)] if sent else []


def encode_request_id(request_id: str) -> tuple[bytes, bytes]:
    """The header ``X-Request-Id`` of a response."""
    return b"x-request-id", request_id.encode()
