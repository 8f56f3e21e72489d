"""Instances with https addresses: the router sends all requests to them over TLS and verifies their certificates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from router.fleet import scrape
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.fleet.test_scrape import FASTDEPLOY
from tests.router.stand_in import Received, Responder, answers, stalls, streams
from tests.support.certificates import Certificate, make_certificate
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def cert(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Make the instances' certificate and its key."""
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def make_trusting_router(make_router: MakeRouter, cert: Certificate) -> MakeRouter:
    """Return a function that starts routers that trust the instances' certificate."""
    return lambda *instances, **settings: make_router(*instances, instance_ca_file=str(cert.certfile), **settings)


def get_trouble(router: RouterUnderTest) -> str:
    """Return the trouble of the only instance that is listed."""
    (entry,) = router.client.get("/registered").json()["mixed"]
    return str(entry["trouble"])


def test_requests_reuse_connections(make_trusting_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate) -> None:
    instance = stand_in("mixed", streams("one", "two"), cert.serve())
    router = make_trusting_router(instance)
    before = instance.connections
    for _ in range(3):
        with router.stream() as response:
            assert b"".join(response.iter_raw()).count(b"data: ") == 3
    assert instance.connections == before + 1


def test_registered_has_an_https_url_and_a_host_without_a_scheme(
    make_trusting_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate
) -> None:
    instance = stand_in(tls=cert.serve())
    (entry,) = make_trusting_router(instance).client.get("/registered").json()["mixed"]
    assert (entry["url"], entry["host_ip"], entry["state"]) == (instance.url, "127.0.0.1", "healthy")
    assert instance.url.startswith("https://")


def test_a_pair_gets_plain_hosts(make_trusting_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate) -> None:
    prefill, decode = stand_in("prefill", tls=cert.serve()), stand_in("decode", tls=cert.serve())
    router = make_trusting_router(prefill, decode, splitwise=True)
    assert router.chat().status_code == 200
    info = decode.received[0].json["disaggregate_info"]
    assert (info["prefill_ip"], info["decode_ip"]) == ("127.0.0.1", "127.0.0.1")
    assert router.client.get("/decode_instances").json()[0]["host_ip"] == "127.0.0.1"


def test_large_bodies_pass_in_both_directions(
    make_trusting_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate
) -> None:
    async def echo(request: Received, respond: Responder) -> None:
        await respond.answer(200, request.body, ("content-type", "application/json"))

    router = make_trusting_router(stand_in("mixed", echo, cert.serve()))
    content = "x" * (8 << 20)
    answer = router.chat(messages=[{"role": "user", "content": content}])
    assert answer.json()["messages"][0]["content"] == content


def test_aborts_and_scraped_metrics_use_tls(
    monkeypatch: pytest.MonkeyPatch, make_trusting_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate
) -> None:
    monkeypatch.setattr(scrape, "WANTED_BY", frozenset({"random"}))
    instance = stand_in("mixed", stalls("1"), cert.serve())
    figures = stand_in("mixed", answers(200, FASTDEPLOY), cert.serve())
    router = make_trusting_router(policy="random", stats_interval_secs=0.05)
    instance.register(router.url, metrics_port=figures.port)
    (registered,) = router.app.registry
    wait_until(lambda: registered.load.running == 3, "the instance's figures")
    with router.stream(request_id="r") as response:
        next(response.iter_raw())
    wait_until(lambda: instance.aborted == [{"req_ids": ["chatcmpl-r_0"]}], "the abort")


def test_an_instance_that_fails_during_a_stream_ends_it_with_an_error(
    make_trusting_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate
) -> None:
    async def die(request: Received, respond: Responder) -> None:
        await respond.start_stream()
        await respond.event("1")
        await asyncio.sleep(0.05)
        respond.cut()

    router = make_trusting_router(stand_in("mixed", die, cert.serve()))
    with router.stream() as response:
        first, error, done = b"".join(response.iter_raw()).decode().split("\n\n")[:3]
    assert (first, json.loads(error[6:])["error"]["code"], done) == ("data: 1", "mixed_failed", "data: [DONE]")


def test_a_stale_connection_fails_no_request(
    make_trusting_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate
) -> None:
    instance = stand_in(tls=cert.serve())
    router = make_trusting_router(instance)
    for _ in range(3):
        assert router.chat().status_code == 200
        instance.cut_idle()


def test_a_self_signed_certificate_is_refused_with_one_sentence(
    make_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    instance = stand_in(tls=cert.serve())
    answer = instance.register(make_router().url)
    message = f"cannot connect to {instance.url}: its certificate was rejected: self-signed certificate"
    assert (answer.status_code, answer.json()["detail"]) == (400, f"instance {instance.key} is not healthy: {message}")
    assert [line for line in caplog.messages if message in line]


def test_a_certificate_of_another_host_is_not_accepted(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    other = make_certificate(tmp_path, "DNS:engine.example", "IP:10.0.0.1")
    answer = stand_in(tls=other.serve()).register(make_router(instance_ca_file=str(other.certfile)).url)
    message = "its certificate was rejected: IP address mismatch, certificate is not valid for '127.0.0.1'"
    assert answer.json()["detail"].endswith(message)


def test_the_error_says_that_an_instance_does_not_use_tls(
    make_trusting_router: MakeRouter, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    server = make_router()  # a server without TLS
    answer = stand_in().register(make_trusting_router().url, host_ip="https://127.0.0.1", port=server.port)
    assert answer.json()["detail"].endswith("the server there does not use TLS; register it without https://")


def test_the_list_of_instances_shows_the_error_of_a_certificate(
    make_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate, tmp_path: Path
) -> None:
    instance = stand_in(tls=cert.serve())
    listed = tmp_path / "instances.yaml"
    listed.write_text(f"instances: [{{role: mixed, host_ip: 'https://127.0.0.1', port: {instance.port}}}]")
    router = make_router(register_path=str(listed), health_check_interval_secs=0.05)
    message = f"cannot connect to {instance.url}: its certificate was rejected: self-signed certificate"
    wait_until(lambda: get_trouble(router) == message, "the trouble")
    assert message in router.chat().json()["error"]["message"]


def test_requests_to_an_instance_that_restarts_with_tls_use_tls(
    make_trusting_router: MakeRouter, stand_in: MakeStandIn, cert: Certificate
) -> None:
    instance = stand_in()
    router = make_trusting_router(instance)
    assert router.chat().status_code == 200
    instance.stop()
    instance.tls = cert.serve()
    instance.start()
    assert instance.register(router.url).status_code == 200
    assert router.chat().status_code == 200
    assert router.client.get("/registered").json()["mixed"][0]["url"] == instance.url
