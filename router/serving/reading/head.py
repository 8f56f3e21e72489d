"""The head of a client's request: the ids and the session that it tells the router, and the head that instances get.

Clients send the same headers with each request of a connection, but for the body's length: so a head is read once, and
known again by its connection.
"""

from __future__ import annotations

from router.http import HOP_BY_HOP, ClientRequest, Headers, PreparedHead, end_to_end, find_request_id, prepare_head
from router.policies import find_session
from router.serving.reading.api import GENERATING

__all__ = ["MAX_CLIENT_ID", "RequestHead", "read_head"]

# By x-data-parallel-rank a client could choose an engine's process past the router's policy.
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-data-parallel-rank"}
# The router reads the responses to completions; and each attempt at one has an id of its own, which is in its body.
_NOT_FORWARDED_WITH_COMPLETIONS = _NOT_FORWARDED | {b"accept-encoding", b"x-request-id"}

MAX_CLIENT_ID = 128
"""So many characters of an id by which a client looks for its request are kept; thousands of records are."""


class RequestHead:
    """A request's head, read. Its attributes are for reading."""

    __slots__ = ("client_ids", "forwarded", "headers", "line", "sent_id", "session", "tag", "trace_id")

    def __init__(self, request: ClientRequest, tag: str = "") -> None:
        """
        Args:
            tag: what the ids of the client's requests end with at engines.

        Raises:
            BadBody: a header is wrong.
        """
        self.line = (request.method, request.target)
        """Method and target."""
        self.headers: Headers = request.headers
        self.sent_id = find_request_id(request.headers)
        """The id that the client gave the request; ``""`` where it gave none."""
        self.trace_id = ""
        """Of the W3C trace context it came with."""
        self.session = find_session(request.headers)
        """The session that it names."""
        self.client_ids: dict[str, str] = {"session_id": self.session[:MAX_CLIENT_ID]} if self.session else {}
        """The ids by which its client looks for it in logs, by their names there; not to be changed."""
        for name, value in request.headers:
            if name == b"traceparent":
                self.trace_id = value[3:35].decode("latin-1")
            elif name == b"x_bd_logid" and value:  # of FastDeploy's Go router
                self.client_ids["x_bd_logid"] = value[:MAX_CLIENT_ID].decode("latin-1")
        is_completion = request.path in GENERATING
        dropped = _NOT_FORWARDED_WITH_COMPLETIONS if is_completion else _NOT_FORWARDED
        passed = [each for each in end_to_end(request.headers, dropped) if not each[0].startswith(b"x-router-")]
        if tag:
            passed = [(name, value + tag.encode() if name == b"x-request-id" else value) for name, value in passed]
        self.tag = tag
        self.forwarded: PreparedHead = prepare_head(*self.line, passed)
        """The head that instances get, before that has lines of an instance's own."""


def read_head(request: ClientRequest, tag: str = "") -> RequestHead:
    """The head of a request: the one known from the request before it, if that had the same.

    Args:
        tag: what the ids of the client's requests end with at engines.

    Raises:
        BadBody: a header is wrong.
    """
    known, line = request.known_head, (request.method, request.target)
    if isinstance(known, RequestHead) and known.line == line and known.headers == request.headers and known.tag == tag:
        return known
    head = RequestHead(request, tag)
    request.keep_head(head)
    return head
