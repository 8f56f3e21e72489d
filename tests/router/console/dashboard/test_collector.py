"""Polls of a real router, of stand-ins for its instances, and of a real master of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from router.console.client import RouterClient
from router.console.dashboard.collector import Collector
from router.console.dashboard.history import Moment
from router.console.dashboard.scraper import Scraper
from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import Received, Responder, answers
from tests.support.mooncake import MooncakeMaster
from tests.support.ports import free_port

PAGE = b'kvstore_prompt_tokens_total{origin="pool"} 64\nfastdeploy:num_requests_waiting 2\n'


def poll(url: str, pools: list[str] | None = None, token: str = "") -> Moment:
    async def poll_once() -> Moment:
        collector = Collector(RouterClient(url, token), Scraper(verify=False), pools or [], 1.0)
        try:
            running: Awaitable[Moment] = collector.poll()
            return await running
        finally:
            await collector.close()

    return asyncio.run(poll_once())


def test_a_poll_reads_the_router_its_instances_and_the_pool(
    make_router: MakeRouter, stand_in: MakeStandIn, mooncake_master: MooncakeMaster
) -> None:
    instance = stand_in(behave=answers(200, PAGE))
    router = make_router(instance)
    moment = poll(router.url, [mooncake_master.metrics_url.split("/")[2]])
    assert moment.router is not None
    assert (moment.trouble, moment.listing_trouble) == ("", "")
    (report,) = moment.instances.values()
    assert (report.listed.key, report.listed.state, report.trouble) == (instance.key, "healthy", "")
    assert report.figures is not None
    assert report.figures.origins is not None
    assert (report.figures.origins["pool"], report.figures.waiting) == (64, 2)
    (master,) = moment.masters
    assert master.figures is not None
    assert (master.figures.role, master.figures.serves) == ("leader", True)


def test_a_failed_poll_of_an_instance_or_master_is_one_sentence(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    first, second = stand_in(behave=answers(404, b"")), stand_in(behave=answers(200, b"{"))
    router, unused = make_router(first, second), free_port()
    moment = poll(router.url, [f"127.0.0.1:{unused}", router.url.partition("//")[2]])
    assert "answers with status 404" in moment.instances[first.key].trouble
    assert "does not have Prometheus's format" in moment.instances[second.key].trouble
    assert list(moment.instances) == sorted([first.key, second.key])
    assert moment.masters[0].trouble.startswith(f"http://127.0.0.1:{unused}/health does not answer: ")
    assert "/health is not a JSON object" in moment.masters[1].trouble


def test_a_restart_that_lasts_longer_than_a_poll_is_an_event(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in(behave=answers(200, PAGE))
    router = make_router(instance)

    async def poll_during_restart() -> list[str]:
        collector = Collector(RouterClient(router.url), Scraper(verify=False), [], 1.0)
        try:
            for status, page in ((200, PAGE), (503, b""), (503, b""), (200, PAGE.replace(b"64", b"0")), (200, PAGE)):
                instance.behave = answers(status, page)
                await collector.poll()
            return [event.text for event in collector.events]
        finally:
            await collector.close()

    assert asyncio.run(poll_during_restart()) == ["restarted: its counters began at 0"]


def test_an_instance_that_sends_its_metrics_too_slowly_does_not_delay_a_poll(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drip(request: Received, respond: Responder) -> None:
        if request.target != "/metrics":
            await respond.answer(200, b"{}")
            return
        await respond.start_stream("text/plain")
        for _ in range(30):
            await respond.chunk(b"# a comment\n")
            await asyncio.sleep(0.1)  # the time that the answer takes, not a wait
        await respond.end_stream()

    instance = stand_in(behave=drip)
    router = make_router(instance)
    monkeypatch.setattr("router.console.dashboard.scraper.TIMEOUT_SECONDS", 0.5)
    trouble = poll(router.url).instances[instance.key].trouble
    assert trouble == f"{instance.url}/metrics does not answer within 0.5 s"


def test_metrics_of_unlimited_length_are_not_read(
    make_router: MakeRouter, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = stand_in(behave=answers(200, PAGE * 100))
    router = make_router(instance)
    monkeypatch.setattr("router.console.dashboard.scraper._MAX_PAGE_BYTES", 1000)
    assert poll(router.url).instances[instance.key].trouble.endswith("/metrics is longer than 1,000 bytes")


def test_a_failed_poll_of_a_router_is_one_sentence() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    moment = poll(url)
    assert moment.router is None
    assert moment.trouble.startswith(f"the router at {url} does not answer: ")


def test_a_server_that_is_not_a_router_is_reported(stand_in: MakeStandIn) -> None:
    instance = stand_in(behave=answers(200, b"figure 1\n"))
    assert poll(instance.url).trouble.startswith(f"the server at {instance.url} is not a router, because ")


def test_without_the_admin_token_loads_are_known(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret\n")
    instance = stand_in(behave=answers(200, PAGE))
    router = make_router(admin_token_file=str(tmp_path / "token"))
    headers = {"authorization": "Bearer secret"}
    router.client.post("/register", json=instance.registration(), headers=headers).raise_for_status()
    moment = poll(router.url)
    assert "requires its admin token for /registered" in moment.listing_trouble
    (report,) = moment.instances.values()
    assert (report.listed.key, report.listed.state) == (instance.key, "")
    assert report.figures is not None
    assert poll(router.url, token="secret").listing_trouble == ""
