"""Errors a client of the router sees, in OpenAI's shape, as JSON bytes.

``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``
"""

from __future__ import annotations

from typing import NamedTuple

import orjson

__all__ = ["ApiError"]

_TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
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
        kind = _TYPES.get(self.status, "internal_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def sse(self) -> bytes:
        """The end of an event stream that has already begun: the error as an event, then ``[DONE]``."""
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"
