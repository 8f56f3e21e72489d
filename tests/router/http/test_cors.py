"""CORS: the headers for pages of other origins, and a real page in Chromium."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.http import Cors
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import Received, Responder, answers, streams
from tests.support.browser import open_page
from tests.support.certificates import make_certificate

PAGE, OTHER = "https://chat.example.com", "https://other.example.com"
CHAT = "/v1/chat/completions"
ALLOWED = {
    "access-control-allow-origin": PAGE,
    "access-control-expose-headers": "X-Request-Id, Retry-After",
    "vary": "Origin",
}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file with one client's API key."""
    path = tmp_path / "keys"
    path.write_text("alice: sk-alice\n")
    return str(path)


def get_cors_headers(response: httpx.Response) -> dict[str, str]:
    """Return the headers of a response that are for a browser."""
    return {name: value for name, value in response.headers.items() if name == "vary" or "access-control" in name}


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/models/m", "/v1/abort_requests", "/v1//chat/completions"])
def test_a_preflight_is_answered_without_an_api_key(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: str, path: str
) -> None:
    instance = stand_in()
    router = make_router(instance, cors_allowed_origins=(PAGE,), api_keys_file=keys)
    answer = router.client.options(path, headers={"origin": PAGE, **PREFLIGHT})
    assert (answer.status_code, answer.content) == (204, b"")
    assert get_cors_headers(answer) == {
        **ALLOWED,
        "access-control-allow-methods": "GET, HEAD, POST, PUT, PATCH, DELETE",
        "access-control-allow-headers": "authorization,content-type,x-stainless-os",
        "access-control-max-age": "3600",
    }
    assert instance.received == []


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_a_preflight_of_another_origin_is_refused_with_the_setting(make_router: MakeRouter, path: str) -> None:
    router = make_router(cors_allowed_origins=(PAGE,))
    answer = router.client.options(path, headers={"origin": OTHER, **PREFLIGHT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert f"'{OTHER}'" in answer.json()["error"]["message"]
    assert get_cors_headers(answer) == {"vary": "Origin"}


def test_preflights_and_requests_in_one_connection_are_answered_in_their_order(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    async def slow(request: Received, respond: Responder) -> None:
        await asyncio.sleep(0.05)
        await respond.answer(200, b"{}")

    async def pipeline() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = f"HTTP/1.1\r\nhost: x\r\norigin: {PAGE}\r\n"
        writer.write(f"POST {CHAT} {head}content-length: 2\r\n\r\n{{}}".encode())
        writer.write(f"OPTIONS {CHAT} {head}access-control-request-method: POST\r\n\r\n".encode())
        writer.write(f"OPTIONS {CHAT} {head}access-control-request-method: POST\r\nconnection: close\r\n\r\n".encode())
        received = await reader.read(-1)
        writer.close()
        return received

    router = make_router(stand_in("mixed", slow), cors_allowed_origins=(PAGE,))
    received = router.thread.run(pipeline())
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"204", b"204"]


@pytest.mark.parametrize("stream", [False, True])
def test_only_allowed_pages_may_read_responses_of_instances(
    make_router: MakeRouter, stand_in: MakeStandIn, stream: bool
) -> None:
    behave = streams("one") if stream else answers()
    router = make_router(stand_in("mixed", behave), cors_allowed_origins=("https://a.example", PAGE))
    found = {}
    for origin in (PAGE, OTHER, ""):
        headers = {"origin": origin} if origin else {}
        found[origin] = router.client.post(CHAT, json={"stream": stream}, headers=headers)
        assert found[origin].status_code == 200
    assert get_cors_headers(found[PAGE]) == ALLOWED
    assert get_cors_headers(found[OTHER]) == get_cors_headers(found[""]) == {"vary": "Origin"}


def test_a_star_allows_every_page_without_a_vary_header(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in(), cors_allowed_origins=("*",))
    for path, method in ((CHAT, "POST"), ("/v1/models", "GET")):
        for origin in (PAGE, "null"):
            answer = router.client.request(method, path, headers={"origin": origin})
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "vary" not in answer.headers
            assert "access-control-allow-credentials" not in answer.headers
    assert router.client.options(CHAT, headers={"origin": OTHER, **PREFLIGHT}).status_code == 204


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, b"{}", 401),
        ("GET", "/v1/models", b"", 401),
        ("POST", "/v1/abort_requests", b'{"req_ids": ["r"]}', 401),
        ("POST", CHAT, b"x" * 2000, 413),
        ("POST", "/v1//chat/completions", b"{}", 404),
    ],
)
def test_allowed_pages_may_read_errors(
    make_router: MakeRouter, keys: str, method: str, path: str, body: bytes, status: int
) -> None:
    router = make_router(cors_allowed_origins=(PAGE,), api_keys_file=keys, max_body_bytes=1000)
    answer = router.client.request(method, path, content=body, headers={"origin": PAGE})
    assert (answer.status_code, get_cors_headers(answer)) == (status, ALLOWED)


def test_allowed_pages_may_read_the_errors_no_instance_and_invalid_json(make_router: MakeRouter) -> None:
    router = make_router(cors_allowed_origins=(PAGE,))
    for body, status in ((b"{}", 503), (b"[", 400)):
        answer = router.client.post(CHAT, content=body, headers={"origin": PAGE, "x-request-id": "r"})
        assert (answer.status_code, get_cors_headers(answer), answer.headers["x-request-id"]) == (status, ALLOWED, "r")


@pytest.mark.parametrize("path", ["/register", "/registered", "/admin/drain", "/health", "/metrics", "/openapi.json"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_paths_that_are_not_for_clients_allow_no_page(make_router: MakeRouter, method: str, path: str) -> None:
    router = make_router(cors_allowed_origins=("*",))
    answer = router.client.request(method, path, headers={"origin": PAGE, **PREFLIGHT})
    assert get_cors_headers(answer) == {}
    assert method != "OPTIONS" or answer.status_code == 405


def test_without_the_setting_no_page_is_allowed(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in())
    headers = {"origin": PAGE, **PREFLIGHT}
    assert router.client.options("/v1/models", headers=headers).status_code == 405
    for answer in (router.client.options("/v1/models", headers=headers), router.client.post(CHAT, headers=headers)):
        assert get_cors_headers(answer) == {}


@pytest.mark.parametrize("settings", [{}, {"cors_allowed_origins": (PAGE,)}])
def test_the_cors_headers_of_an_instance_are_removed(
    make_router: MakeRouter, stand_in: MakeStandIn, settings: dict[str, Any]
) -> None:
    allows = [("Access-Control-Allow-Origin", "*"), ("Access-Control-Allow-Credentials", "true")]
    router = make_router(stand_in("mixed", answers(200, b"{}", *allows)), **settings)
    answer = router.client.post(CHAT, json={}, headers={"origin": OTHER})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("setting", "origin"),
    [
        ("https://Chat.Example.com:443", PAGE),
        ("http://10.0.0.1:80", "http://10.0.0.1"),
        ("http://10.0.0.1:8080", "http://10.0.0.1:8080"),
        ("http://10.0.0.1:443", "http://10.0.0.1:443"),
        ("app://local", "app://local"),
    ],
)
def test_an_origin_is_compared_in_the_notation_of_browsers(setting: str, origin: str) -> None:
    assert Cors([setting]).answer_headers([(b"origin", origin.encode())])[0][1] == origin.encode()


SCRIPT = """
const url = %s, body = JSON.stringify({messages: [], stream: true});
async function ask(key) {
  const headers = {"content-type": "application/json", "authorization": "Bearer " + key, "x-request-id": "mine"};
  const answer = await fetch(url, {method: "POST", headers, body});
  const found = {status: answer.status, id: answer.headers.get("x-request-id"), reads: 0, text: ""};
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    found.reads += 1;
    found.text += part.value;
  }
  return found;
}
return {right: await ask("sk-alice"), wrong: await ask("sk-mallory")};
"""


def compute_spki_digest(certfile: Path) -> str:
    """Return the digest by which Chromium can trust a self-signed certificate."""
    command = (
        f"openssl x509 -in {certfile} -noout -pubkey | openssl pkey -pubin -outform der"
        " | openssl dgst -sha256 -binary | openssl base64"
    )
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout.strip()


def test_a_page_in_chromium_reads_a_whole_stream_and_an_error(
    make_router: MakeRouter, stand_in: MakeStandIn, keys: str, tmp_path: Path
) -> None:
    cert = make_certificate(tmp_path)
    files = {"ssl_certfile": str(cert.certfile), "ssl_keyfile": str(cert.keyfile), "api_keys_file": keys}
    instance = stand_in("mixed", streams("one", "two", "three"))
    with open_page() as page:
        router = make_router(cors_allowed_origins=(page.origin,), **files)
        router.client.post("/register", json=instance.registration())
        trust = f"--ignore-certificate-errors-spki-list={compute_spki_digest(cert.certfile)}"
        found = page.run(SCRIPT % json.dumps(router.url + CHAT), tmp_path, trust)
    right, wrong = found["right"], found["wrong"]
    assert (right["status"], right["id"]) == (200, "mine")
    *events, done, _ = right["text"].split("\n\n")
    assert [json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events] == ["one", "two", "three"]
    assert done == "data: [DONE]"
    assert (wrong["status"], json.loads(wrong["text"])["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("origins", [(), (OTHER,)])
def test_a_page_in_chromium_that_is_not_allowed_reads_no_response(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path, origins: tuple[str, ...]
) -> None:
    instance = stand_in()
    router = make_router(instance, cors_allowed_origins=origins)
    with open_page() as page:
        found = page.run(SCRIPT % json.dumps(router.url + CHAT), tmp_path)
    assert found == {"failed": "TypeError: Failed to fetch"}
    assert [request for request in instance.received if request.method != "OPTIONS"] == []


@pytest.mark.parametrize("path", ["/admin/drain", "/register"])
def test_a_page_of_another_origin_cannot_send_orders(make_router: MakeRouter, stand_in: MakeStandIn, path: str) -> None:
    """A browser sends the text of a form to every address that it reaches, such as a router at 127.0.0.1."""
    instance = stand_in()
    router = make_router(instance)
    body = json.dumps({"instance": instance.key, **instance.registration()})
    for origin, status in ((OTHER, 403), ("null", 403), (router.url, 200), ("", 200)):
        headers = {"content-type": "text/plain", **({"origin": origin} if origin else {})}
        answer = router.client.post(path, content=body, headers=headers)
        assert (origin, answer.status_code) == (origin, status)


@pytest.mark.parametrize(("allowed", "status"), [((), 403), ((OTHER,), 200)])
def test_a_page_of_another_origin_aborts_requests_only_if_it_is_allowed(
    make_router: MakeRouter, allowed: tuple[str, ...], status: int
) -> None:
    router = make_router(cors_allowed_origins=allowed)
    answer = router.client.post("/v1/abort_requests", content=b'{"abort_all": true}', headers={"origin": OTHER})
    assert answer.status_code == status
