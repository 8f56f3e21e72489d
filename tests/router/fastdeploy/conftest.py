"""Routers that are started as FastDeploy's Go router is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest

from router.settings import RouterSettings
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import StandIn
from tests.support.waiting import wait_until

_IS_THERE = any(field.name == "dialect" for field in dataclasses.fields(RouterSettings))


@pytest.fixture
def go_router(make_router: Callable[..., RouterUnderTest]) -> Callable[..., RouterUnderTest]:
    """Starts routers as ``make_router`` does, with the answers of FastDeploy's Go router."""

    def start(*instances: StandIn, **settings: object) -> RouterUnderTest:
        dialect = {"dialect": "go"} if _IS_THERE else {}
        router = make_router(**dialect, **settings)
        for instance in instances:  # where the machine is busy, a first probe may fail
            wait_until(partial(_has_registered, instance, router), f"the registration of {instance.key}")
        return router

    return start


def _has_registered(instance: StandIn, router: RouterUnderTest) -> bool:
    return instance.register(router.url).status_code == 200
