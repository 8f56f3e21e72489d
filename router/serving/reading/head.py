"""The head of a client's request: the ids and the session in it, and the head for instances.

Clients send the same headers with each request of a connection, except the body's length. So a head is parsed once, and
its connection recognises it in later requests.
"""

from __future__ import annotations

from router.http import HOP_BY_HOP, ClientRequest, Headers, PreparedHead, end_to_end, find_request_id, prepare_head
from router.policies import find_session
from router.serving.reading.api import GENERATING

__all__ = ["MAX_CLIENT_ID", "RequestHead", "read_head"]

# With x-data-parallel-rank, a client could select a process of an engine and so bypass the router's policy.
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-data-parallel-rank"}
# The router reads the responses to completions. Each attempt has its own id, which is in its body.
_NOT_FORWARDED_WITH_COMPLETIONS = _NOT_FORWARDED | {b"accept-encoding", b"x-request-id"}

MAX_CLIENT_ID = 128
"""Number of stored characters of an id by which a client finds its request in logs; thousands of records are stored."""


class RequestHead:
    """A parsed request head. Callers only read its attributes."""

    __slots__ = ("client_ids", "forwarded", "headers", "line", "sent_id", "session", "tag", "trace_id")

    def __init__(self, request: ClientRequest, tag: str = "") -> None:
        """
        Args:
            tag: suffix of the client's request ids at engines.

        Raises:
            BadBody: a header is invalid.
        """
        self.line = (request.method, request.target)
        """Method and target."""
        self.headers: Headers = request.headers
        self.sent_id = find_request_id(request.headers)
        """The id that the client gave the request; ``""`` if none."""
        self.trace_id = ""
        """The W3C trace context in the request."""
        self.session = find_session(request.headers)
        """The session named in the request."""
        self.client_ids: dict[str, str] = {"session_id": self.session[:MAX_CLIENT_ID]} if self.session else {}
        """The ids by which its client finds it in logs, by their names there; not to be changed."""
        for name, value in request.headers:
            if name == b"traceparent":
                self.trace_id = value[3:35].decode("latin-1")
            elif name == b"x_bd_logid" and value:  # from FastDeploy's Go router
                self.client_ids["x_bd_logid"] = value[:MAX_CLIENT_ID].decode("latin-1")
        is_completion = request.path in GENERATING
        dropped = _NOT_FORWARDED_WITH_COMPLETIONS if is_completion else _NOT_FORWARDED
        passed = [each for each in end_to_end(request.headers, dropped) if not each[0].startswith(b"x-router-")]
        if tag:
            passed = [(name, value + tag.encode() if name == b"x-request-id" else value) for name, value in passed]
        self.tag = tag
        self.forwarded: PreparedHead = prepare_head(*self.line, passed)
        """The head for instances, before header lines for a specific instance are added."""


def read_head(request: ClientRequest, tag: str = "") -> RequestHead:
    """Return the head of a request. If it equals the one of the previous request, that is reused.

    Args:
        tag: suffix of the client's request ids at engines.

    Raises:
        BadBody: a header is invalid.
    """
    known, line = request.known_head, (request.method, request.target)
    if isinstance(known, RequestHead) and known.line == line and known.headers == request.headers and known.tag == tag:
        return known
    head = RequestHead(request, tag)
    request.keep_head(head)
    return head
