"""Errors a client of the router sees, in OpenAI's shape, as JSON bytes.

``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``
"""

from __future__ import annotations

from typing import NamedTuple

import orjson

__all__ = ["ApiError", "Refused"]

# Of other statuses: those below 500 are the client's mistake.
_TYPES = {
    403: "permission_error",
    408: "timeout",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable",
    504: "timeout",
}


class ApiError(NamedTuple):
    """One error answer: its HTTP ``status``, one sentence, a machine-readable ``code``, the field at fault."""

    status: int
    message: str
    code: str
    param: str | None = None

    def body(self) -> bytes:
        """The JSON body of the answer."""
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "internal_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def error_event(self) -> bytes:
        """The error as an event; in OpenAI's form, a stream with nothing but an error ends with it."""
        return b"data: " + self.body() + b"\n\n"

    def sse(self) -> bytes:
        """The end of an event stream that has already begun: the error as an event, then ``[DONE]``."""
        return self.error_event() + b"data: [DONE]\n\n"


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
