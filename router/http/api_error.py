"""Encodes errors for clients of the router as JSON, in the format of the API that the client uses.

OpenAI's format is ``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``. Anthropic's, under
``/v1/messages``, is ``{"type": "error", "error": {"type": ..., "message": ...}}``; the router adds ``code``.

FastDeploy's routers send some of these errors in other formats. ``to_dialect`` converts an error to such a format, for
scripts that were written for those routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

__all__ = ["ApiError", "Refused", "RequestEnded", "encode_error_event", "to_dialect"]

# OpenAI's error types by status. Other statuses: "invalid_request_error" below 500, else "internal_error".
_TYPES = {
    403: "permission_error",
    408: "timeout",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable",
    504: "timeout",
}
# Error codes for an instance that could not be reached, one for each role.
_UNREACHABLE = ("mixed_failed", "prefill_failed", "decode_failed")
# Anthropic's error types by status. Other statuses: "invalid_request_error" below 500, else "api_error".
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_ANTHROPIC_PATH = "/v1/messages"


def _is_anthropic(path: str) -> bool:
    return path.startswith(_ANTHROPIC_PATH) and path[len(_ANTHROPIC_PATH) :][:1] in ("", "/")


class ApiError(NamedTuple):
    """An error response: HTTP ``status``, one sentence, a machine-readable ``code``, and the body's wrong member."""

    status: int
    message: str
    code: str
    param: str | None = None
    members: Mapping[str, Any] | None = None
    """The whole response body, if ``to_dialect`` has chosen the format of a FastDeploy router; else None."""

    def body(self, path: str = "") -> bytes:
        """Return the JSON body of the error response to a request for ``path``."""
        if _is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "api_error")
            return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message, "code": self.code}})
        return orjson.dumps({"error": self.describe()} if self.members is None else self.members)

    def describe(self) -> dict[str, Any]:
        """Return OpenAI's error object as a dictionary."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "internal_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def error_event(self, path: str = "") -> bytes:
        """Return the error as the only event of a stream. After other events, use ``sse``, which adds ``[DONE]``."""
        return encode_error_event(self.body(path), path)

    def sse(self, path: str = "") -> bytes:
        """Return the last events of an event stream that has already begun: the error, then OpenAI's ``[DONE]``."""
        return self.error_event(path) + (b"" if _is_anthropic(path) else b"data: [DONE]\n\n")


def encode_error_event(body: bytes, path: str) -> bytes:
    """Return an error's body as an event of a stream. Anthropic's events begin with a name."""
    return (b"event: error\ndata: " if _is_anthropic(path) else b"data: ") + body + b"\n\n"


class Refused(Exception):
    """The router refuses the request: because of its client, its size, or the current load."""

    def __init__(self, error: ApiError, retry_after: int = 0) -> None:
        """
        Args:
            error: the response to the client.
            retry_after: seconds until the client may retry; 0 if a retry does not help.
        """
        super().__init__(error.message)
        self.error = error
        self.retry_after = retry_after

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response: ``Retry-After``, or ``WWW-Authenticate`` for status 401 (RFC 9110)."""
        if self.retry_after:
            return [(b"retry-after", b"%d" % self.retry_after)]
        return [(b"www-authenticate", b"Bearer")] if self.error.status == 401 else []


class RequestEnded(Exception):
    """The request ends early. ``error`` is the response to the client; None if the client has disconnected."""

    def __init__(self, error: ApiError | None) -> None:
        super().__init__(error.message if error else "the client left")
        self.error = error


def to_dialect(dialect: str, error: ApiError, request_id: str, *, splitwise: bool) -> ApiError:
    """Return the error in the format of one of FastDeploy's routers; ``error`` itself if that router has no such error.

    In the Go router's format, ``error`` is a text. This router adds ``message`` and ``code`` with more details.

    Args:
        dialect: the FastDeploy router to imitate: ``python`` or ``go``.
        request_id: id of the request. The Go router reports it if ``splitwise`` is true.
        splitwise: whether requests are served by pairs of a prefill and a decode instance.
    """
    if dialect == "python":
        if error.code != "tp_size_mismatch":
            return error
        return error._replace(members={"detail": error.message, "error": error.describe()})
    status = error.status
    if error.code == "no_instance" and splitwise:
        text = "No available prefill/decode workers"
    elif error.code == "no_instance":
        status, text = 502, "Failed to select worker: no healthy workers available"
    elif error.code in _UNREACHABLE and status == 502:
        text = f"Failed to connect to backend service: {error.message}"
    elif error.code == "invalid_body" and error.param is None:
        text = f"Invalid JSON format: {error.message}"
    else:
        return error
    members = {"error": text, "message": error.message, "code": error.code}
    if splitwise and request_id:
        members["request_id"] = request_id
    return error._replace(status=status, members=members)
