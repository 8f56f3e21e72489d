"""Operator commands for instances: drain, pause, resume, set a weight, and empty their prefix caches.

A command stays in effect until the operator revokes it. Heartbeats do not change it, and a router with a snapshot
still has it after a restart. For rolling updates, a drain can end automatically when the instance's process ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from router.fleet.instance import Instance
from router.fleet.registry import Registry
from router.fleet.tasks import gather_spread
from router.http import ApiError, BadBody, ConnectionPool, Refused, UpstreamError, parse_object

__all__ = ["ORDERS", "clear_prefix_caches", "describe_drain"]

_log = logging.getLogger("router.fleet.admin")

CLEAR_SECONDS = 10.0
# Paths that empty the cache of our engine, of vLLM (with VLLM_SERVER_DEV_MODE=1) and of SGLang.
CLEAR_PATHS = ("/clear_prefix_cache", "/reset_prefix_cache", "/flush_cache")


def drain_instance(registry: Registry, body: bytes) -> dict[str, Any]:
    """Drain an instance: send it no new requests. With ``undrain``, end the drain.

    With ``until_restart``, the drain ends automatically when another process uses the instance's address. But if the
    instance already drains without ``until_restart``, nothing changes, because the new command may come from a hook
    that does not know of that drain. The result says whether the drain ends automatically.

    Raises:
        BadBody: the body is invalid.
        Refused: the instance is not registered.
    """
    key, members = _parse_order(body)
    undrain, until_restart = (_parse_flag(members, name) for name in ("undrain", "until_restart"))
    instance = _find_instance(registry, key)
    holds_already = instance.draining and not instance.drains_until_restart
    instance.set_draining(not undrain, until_restart=until_restart and not holds_already)
    return {**_describe_outcome(instance), "until_restart": instance.drains_until_restart}


def describe_drain(registry: Registry, key: str) -> dict[str, Any]:
    """Return whether an instance drains, and the number of requests that it still runs for all routers and workers.

    Raises:
        Refused: the instance is not registered.
    """
    instance = _find_instance(registry, key)
    return {**_describe_outcome(instance), "draining": instance.draining}


def pause_instance(registry: Registry, body: bytes) -> dict[str, Any]:
    """Pause an instance: send it no new requests until it is resumed. Its running requests continue.

    Raises:
        BadBody: the body is invalid.
        Refused: the instance is not registered.
    """
    instance = _find_instance(registry, _parse_order(body)[0])
    instance.set_pause(True)
    return _describe_outcome(instance)


def resume_instance(registry: Registry, body: bytes) -> dict[str, Any]:
    """End the pause and the drain of an instance, so that it gets new requests again.

    Raises:
        BadBody: the body is invalid.
        Refused: the instance is not registered.
    """
    instance = _find_instance(registry, _parse_order(body)[0])
    instance.set_pause(False)
    instance.set_draining(False)
    return _describe_outcome(instance)


def weigh_instance(registry: Registry, body: bytes) -> dict[str, Any]:
    """Set the weight of an instance, from 0 to 1. Its share of the requests is multiplied by the weight.

    Raises:
        BadBody: the body is invalid.
        Refused: the instance is not registered.
    """
    key, members = _parse_order(body)
    weight = members.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        message = (
            f"weight is {weight!r}; it must be a number from 0 to 1, the factor of the instance's part of the load"
        )
        raise BadBody(message, "weight")
    instance = _find_instance(registry, key)
    instance.set_share(float(weight))
    return {**_describe_outcome(instance), "weight": instance.share}


ORDERS: dict[str, Callable[[Registry, bytes], dict[str, Any]]] = {
    "/admin/drain": drain_instance,
    "/admin/pause": pause_instance,
    "/admin/resume": resume_instance,
    "/admin/weight": weigh_instance,
}
"""For each path of an operator command, the function that handles ``POST``."""


async def clear_prefix_caches(registry: Registry, upstream: ConnectionPool) -> dict[str, str]:
    """Make all instances empty their own prefix caches. The pool is not changed.

    Returns:
        For each instance, ``success`` or the reason of the failure.
    """
    instances = list(registry)
    outcomes = await gather_spread(_clear_prefix_cache(instance, upstream) for instance in instances)
    for instance, outcome in zip(instances, outcomes, strict=True):
        if outcome == "success":
            registry.events.lost_caches.emit(instance.key)
        _log.info("clearing the prefix cache of instance %s: %s", instance.key, outcome)
    return {instance.key: outcome for instance, outcome in zip(instances, outcomes, strict=True)}


async def _clear_prefix_cache(instance: Instance, upstream: ConnectionPool) -> str:
    for path in CLEAR_PATHS:
        try:
            response = await upstream.fetch(instance.address, "POST", path, timeout=CLEAR_SECONDS)
        except UpstreamError as exc:
            return str(exc)
        if response.status == 200:
            return "success"
        if response.status not in (404, 405):
            return f"{instance.key} answered POST {path} with {response.status}"
    return f"{instance.key} has none of the paths {', '.join(CLEAR_PATHS)}, at which engines clear their caches"


def _parse_order(body: bytes) -> tuple[str, dict[str, Any]]:
    """Return the instance's key in the body of an operator command, and all members of the body."""
    members = parse_object(body)
    key = members.get("instance")
    if not isinstance(key, str):
        raise BadBody(f"instance is {key!r}; it must be 'host:port'", "instance")
    return key, members


def _parse_flag(members: dict[str, Any], name: str) -> bool:
    value = members.get(name, False)
    if not isinstance(value, bool):
        raise BadBody(f"{name} is {value!r}; it must be true or false", name)
    return value


def _find_instance(registry: Registry, key: str) -> Instance:
    instance = registry.get(key)
    if instance is None:
        known = ", ".join(each.key for each in registry) or "none"
        raise Refused(ApiError(404, f"no instance {key!r} is registered; known are: {known}", "unknown_instance"))
    return instance


def _describe_outcome(instance: Instance) -> dict[str, Any]:
    return {"instance": instance.key, "state": instance.state, "running_requests": instance.load.requests}
