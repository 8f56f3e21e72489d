"""The HTTP server with unusual and invalid requests: it never answers 500 or logs an error, and serves the next one."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from router.settings import RouterSettings
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import LoopThread, StandIn

EXAMPLES = 120
PATHS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/abort_requests", "/v1/"),
    *("/register", "/registered", "/registered_number", "/decode_instances?version=1", "/health"),
    *("/admin/drain", "/admin/explain/r", "/admin/explain/", "/openapi.json", "/docs", "/", "/nowhere", "/v1"),
    *("/health_generate", "/metrics", "/v1/%ff/..;?a=%00"),
]
MEMBERS = [
    *("model", "messages", "prompt", "prompt_token_ids", "stream", "stream_options", "n", "max_tokens", "user", "role"),
    *(
        "request_id",
        "disaggregate_info",
        "completion_token_ids",
        "tools",
        "content",
        "session_id",
        "cache_salt",
        "stop",
    ),
    *("port", "metrics_port", "connector_port", "rdma_ports", "device_ids", "transfer_protocol", "tp_size"),
    *("is_paused", "version", "connected_decodes", "instance", "undrain", "req_ids", "abort_all"),
]
# All requests go to loopback; the other values are no valid names.
HOSTS = ["127.0.0.1", "::1", "http://127.0.0.1", "", "\ud800", "\x80", "a\x00b", "127.0.0.1\r\nx: y", "a" * 300, " "]
HEADERS = [
    *("authorization", "traceparent", "x-session-id", "content-type", "expect", "connection", "te", "upgrade"),
    *("content-encoding", "x-request-id", "accept", "cookie", "keep-alive", "x-odd"),
]

_odd_text = st.text(st.characters(), max_size=8)  # with lone surrogates
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70_000),
    st.sampled_from([10**19, -(10**400), 2**63, 2**64, 1 << 53]),
    st.floats(),
    _odd_text,
    st.sampled_from(["127.0.0.1", "mixed", "prefill", "user", "host:1", "\ud800", "a\x00b", "a" * 300, "[::1]", "..."]),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=4)),
    max_leaves=12,
)
_hosts = st.sampled_from(HOSTS) | st.none() | st.integers() | st.lists(st.none())
_objects = st.builds(
    lambda members, host: members if host == "" else {**members, "host_ip": host},
    st.dictionaries(st.sampled_from(MEMBERS), _values, max_size=6),
    _hosts,
)


@st.composite
def _bodies(draw: st.DrawFn) -> bytes:
    """Draw unusual JSON: cut, with a member twice, nested deeply; or bytes that are no JSON."""
    data = json.dumps(draw(_objects), ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    kind = draw(st.sampled_from(["whole", "whole", "cut", "twice", "deep", "value", "bytes", "encoded"]))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if kind == "twice":
        name = json.dumps(draw(st.sampled_from(MEMBERS)))
        first, second = json.dumps(draw(_scalars)), json.dumps(draw(_values))
        return f"{{{name}: {first}, {name}: {second}}}".encode()
    if kind == "deep":
        depth = draw(st.sampled_from([50, 900, 1100, 5000, 100_000]))
        quoted = json.dumps(draw(st.sampled_from(MEMBERS))).encode()
        opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"content":', b"}")]))
        return b"{" + quoted + b": " + opening * depth + b"1" + closing * depth + b"}"
    if kind == "value":
        return json.dumps(draw(_values)).encode("utf-8", "surrogatepass")
    if kind == "bytes":
        return draw(st.binary(max_size=40))
    if kind == "encoded":
        return data.decode("utf-8", "replace").encode(draw(st.sampled_from(["utf-16", "utf-8-sig", "utf-32"])))
    return data


@st.composite
def _registrations(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the fields of a registration, some of them unusual."""
    role = draw(st.sampled_from(["mixed", "prefill", "decode", 0, 1, 2]))
    fields = {"role": role, "host_ip": draw(_hosts), "port": draw(st.integers(1, 3)), "tp_size": 1}
    return {**fields, **draw(st.dictionaries(st.sampled_from(MEMBERS), _values, max_size=3))}


@st.composite
def _bytes_of_requests(draw: st.DrawFn) -> bytes:
    """Draw the bytes of requests with some bytes changed, or random bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    body = draw(
        st.sampled_from([b"{}", b'{"messages": [], "request_id": "r"}', b'{"stream": true}', b"1\r\n{\r\n0\r\n\r\n"])
    )
    lines = [
        f"{draw(st.sampled_from(['POST', 'GET', 'HEAD', 'CONNECT']))} {draw(st.sampled_from(PATHS))} HTTP/1.1".encode(),
        b"host: x",
        draw(st.sampled_from([b"content-length: %d" % len(body), b"transfer-encoding: chunked", b"content-length: 1"])),
        draw(
            st.sampled_from(
                [b"a: b", b"expect: 100-continue", b"connection: upgrade\r\nupgrade: h2c", b"connection: close"]
            )
        ),
    ]
    data = bytearray(b"\r\n".join([*lines, b"", body]) * draw(st.integers(1, 3)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


class Servers:
    """A router in each mode, with instances without faults."""

    def __init__(self, thread: LoopThread) -> None:
        self.instances = [StandIn(role, thread).start() for role in ("mixed", "prefill", "decode")]
        self.routers = [self._router(thread, splitwise) for splitwise in (False, True)]

    def _router(self, thread: LoopThread, splitwise: bool) -> RouterUnderTest:
        chosen: dict[str, Any] = {
            "splitwise": splitwise,
            "host": "127.0.0.1",
            "access_log": "off",
            "max_body_bytes": 1_000_000,
        }
        probes: dict[str, Any] = {"health_check_interval_secs": 1000.0, "health_check_timeout_secs": 0.2}
        router = RouterUnderTest(thread, RouterSettings(**chosen, **probes))
        router.start()
        for instance in self.instances:
            if (instance.role != "mixed") == splitwise:
                assert instance.register(router.url).status_code == 200
        return router

    def serve(self) -> bool:
        """Return whether each router still serves a usual request."""
        return all(router.chat().status_code == 200 for router in self.routers)

    def close(self) -> None:
        """Stop all routers and instances."""
        for router in self.routers:
            router.stop()
        for instance in self.instances:
            instance.stop()


@pytest.fixture(scope="module")
def servers(thread: LoopThread) -> Iterator[Servers]:
    """Start routers for all examples, so that an example also tests the state that earlier examples left."""
    running = Servers(thread)
    yield running
    running.close()


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that lists the errors logged since its last call."""

    def list_errors() -> list[str]:
        messages = [caplog.handler.format(record) for record in caplog.records if record.levelname == "ERROR"]
        caplog.clear()
        return messages

    return list_errors


Errors = Callable[[], list[str]]
_quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@_quick
@given(
    method=st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "ODD"]),
    path=st.sampled_from(PATHS),
    body=_bodies(),
    headers=st.dictionaries(
        st.sampled_from(HEADERS), st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12), max_size=3
    ),
    in_pairs=st.booleans(),
)
@example(method="POST", path="/v1/abort_requests", body=b'{"req_ids": [[]]}', headers={}, in_pairs=False)
def test_no_request_is_answered_with_a_500(
    servers: Servers, errors: Errors, method: str, path: str, body: bytes, headers: dict[str, str], in_pairs: bool
) -> None:
    response = servers.routers[in_pairs].client.request(method, path, content=body, headers=headers)
    assert response.status_code < 500 or response.status_code == 503, response.text
    assert servers.serve()
    assert errors() == []


@_quick
@given(path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]), members=_objects, in_pairs=st.booleans())
def test_a_completion_reaches_the_instances_unchanged_or_is_answered_with_400(
    servers: Servers, errors: Errors, path: str, members: dict[str, Any], in_pairs: bool
) -> None:
    for instance in servers.instances:
        instance.received.clear()
    body = json.dumps(members).encode()
    response = servers.routers[in_pairs].client.post(path, content=body)
    assert response.status_code in (200, 400), response.text
    own = {"request_id", "disaggregate_info", "return_token_ids"}
    for got in [got for instance in servers.instances for got in instance.received]:
        assert _without(got.json, own) == _without(json.loads(body), own)
    assert errors() == []


def _without(members: dict[str, Any], names: set[str]) -> str:
    """Return the other members as JSON, in which NaN equals NaN."""
    return json.dumps({name: value for name, value in members.items() if name not in names})


@_quick
@given(fields=_registrations(), in_pairs=st.booleans())
def test_an_unusual_registration_is_accepted_or_answered_with_400(
    servers: Servers, errors: Errors, fields: dict[str, Any], in_pairs: bool
) -> None:
    router = servers.routers[in_pairs]
    if fields["port"] in (1, 2, 3):
        fields = {**fields, "port": servers.instances[fields["port"] - 1].port}
    response = router.client.post("/register", content=json.dumps(fields).encode())
    assert response.status_code in (200, 400), response.text
    for path in ("/registered", "/registered_number", "/decode_instances", "/metrics"):
        assert router.client.get(path).status_code == 200
    for instance in servers.instances:
        router.client.post("/register", json=instance.registration())
    assert servers.serve()
    assert errors() == []


TWO_REQUESTS_AND_A_BYTE = 2 * b"GET /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" + b"}"


@_quick
@given(data=_bytes_of_requests(), in_pairs=st.booleans())
@example(data=TWO_REQUESTS_AND_A_BYTE, in_pairs=False)
def test_no_bytes_are_answered_with_a_500(servers: Servers, errors: Errors, data: bytes, in_pairs: bool) -> None:
    with socket.create_connection(("127.0.0.1", servers.routers[in_pairs].port)) as client:
        client.sendall(data)
        client.settimeout(0.01)
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while more := client.recv(65536):
                received += more
    assert all(int(status) < 500 for status in re.findall(rb"HTTP/1\.1 (\d+)", received)), received
    assert servers.serve()
    assert errors() == []
