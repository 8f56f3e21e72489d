"""Builds responses of the control plane: JSON values, and errors in the format of the client's API."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from router.http.api_error import ApiError, Refused

__all__ = ["error_reply", "json_reply", "refusal_reply"]


def json_reply(status: int, value: Any) -> Response:
    """Return a response with ``value`` as JSON."""
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def error_reply(error: ApiError, path: str = "") -> Response:
    """Return the error response to a request for ``path``."""
    return Response(error.body(path), status_code=error.status, media_type="application/json")


def refusal_reply(refused: Refused, path: str = "") -> Response:
    """Return the response to a refused request for ``path``; its headers say when to retry or how to authenticate."""
    answer = error_reply(refused.error, path)
    answer.raw_headers += refused.headers
    return answer
