"""Events are what changed between two looks."""

from __future__ import annotations

from typing import Any

import pytest

from router.console.dashboard.events import find_events
from router.console.dashboard.figures import InstanceFigures, Listed, MasterFigures
from router.console.dashboard.history import InstanceReport, MasterReport, Moment

HEALTHY = Listed("a:1", "mixed", "", state="healthy", weight=1.0)


def look(listed: Listed = HEALTHY, computed: float = 5.0, *, paused: bool = False, **members: Any) -> Moment:
    origins = {"computed": computed}
    figures = InstanceFigures(origins, None, None, None, None, None, paused, {}, {}, 0.0)
    return Moment(7.0, instances={listed.key: InstanceReport(listed, figures)}, **members)


def master(role: str) -> Moment:
    figures = MasterFigures(role, True, "", *(0.0,) * 5)
    return look(masters=(MasterReport("m:1", figures),))


@pytest.mark.parametrize(
    ("before", "after", "kind", "text"),
    [
        (look(), look(HEALTHY._replace(state="draining")), "warn", "drains"),
        (look(), look(HEALTHY._replace(state="unhealthy", trouble="refused")), "bad", "is unreachable: refused"),
        (look(HEALTHY._replace(state="paused")), look(), "good", "takes requests"),
        (look(), look(HEALTHY._replace(breaker="open")), "bad", "breaker opened: requests fail there"),
        (look(HEALTHY._replace(breaker="half_open")), look(), "good", "breaker closed"),
        (look(), look(paused=True), "bad", "suspended the use of the pool: calls fail"),
        (look(), look(computed=1.0), "warn", "restarted: its counters began at 0"),
        (Moment(1.0), look(), "good", "registered as mixed"),
        (look(), Moment(7.0), "warn", "is no longer registered"),
    ],
)
def test_what_changed_at_an_instance_is_an_event(before: Moment, after: Moment, kind: str, text: str) -> None:
    assert find_events(before, after) == [(7.0, kind, "a:1", text)]


def test_a_router_that_leaves_and_returns_is_two_events() -> None:
    gone = look(trouble="refused")
    assert find_events(look(), gone) == [(7.0, "bad", "router", "does not answer: refused")]
    assert find_events(gone, look()) == [(7.0, "good", "router", "answers again")]


def test_an_election_and_a_lost_master_are_events() -> None:
    assert find_events(master("standby"), master("leader")) == [(7.0, "good", "m:1", "is leader now")]
    lost = look(masters=(MasterReport("m:1", trouble="refused"),))
    assert find_events(master("leader"), lost) == [(7.0, "bad", "m:1", "is unreachable: refused")]


def test_nothing_is_an_event_if_nothing_changed_or_is_known() -> None:
    assert find_events(look(), look(computed=9.0)) == []
    assert find_events(look(), look(HEALTHY._replace(state="", weight=None))) == []
