"""kvrouter drain. Instances are stand-ins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.console.drain import main
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import StandIn


def test_a_drained_instance_is_told_with_what_it_still_runs(
    make_router: Callable[..., RouterUnderTest],
    stand_in: Callable[..., StandIn],
    capsys: pytest.CaptureFixture[str],
) -> None:
    instance = stand_in()
    router = make_router(instance)
    assert main([instance.key, "--router", router.url.removeprefix("http://")]) == 0
    assert capsys.readouterr().out == f"{instance.key} is draining, with 0 requests running\n"
