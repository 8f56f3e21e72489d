"""The log at level debug: the steps of each request, and none at other levels. Instances are stand-ins."""

from __future__ import annotations

import logging

import pytest

from tests.router.conftest import MakeRouter, MakeStandIn
from tests.router.stand_in import answers
from tests.support.waiting import wait_until


def list_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """List the router's lines at level debug."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("router.") and record.levelno == logging.DEBUG
    ]


def test_a_request_is_logged_from_its_decision_to_its_end(
    make_router: MakeRouter, stand_in: MakeStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "router")
    bad, good, decode = stand_in("prefill", answers(500)), stand_in("prefill"), stand_in("decode")
    router = make_router(bad, good, decode, splitwise=True, prefill_policy="round_robin")
    for number in range(2):
        assert router.chat(request_id=f"r{number}").status_code == 200
    retried = "r0" if any("r0, attempt 2" in line for line in list_lines(caplog)) else "r1"
    wait_until(lambda: any(line.startswith("request r1: ") for line in list_lines(caplog)), "the last line")
    first, failed, second, answered, ended = (line for line in list_lines(caplog) if f"request {retried}" in line)
    assert f"attempt 1: prefill {bad.key} because of policy=round_robin" in first
    assert f"decode {decode.key} because of policy=request_num" in first
    assert "prompt tokens, 0 of them expected in a cache" in first
    assert f"attempt 1: {bad.key} answered with 500 after" in failed
    assert f"attempt 2: prefill {good.key}" in second
    assert "attempt 2: answered after" in answered
    assert "POST /v1/chat/completions 200; prompt tokens: 1, cached: unknown, generated: 1" in ended


def test_registrations_are_logged(
    make_router: MakeRouter, stand_in: MakeStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "router")
    instance = stand_in()
    router = make_router(instance)
    instance.register(router.url)
    lines = "\n".join(list_lines(caplog))
    assert f"the registration of instance {instance.key}: {{'role': 'mixed'" in lines
    assert f"mixed instance {instance.key} registered again: <Instance mixed" in lines


def test_requests_are_not_logged_at_another_level(
    make_router: MakeRouter, stand_in: MakeStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router")
    router = make_router(stand_in())
    assert router.chat(request_id="r").status_code == 200
    assert not list_lines(caplog)
    assert not any("request r" in record.getMessage() for record in caplog.records)
