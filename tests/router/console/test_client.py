"""What an operator's programs learn from a router, and are told when they learn nothing. Instances are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from router.console.client import RouterClient, RouterError
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import StandIn
from tests.support.ports import free_port

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]
T = TypeVar("T")


def ask(url: str, question: Callable[[RouterClient], Awaitable[T]], token: str = "") -> T:
    """The answer of a client that exists for this question."""

    async def ask() -> T:
        client = RouterClient(url, token)
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(ask())


def test_metrics_are_read_by_name(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    router = make_router(stand_in())
    router.chat()
    samples = ask(router.url, RouterClient.read_metrics)
    assert {(*each.labels.values(), each.value) for each in samples["router_instances"]} >= {("mixed", "healthy", 1.0)}


def test_instances_of_all_roles_are_listed(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    prefill, decode = stand_in("prefill"), stand_in("decode")
    router = make_router(prefill, decode, splitwise=True)
    listed = ask(router.url, RouterClient.list_instances)
    assert {(each["url"], each["role"]) for each in listed} == {(prefill.url, "prefill"), (decode.url, "decode")}


def test_an_order_is_carried_out(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert ask(router.url, lambda client: client.give_order("drain", instance.key))["state"] == "draining"


def test_a_request_is_explained_by_its_id_whatever_characters_it_has(
    make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router(stand_in())
    router.client.post("/v1/chat/completions", json={"messages": []}, headers={"x-request-id": "a/b?c"})
    assert ask(router.url, lambda client: client.explain_request("a/b?c"))["request_id"] == "a/b?c"


def test_a_router_that_is_not_there_is_one_sentence() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RouterError, match=f"^the router at {url} does not answer: "):
        ask(url, RouterClient.read_metrics)


def test_a_refusal_is_passed_on_with_its_sentence(make_router: MakeRouter) -> None:
    router = make_router()
    with pytest.raises(RouterError, match=r"refused /admin/drain: no instance '127.0.0.1:9' is registered"):
        ask(router.url, lambda client: client.give_order("drain", "127.0.0.1:9"))


def test_a_router_with_an_admin_token_wants_it(make_router: MakeRouter, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    router = make_router(admin_token_file=str(tmp_path / "token"))
    with pytest.raises(RouterError, match="wants its admin token for /registered: give it with --token-file"):
        ask(router.url, RouterClient.list_instances)
    assert ask(router.url, RouterClient.list_instances, "secret") == []
