"""The client that programs for operators use: metrics, lists, commands, chats and errors. Instances are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from router.console.client import RouterClient, RouterError, TokenWanted, UntrustedCertificate
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import Behaviour, Received, Responder, answers, stalls, streams
from tests.support.certificates import make_certificate
from tests.support.ports import free_port
from tests.support.threaded_http import QuietHandler, ThreadedServer

T = TypeVar("T")


def streams_then(event: str) -> Behaviour:
    """Stream a chunk, and then this event."""

    async def behave(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event('{"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}')
        await respond.event(event)
        await respond.end_stream()

    return behave


def run_client(url: str, call: Callable[[RouterClient], Awaitable[T]], token: str = "") -> T:
    """Return the result of a call of a new client."""

    async def run_client() -> T:
        client = RouterClient(url, token)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run_client())


def test_metrics_are_read_by_name(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in())
    router.chat()
    samples = run_client(router.url, RouterClient.read_metrics)
    assert {(*each.labels.values(), each.value) for each in samples["router_instances"]} >= {("mixed", "healthy", 1.0)}


def test_instances_of_all_roles_are_listed(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(prefill, decode, splitwise=True)
    listed = run_client(router.url, RouterClient.list_instances)
    assert {(each["url"], each["role"]) for each in listed} == {(prefill.url, "prefill"), (decode.url, "decode")}


def test_the_error_for_an_unknown_authority_names_the_flag(make_router: MakeRouter, tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    router = make_router(ssl_certfile=str(made.certfile), ssl_keyfile=str(made.keyfile))
    with pytest.raises(
        UntrustedCertificate, match="unknown authority; give the authority's certificate with --ca-file FILE"
    ):
        run_client(router.url, RouterClient.list_instances)


def test_a_command_is_executed(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert run_client(router.url, lambda client: client.give_order("drain", instance.key))["state"] == "draining"


def test_a_request_is_explained_by_an_id_with_special_characters(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router(stand_in())
    router.client.post("/v1/chat/completions", json={"messages": []}, headers={"x-request-id": "a/b?c"})
    assert run_client(router.url, lambda client: client.explain_request("a/b?c"))["request_id"] == "a/b?c"


def test_the_error_for_an_unreachable_router_is_one_sentence() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RouterError, match=f"^the router at {url} does not answer: "):
        run_client(url, RouterClient.read_metrics)


def test_a_router_that_hangs_is_reported_with_the_time(stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.console.client.TIMEOUT_SECONDS", 0.1)
    with pytest.raises(RouterError, match=r"does not answer within 0\.1 s$"):
        run_client(stand_in(behave=stalls()).url, RouterClient.read_metrics)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}"])
@pytest.mark.parametrize(
    "call",
    [
        RouterClient.list_instances,
        RouterClient.list_requests,
        lambda client: client.read_drain("a:1"),
        lambda client: client.give_order("drain", "a:1"),
    ],
)
def test_a_server_that_is_not_a_router_is_an_error(
    body: bytes, call: Callable[[RouterClient], Awaitable[object]]
) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    with ThreadedServer(Handler) as server:
        server.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(RouterError, match=f"^the server at {url} is not a router, because "):
            run_client(url, call)


def test_the_sentence_of_a_refusal_is_passed_on(make_router: MakeRouter) -> None:
    router = make_router()
    with pytest.raises(RouterError, match=r"refused /admin/drain: no instance '127.0.0.1:9' is registered"):
        run_client(router.url, lambda client: client.give_order("drain", "127.0.0.1:9"))


def test_a_router_with_an_admin_token_requires_it(make_router: MakeRouter, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    router = make_router(admin_token_file=str(tmp_path / "token"))
    with pytest.raises(
        TokenWanted, match="requires its admin token for /registered; give the token's file with --token-file"
    ):
        run_client(router.url, RouterClient.list_instances)
    assert run_client(router.url, RouterClient.list_instances, "secret") == []


def test_the_last_requests_are_listed(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in())
    router.chat(request_id="a")
    router.chat(request_id="b")
    (newest,) = run_client(router.url, lambda client: client.list_requests(1))
    assert newest["request_id"] == "b"


async def read_chat(client: RouterClient, api_key: str = "") -> tuple[str, str]:
    """Return the request id and the text of a streamed response."""
    text = ""
    async with client.open_chat({"messages": [], "request_id": "r"}, api_key) as stream:
        async for event in stream.read_events():
            text += "".join(choice["delta"]["content"] for choice in event["choices"])
    return stream.request_id, text


def test_a_chat_is_read_as_a_stream(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in(behave=streams("Good ", "night."))
    router = make_router(instance)
    assert run_client(router.url, read_chat, token="admin") == ("r", "Good night.")
    (received,) = instance.received
    assert received.json["stream_options"] == {"include_usage": True}
    assert received.header("authorization") is None  # the admin token goes to the router only


@pytest.mark.parametrize(
    ("behave", "sentence"),
    [
        (answers(400, b'{"error": {"message": "too long"}}'), "refused the request: too long"),
        (streams_then('{"error": {"message": "out of memory"}}'), "the router ended its response early: out of memory"),
        (streams_then("{half"), "sent an event that is not JSON: "),
    ],
    ids=["a refusal", "an error in the stream", "no JSON"],
)
def test_the_error_for_a_failed_chat_is_one_sentence(
    behave: Behaviour, sentence: str, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router(stand_in(behave=behave))
    with pytest.raises(RouterError, match=sentence):
        run_client(router.url, read_chat)


@pytest.mark.parametrize("dialect", ["python", "go"])
def test_a_routers_refusal_is_read_in_each_dialect(make_router: MakeRouter, dialect: str) -> None:
    with pytest.raises(RouterError, match="refused the request: no mixed instance is registered; start one with"):
        run_client(make_router(dialect=dialect).url, read_chat)


def test_a_chat_needs_an_api_key_if_the_router_has_keys(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("somebody: key\n")
    router = make_router(stand_in(behave=streams("Hi")), api_keys_file=str(tmp_path / "keys"))
    with pytest.raises(RouterError, match="requires an API key; give the key's file with --api-key-file"):
        run_client(router.url, read_chat)
    assert run_client(router.url, lambda client: read_chat(client, "key"))[1] == "Hi"
