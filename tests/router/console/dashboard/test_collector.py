"""A look at a real router, stand-ins for its instances, and a real master of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

from router.console.client import RouterClient
from router.console.dashboard.collector import Collector
from router.console.dashboard.history import Moment
from router.console.dashboard.scraper import Scraper
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import answers
from tests.support.mooncake import MooncakeMaster
from tests.support.ports import free_port

PAGE = b'kvstore_prompt_tokens_total{origin="pool"} 64\nfastdeploy:num_requests_waiting 2\n'


def look(url: str, pools: list[str] | None = None, token: str = "") -> Moment:
    async def look_once() -> Moment:
        collector = Collector(RouterClient(url, token), Scraper(verify=False), pools or [], 1.0)
        try:
            polling: Awaitable[Moment] = collector.poll()
            return await polling
        finally:
            await collector.close()

    return asyncio.run(look_once())


def test_a_look_brings_the_router_its_instances_and_the_pool(
    make_router: MakeRouter, stand_in: MakeStandIn, mooncake_master: MooncakeMaster
) -> None:
    instance = stand_in(behave=answers(200, PAGE))
    router = make_router(instance)
    seen = look(router.url, [mooncake_master.metrics_url.split("/")[2]])
    assert seen.router is not None
    assert (seen.trouble, seen.listing_trouble) == ("", "")
    (report,) = seen.instances.values()
    assert (report.listed.key, report.listed.state, report.trouble) == (instance.key, "healthy", "")
    assert report.figures is not None
    assert report.figures.origins is not None
    assert (report.figures.origins["pool"], report.figures.waiting) == (64, 2)
    (master,) = seen.masters
    assert master.figures is not None
    assert (master.figures.role, master.figures.serves) == ("leader", True)


def test_who_does_not_answer_is_told_in_a_sentence(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    first, second = stand_in(behave=answers(404, b"")), stand_in(behave=answers(200, b"{"))
    router, nobody = make_router(first, second), free_port()
    seen = look(router.url, [f"127.0.0.1:{nobody}", router.url.partition("//")[2]])
    assert "answers with status 404" in seen.instances[first.key].trouble
    assert "does not have Prometheus's format" in seen.instances[second.key].trouble
    assert list(seen.instances) == sorted([first.key, second.key])
    assert seen.masters[0].trouble.startswith(f"http://127.0.0.1:{nobody}/health does not answer: ")
    assert "/health is not a JSON object" in seen.masters[1].trouble


def test_a_router_that_is_gone_leaves_a_look_with_a_sentence() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    seen = look(url)
    assert seen.router is None
    assert seen.trouble.startswith(f"the router at {url} does not answer: ")


def test_what_is_no_router_is_told(stand_in: MakeStandIn) -> None:
    instance = stand_in(behave=answers(200, b"figure 1\n"))
    assert look(instance.url).trouble.startswith(f"the server at {instance.url} is not a router, because ")


def test_without_the_admin_token_loads_are_known(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret\n")
    instance = stand_in(behave=answers(200, PAGE))
    router = make_router(admin_token_file=str(tmp_path / "token"))
    headers = {"authorization": "Bearer secret"}
    router.client.post("/register", json=instance.registration(), headers=headers).raise_for_status()
    seen = look(router.url)
    assert "requires its admin token for /registered" in seen.listing_trouble
    (report,) = seen.instances.values()
    assert (report.listed.key, report.listed.state) == (instance.key, "")
    assert report.figures is not None
    assert look(router.url, token="secret").listing_trouble == ""
