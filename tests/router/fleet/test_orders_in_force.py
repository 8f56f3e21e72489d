"""What an operator orders about an instance stays in force under traffic, heartbeats and probes. Stand-ins.

Probes come every 20 ms here, and heartbeats with them, so that twelve of each, the minute of an operator who watches
where they come every 5 s, pass in a second. For orders to the pool see
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

FOLLOWED: Mapping[str, tuple[dict[str, object], dict[str, object]]] = {
    "/admin/drain": ({}, {"state": "draining"}),
    "/admin/pause": ({}, {"state": "paused"}),
    "/admin/weight": ({"weight": 0}, {"state": "healthy", "weight": 0.0}),
}
"""By its path, the members of an order after which an instance gets no requests, and what the router lists then."""


def test_every_order_is_followed() -> None:
    assert FOLLOWED.keys() | {"/admin/resume"} == ORDERS.keys(), (
        "an order that changes which instances get requests needs a line here"
    )


def listed(router: RouterUnderTest, instance: StandIn) -> dict[str, Any]:
    """The instance as the router lists it."""
    entries: list[dict[str, Any]] = router.client.get("/registered").json()["mixed"]
    return next(each for each in entries if each["url"] == instance.url)


@pytest.mark.parametrize("path", FOLLOWED)
def test_an_order_stays_in_force_until_it_is_taken_back(
    make_router: Callable[..., RouterUnderTest], stand_in: Callable[..., StandIn], path: str
) -> None:
    out, other = stand_in(), stand_in()
    members, expected = FOLLOWED[path]
    router = make_router(out, other, workers=2, policy="round_robin", health_check_interval_secs=0.02)
    told = router.workers[0].client.post(path, json={"instance": out.key, **members})
    assert told.status_code == 200, told.text
    wait_until(
        lambda: all(expected.items() <= listed(each, out).items() for each in router.workers),
        "the order at all workers",
    )
    asked_before = len(out.received)
    for _ in range(PERIODS):
        probes = out.probes
        for instance in (out, other):
            assert instance.register(router.url).status_code == 200
        assert [each.chat().status_code for each in router.workers] == [200, 200]
        wait_until(lambda probes=probes: out.probes > probes, "a probe")  # type: ignore[misc]
        assert all(expected.items() <= listed(each, out).items() for each in router.workers)
    assert len(out.received) == asked_before

    back = ("/admin/weight", {"weight": 1}) if path == "/admin/weight" else ("/admin/resume", {})
    assert router.workers[1].client.post(back[0], json={"instance": out.key, **back[1]}).status_code == 200
    wait_until(
        lambda: [each.chat().status_code for each in router.workers] and len(out.received) > asked_before, "a request"
    )
