"""Reads the id of a request, which a client may send in the header ``X-Request-Id``, and sends it back."""

from __future__ import annotations

from kvcommon import request_ids
from kvcommon.request_ids import MAX_ID_CHARACTERS, encode_request_id
from router.http.large_body import BadBody
from router.http.message import Headers

__all__ = ["MAX_ID_CHARACTERS", "echo_request_id", "encode_request_id", "find_request_id"]


def find_request_id(headers: Headers) -> str:
    """Return the id in the header ``X-Request-Id``; ``""`` if there is no such header.

    Raises:
        BadBody: the value is not a valid id.
    """
    try:
        return request_ids.find_request_id(headers, "this router")
    except ValueError as exc:
        raise BadBody(str(exc), "X-Request-Id") from None


def echo_request_id(headers: Headers) -> Headers:
    """Return the header that sends the client's own id back to it; an empty list if the client sent no valid id."""
    try:
        sent = find_request_id(headers)
    except BadBody:
        return []
    return [encode_request_id(sent)] if sent else []
