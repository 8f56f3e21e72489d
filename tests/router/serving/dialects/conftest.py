"""Fleets of pairs of one dialect behind a router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.router.conftest import RouterUnderTest
from tests.router.serving.dialects.pair_fleet import PairFleet, serve_strictly
from tests.router.stand_in import StandIn


@pytest.fixture
def start_pairs(
    make_router: Callable[..., RouterUnderTest], stand_in: Callable[..., StandIn]
) -> Callable[..., PairFleet]:
    """Return a function that starts instances and a router: ``start_pairs("nixl", prefill=2, decode=1)``."""

    def start(dialect: str, prefill: int = 1, decode: int = 1, mixed: int = 0, **settings: Any) -> PairFleet:
        roles = ["prefill"] * prefill + ["decode"] * decode + ["mixed"] * mixed
        instances = [stand_in(role) for role in roles]
        strict = serve_strictly(dialect, instances, stand_in)
        router = make_router(*instances, splitwise=not mixed, **settings)
        return PairFleet(router, strict, instances)

    return start
