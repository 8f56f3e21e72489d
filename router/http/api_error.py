"""Errors that a client of the router gets, as JSON bytes, in the format of the API that it uses.

OpenAI's format is ``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``. Anthropic's, under
``/v1/messages``, is ``{"type": "error", "error": {"type": ..., "message": ...}}``, to which the router adds its
``code``.

FastDeploy's routers have some of these errors, too. For scripts written for them, ``to_dialect`` converts the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

__all__ = ["ApiError", "Refused", "RequestEnded", "encode_error_event", "to_dialect"]

# Types for other statuses: those below 500 are the client's mistake.
_TYPES = {
    403: "permission_error",
    408: "timeout",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable",
    504: "timeout",
}
# Codes by the role of the failed instance.
_UNREACHABLE = ("mixed_failed", "prefill_failed", "decode_failed")
# The same types with Anthropic's names.
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
    """One error answer: its HTTP ``status``, one sentence, a machine-readable ``code``, and the wrong field."""

    status: int
    message: str
    code: str
    param: str | None = None
    members: Mapping[str, Any] | None = None
    """Members of an answer in another format, instead of OpenAI's."""

    def body(self, path: str = "") -> bytes:
        """Return the JSON body of the answer to a request for this path."""
        if _is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "api_error")
            return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message, "code": self.code}})
        return orjson.dumps({"error": self.describe()} if self.members is None else self.members)

    def describe(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "internal_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def error_event(self, path: str = "") -> bytes:
        """Return the error as an event. In OpenAI's format, a stream that contains only an error ends with it."""
        return encode_error_event(self.body(path), path)

    def sse(self, path: str = "") -> bytes:
        """Return the end of an event stream that has already begun: the error as an event, then OpenAI's ``[DONE]``."""
        return self.error_event(path) + (b"" if _is_anthropic(path) else b"data: [DONE]\n\n")


def encode_error_event(body: bytes, path: str) -> bytes:
    """Return an error's body as a stream event. Anthropic's events have names."""
    return (b"event: error\ndata: " if _is_anthropic(path) else b"data: ") + body + b"\n\n"


class Refused(Exception):
    """A request is not served: because of its client or its size, or because it has to be retried later."""

    def __init__(self, error: ApiError, retry_after: int = 0) -> None:
        """
        Args:
            error: the answer to the client.
            retry_after: seconds until a retry makes sense; 0 if it does not.
        """
        super().__init__(error.message)
        self.error = error
        self.retry_after = retry_after

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers: ``Retry-After``, or how the client has to authenticate (RFC 9110)."""
        if self.retry_after:
            return [(b"retry-after", b"%d" % self.retry_after)]
        return [(b"www-authenticate", b"Bearer")] if self.error.status == 401 else []


class RequestEnded(Exception):
    """The request ends now: with an error for the client, or without one because the client left."""

    def __init__(self, error: ApiError | None) -> None:
        super().__init__(error.message if error else "the client left")
        self.error = error


def to_dialect(dialect: str, error: ApiError, request_id: str, *, splitwise: bool) -> ApiError:
    """Return the error as FastDeploy's router of this dialect answers it, if it has such an error; else ``error``.

    In the Go router's format, ``error`` is a text. The added ``message`` and ``code``, which that router does not have,
    give more details.

    Args:
        dialect: ``python`` or ``go``, as in the setting.
        request_id: id of the request; the Go router reports it in the mode for pairs.
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
