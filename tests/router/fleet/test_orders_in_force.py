"""An operator's orders about an instance stay in force under traffic, heartbeats and probes. Stand-ins.

There are twelve probes and heartbeats, as in a minute of production, but every 20 ms. For orders to the pool see
``tests/kvstore_backend/cli/operator/test_in_force.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from router.fleet.admin import ORDERS
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import StandIn
from tests.support.waiting import wait_until

PERIODS = 12

ORDERED: Mapping[str, tuple[dict[str, object], dict[str, object]]] = {
    "/admin/drain": ({}, {"state": "draining"}),
    "/admin/pause": ({}, {"state": "paused"}),
    "/admin/weight": ({"weight": 0}, {"state": "healthy", "weight": 0.0}),
}
"""Orders after which an instance gets no requests, by their path: the members, and the fields in the router's list."""


def test_every_order_has_a_test() -> None:
    assert ORDERED.keys() | {"/admin/resume"} == ORDERS.keys(), (
        "an order that changes which instances get requests needs a line here"
    )


def find_entry(router: RouterUnderTest, instance: StandIn) -> dict[str, Any]:
    """Return the instance's entry in the router's list."""
    entries: list[dict[str, Any]] = router.client.get("/registered").json()["mixed"]
    return next(each for each in entries if each["url"] == instance.url)


@pytest.mark.parametrize("path", ORDERED)
def test_an_order_stays_in_force_until_it_is_undone(
    make_router: Callable[..., RouterUnderTest], stand_in: Callable[..., StandIn], path: str
) -> None:
    out, other = stand_in(), stand_in()
    members, expected = ORDERED[path]
    router = make_router(out, other, workers=2, policy="round_robin", health_check_interval_secs=0.02)
    ordered = router.workers[0].client.post(path, json={"instance": out.key, **members})
    assert ordered.status_code == 200, ordered.text
    wait_until(
        lambda: all(expected.items() <= find_entry(each, out).items() for each in router.workers),
        "the order at all workers",
    )
    asked_before = len(out.received)
    for _ in range(PERIODS):
        probes = out.probes
        for instance in (out, other):
            assert instance.register(router.url).status_code == 200
        assert [each.chat().status_code for each in router.workers] == [200, 200]
        wait_until(lambda probes=probes: out.probes > probes, "a probe")  # type: ignore[misc]
        assert all(expected.items() <= find_entry(each, out).items() for each in router.workers)
    assert len(out.received) == asked_before

    back = ("/admin/weight", {"weight": 1}) if path == "/admin/weight" else ("/admin/resume", {})
    assert router.workers[1].client.post(back[0], json={"instance": out.key, **back[1]}).status_code == 200
    wait_until(
        lambda: [each.chat().status_code for each in router.workers] and len(out.received) > asked_before, "a request"
    )
