"""Requests of one connection with equal heads share one parsed head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.http import BadBody, ClientRequest, Headers
from router.serving.reading.parsed_request import RequestHead, read_head
from router.serving.reading.sessions import Session, SessionHeaders

SESSIONS = SessionHeaders()
HEADERS = [(b"host", b"h"), (b"x-session-id", b"s"), (b"authorization", b"Bearer k")]


def make_request(
    connection: Any, headers: Headers, method: str = "POST", path: str = "/v1/completions"
) -> ClientRequest:
    request = ClientRequest(connection, method, path.encode(), path, headers, "1.1", True)
    request.known_head = connection.known_head
    return request


@pytest.fixture
def connection() -> Any:
    return SimpleNamespace(known_head=None)


def test_an_equal_head_is_not_parsed_again(connection: Any) -> None:
    first = read_head(make_request(connection, HEADERS), SESSIONS)
    assert first.session == Session("s", "")
    assert first.forwarded.start == b"POST /v1/completions HTTP/1.1\r\nx-session-id: s\r\nauthorization: Bearer k\r\n"
    assert read_head(make_request(connection, list(HEADERS)), SESSIONS) is first


@pytest.mark.parametrize(
    "other",
    [
        {"headers": [*HEADERS, (b"x-request-id", b"mine")]},
        {"headers": [*HEADERS[:-1], (b"authorization", b"Bearer l")]},
        {"headers": HEADERS, "method": "PUT"},
        {"headers": HEADERS, "path": "/v1/chat/completions"},
    ],
)
def test_a_different_head_is_parsed(connection: Any, other: dict[str, Any]) -> None:
    read_head(make_request(connection, HEADERS), SESSIONS)
    request = make_request(connection, **other)
    head, alone = read_head(request, SESSIONS), RequestHead(request, SESSIONS)
    for name in ("forwarded", "sent_id", "session", "trace_id"):
        assert getattr(head, name) == getattr(alone, name)


def test_an_invalid_head_is_refused_each_time(connection: Any) -> None:
    for _ in range(2):
        with pytest.raises(BadBody):
            read_head(make_request(connection, [(b"x-request-id", b"\x00")]), SESSIONS)
