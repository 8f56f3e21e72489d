"""Responses of the control plane: JSON, and errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response

from router.http.api_error import ApiError, Refused
from router.http.message import Headers

__all__ = ["error_reply", "json_reply", "raw_reply", "refusal_reply"]


def json_reply(status: int, value: Any) -> Response:
    """A response with ``value`` as JSON."""
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def error_reply(error: ApiError, path: str = "") -> Response:
    """A response to a request for ``path`` that is an error."""
    return Response(error.body(path), status_code=error.status, media_type="application/json")


def raw_reply(status: int, headers: Headers, body: bytes) -> Response:
    """A response with these headers and this body."""
    answer = Response(body, status_code=status)
    answer.raw_headers += headers
    return answer


def refusal_reply(refused: Refused, path: str = "") -> Response:
    """A response to a request for ``path`` that is not served, with the headers that say how it would be."""
    answer = error_reply(refused.error, path)
    answer.raw_headers += refused.headers
    return answer
