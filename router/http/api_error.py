"""Errors a client of the router sees, as JSON bytes, in the shape of the API that it asked.

OpenAI's is ``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``, and Anthropic's, under
``/v1/messages``, is ``{"type": "error", "error": {"type": ..., "message": ...}}``, with our ``code`` in it.

``to_dialect`` gives those that FastDeploy's routers have, too, the shape that scripts written for one of these expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

__all__ = ["ApiError", "Refused", "encode_error_event", "to_dialect"]

# Of other statuses: those below 500 are the client's mistake.
_TYPES = {
    403: "permission_error",
    408: "timeout",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable",
    504: "timeout",
}
# By the role of the instance that failed.
_UNREACHABLE = ("mixed_failed", "prefill_failed", "decode_failed")
# The same in Anthropic's names.
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
    """One error answer: its HTTP ``status``, one sentence, a machine-readable ``code``, the field at fault."""

    status: int
    message: str
    code: str
    param: str | None = None
    members: Mapping[str, Any] | None = None
    """The members of an answer that has another shape, in place of OpenAI's."""

    def body(self, path: str = "") -> bytes:
        """The JSON body of the answer to a request for this path."""
        if _is_anthropic(path):
            kind = _ANTHROPIC_TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "api_error")
            return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message, "code": self.code}})
        return orjson.dumps({"error": self.describe()} if self.members is None else self.members)

    def describe(self) -> dict[str, Any]:
        """OpenAI's object for it."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "internal_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def error_event(self, path: str = "") -> bytes:
        """The error as an event; in OpenAI's form, a stream with nothing but an error ends with it."""
        return encode_error_event(self.body(path), path)

    def sse(self, path: str = "") -> bytes:
        """The end of an event stream that has already begun: the error as an event, then OpenAI's ``[DONE]``."""
        return self.error_event(path) + (b"" if _is_anthropic(path) else b"data: [DONE]\n\n")


def encode_error_event(body: bytes, path: str) -> bytes:
    """The event that an error's body is in a stream; Anthropic's events have names."""
    return (b"event: error\ndata: " if _is_anthropic(path) else b"data: ") + body + b"\n\n"


class Refused(Exception):
    """A request is not served: for its client, or its size, or it has to wait its turn elsewhere."""

    def __init__(self, error: ApiError, retry_after: int = 0) -> None:
        """
        Args:
            error: the answer to the client.
            retry_after: seconds after which it is worth another try; 0 where trying again is of no use.
        """
        super().__init__(error.message)
        self.error = error
        self.retry_after = retry_after

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the response: ``Retry-After``, or how to say who one is (RFC 9110)."""
        if self.retry_after:
            return [(b"retry-after", b"%d" % self.retry_after)]
        return [(b"www-authenticate", b"Bearer")] if self.error.status == 401 else []


def to_dialect(dialect: str, error: ApiError, request_id: str, *, splitwise: bool) -> ApiError:
    """The error as FastDeploy's router of this dialect answers it, where that has such an error; else ``error``.

    In the Go router's, ``error`` is a text; ``message`` and ``code``, which that router does not have, say more.

    Args:
        dialect: ``python`` or ``go``, as of the setting.
        request_id: of the request; the Go router tells it in a pair's mode.
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
