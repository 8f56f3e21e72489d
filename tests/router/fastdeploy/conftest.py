"""Routers that are started as FastDeploy's Go router is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.router.conftest import RouterUnderTest


@pytest.fixture
def go_router(make_router: Callable[..., RouterUnderTest]) -> Callable[..., RouterUnderTest]:
    """Starts routers as ``make_router`` does, with the answers of FastDeploy's Go router."""
    return partial(make_router, dialect="go")
