"""Events: the changes between two polls."""

from __future__ import annotations

from typing import Any

import pytest

from router.console.dashboard.events import find_events
from router.console.dashboard.figures import InstanceFigures, Listed, MasterFigures
from router.console.dashboard.history import InstanceReport, MasterReport, Moment

HEALTHY = Listed("a:1", "mixed", "", state="healthy", weight=1.0)


def poll(listed: Listed = HEALTHY, computed: float = 5.0, *, paused: bool = False, **members: Any) -> Moment:
    origins = {"computed": computed}
    figures = InstanceFigures(origins, None, None, None, None, None, paused, {}, {}, 0.0)
    return Moment(7.0, instances={listed.key: InstanceReport(listed, figures)}, **members)


def poll_master(role: str) -> Moment:
    figures = MasterFigures(role, True, "", *(0.0,) * 5)
    return poll(masters=(MasterReport("m:1", figures),))


@pytest.mark.parametrize(
    ("before", "after", "kind", "text"),
    [
        (poll(), poll(HEALTHY._replace(state="draining")), "warn", "drains"),
        (poll(), poll(HEALTHY._replace(state="unhealthy", trouble="refused")), "bad", "is unreachable: refused"),
        (poll(HEALTHY._replace(state="paused")), poll(), "good", "takes requests"),
        (poll(), poll(HEALTHY._replace(breaker="open")), "bad", "breaker opened: requests fail there"),
        (poll(HEALTHY._replace(breaker="half_open")), poll(), "good", "breaker closed"),
        (poll(), poll(paused=True), "bad", "suspended the use of the pool: calls fail"),
        (poll(), poll(computed=1.0), "warn", "restarted: its counters began at 0"),
        (Moment(1.0), poll(), "good", "registered as mixed"),
        (poll(), Moment(7.0), "warn", "is no longer registered"),
    ],
)
def test_a_change_of_an_instance_is_an_event(before: Moment, after: Moment, kind: str, text: str) -> None:
    assert find_events(before, after) == [(7.0, kind, "a:1", text)]


def test_a_router_that_leaves_and_returns_is_two_events() -> None:
    gone = poll(trouble="refused")
    assert find_events(poll(), gone) == [(7.0, "bad", "router", "does not answer: refused")]
    assert find_events(gone, poll()) == [(7.0, "good", "router", "answers again")]


def test_an_election_and_a_lost_master_are_events() -> None:
    assert find_events(poll_master("standby"), poll_master("leader")) == [(7.0, "good", "m:1", "is leader now")]
    lost = poll(masters=(MasterReport("m:1", trouble="refused"),))
    assert find_events(poll_master("leader"), lost) == [(7.0, "bad", "m:1", "is unreachable: refused")]


def test_unchanged_and_unknown_figures_are_no_events() -> None:
    assert find_events(poll(), poll(computed=9.0)) == []
    assert find_events(poll(), poll(HEALTHY._replace(state="", weight=None))) == []
