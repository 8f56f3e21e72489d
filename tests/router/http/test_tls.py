"""HTTPS clients, with curl and with raw sockets, and clients that send plain HTTP to the HTTPS port."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import StandIn, chat_answer, streams
from tests.support.certificates import Certificate, make_certificate
from tests.support.waiting import wait_until

LIMIT = 100_000
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cert(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Make a certificate for loopback and its key."""
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def make_https_router(make_router: MakeRouter, cert: Certificate) -> MakeRouter:
    """Return a function that starts routers that serve HTTPS."""
    files = {"ssl_certfile": str(cert.certfile), "ssl_keyfile": str(cert.keyfile)}

    def start(*instances: StandIn, **settings: object) -> RouterUnderTest:
        router = make_router(**files, **settings)
        for instance in instances:
            assert router.client.post("/register", json=instance.registration()).json() == {"status": "success"}
        return router

    return start


def run_curl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run curl; its output ends with a line that has the status."""
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "20"]
    command += ["--write-out", "\n%{http_code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.fixture
def connection(make_https_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate) -> Iterator[ssl.SSLSocket]:
    """Connect a client to a router that accepts only small bodies."""
    router = make_https_router(stand_in(), max_body_bytes=LIMIT)
    plain = socket.create_connection(("127.0.0.1", router.port), timeout=20)
    with cert.trust().wrap_socket(plain, server_hostname="127.0.0.1") as encrypted:
        yield encrypted


def read_to_end(connection: ssl.SSLSocket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_curl_gets_a_stream_over_https(make_https_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate) -> None:
    router = make_https_router(stand_in("mixed", streams("one", "two")))
    answer = run_curl("--cacert", str(cert.certfile), f"{router.url}{CHAT}", "--data", '{"stream": true}')
    *events, status = [line for line in answer.stdout.splitlines() if line]
    assert ([json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events[:2]], events[2:], status) == (
        ["one", "two"],
        ["data: [DONE]"],
        "200",
    )


def test_curl_refuses_a_certificate_that_it_does_not_trust(make_https_router: MakeRouter) -> None:
    answer = run_curl(f"{make_https_router().url}/health")
    assert (answer.returncode, answer.stdout) == (60, "\n000")
    assert "self-signed certificate" in answer.stderr


def test_the_error_to_plain_http_says_that_the_port_serves_https(
    make_https_router: MakeRouter, cert: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router")
    router = make_https_router()
    answer = run_curl(f"http://127.0.0.1:{router.port}{CHAT}", "--data", "{}")
    body, status = answer.stdout.splitlines()
    assert (status, json.loads(body)["error"]["code"]) == ("400", "plain_http")
    assert "this port serves HTTPS" in json.loads(body)["error"]["message"]
    assert [record.getMessage() for record in caplog.records if record.name == "router.http.tls"] == [
        "a client sent plain HTTP to this HTTPS port"
    ]
    assert router.client.get("/health").status_code == 200


def test_a_failed_handshake_logs_one_debug_line(
    make_https_router: MakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "router")
    router = make_https_router()
    with socket.create_connection(("127.0.0.1", router.port), timeout=20) as client:
        client.sendall(b"something else than TLS\r\n")
        with contextlib.suppress(ConnectionResetError):
            while client.recv(65536):
                pass
    (record,) = [record for record in caplog.records if record.name == "router.http.tls"]
    assert record.levelno == logging.DEBUG
    assert record.getMessage().startswith("a client's TLS handshake failed: ")
    assert record.exc_info is None


def test_the_access_log_names_a_tls_client_at_a_plain_port(make_router: MakeRouter, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    router = make_router(access_log=str(log))
    answer = run_curl(f"https://127.0.0.1:{router.port}/health")
    assert answer.returncode == 35  # "wrong version number": the server does not use TLS
    wait_until(log.read_text, "the line")
    assert json.loads(log.read_text())["error"] == "tls_at_plain_port"


def test_a_client_that_sends_too_much_gets_413_and_the_connection_is_closed(connection: ssl.SSLSocket) -> None:
    connection.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n" % CHAT.encode())
    connection.sendall(b" " * (LIMIT + 1))
    answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_pipelined_requests_are_answered_in_their_order(connection: ssl.SSLSocket) -> None:
    ask = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" % CHAT.encode()
    connection.sendall(ask + b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = read_to_end(connection)
    assert answer.index(chat_answer()) < answer.index(b"HTTP/1.1 404 ")


def test_the_hint_of_a_router_without_instances_has_an_https_url(make_https_router: MakeRouter) -> None:
    assert "--router https://HOST:" in make_https_router().chat().json()["error"]["message"]
