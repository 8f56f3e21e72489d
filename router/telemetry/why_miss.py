"""Why a request was a cache miss: the instances are queried on demand, never while requests are served.

The instance that computed the prompt remembers it, and knows the pool's answer. If the most similar earlier prompt was
at another instance, that one knows more: so it is queried for the same prompt, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from router.http import UpstreamError

if TYPE_CHECKING:
    from router.fleet import Instance, Registry
    from router.http import Address, ConnectionPool

__all__ = ["explain_miss"]

ASK_SECONDS = 10.0
# Reasons about which another instance may know more.
_OPEN = ("new", "parts")


class _Untold(Exception):
    """An instance does not answer. The message has the reason."""


async def explain_miss(explanation: Mapping[str, Any], registry: Registry, upstream: ConnectionPool) -> dict[str, Any]:
    """Return the reason, a sentence and its numbers.

    Args:
        explanation: the request's explanation from ``Audit.explain_request``.
    """
    request_id = explanation["request_id"]
    key = explanation["prefill"] or explanation["mixed"] or explanation["decode"]
    if not key:
        return _answer(request_id, "", "ended", "no instance was asked, so nothing was looked up")
    instance = registry.get(key)
    if instance is None:
        gone = f"instance {key}, which computed its prompt, is not registered any more"
        return _answer(request_id, key, "unknown", gone)
    body = json.dumps({"request_id": request_id, "inquiry": True}).encode()
    try:
        told = await _ask_instance(upstream, instance.address, "/kvcache/why_miss", body)
    except _Untold as exc:
        return _answer(request_id, key, "unknown", str(exc))
    inquiry = told.pop("inquiry", None)
    best, teller = told, key
    if told.get("reason") in _OPEN and isinstance(inquiry, dict):
        others = [other for other in registry if other.healthy and other is not instance]
        for other, heard in zip(others, await _ask_all(upstream, others, inquiry), strict=True):
            if _rank(heard) > _rank(best):
                best, teller = heard, other.key
    answer = _answer(request_id, key, str(best.get("reason")), str(best.get("sentence")), best.get("details"))
    return answer if teller == key else {**answer, "told_by": teller}


async def _ask_all(
    upstream: ConnectionPool, instances: list[Instance], inquiry: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Query each instance for its verdict on a prompt; empty if it does not answer."""
    body = json.dumps(inquiry).encode()

    async def ask(instance: Instance) -> dict[str, Any]:
        try:
            return await _ask_instance(upstream, instance.address, "/kvcache/kin", body)
        except _Untold:
            return {}

    return list(await asyncio.gather(*map(ask, instances)))


async def _ask_instance(upstream: ConnectionPool, address: Address, path: str, body: bytes) -> dict[str, Any]:
    try:
        answer = await upstream.fetch(address, "POST", path, body=body, timeout=ASK_SECONDS)
    except UpstreamError as exc:
        raise _Untold(str(exc)) from None
    try:
        told = json.loads(answer.body)
    except ValueError:
        told = None
    if answer.status == 200 and isinstance(told, dict) and isinstance(told.get("sentence"), str):
        return told
    error = told.get("error") if isinstance(told, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if isinstance(message, str) and "request" in message:
        raise _Untold(f"{address} answered {answer.status}: {message[:300]}")
    answered = f"{address} tells nothing of misses (it answered {answer.status})"
    raise _Untold(f"{answered}: its engine is another, or an older one")


def _rank(told: Mapping[str, Any]) -> tuple[int, int]:
    """Return how informative a verdict is: one with a position is better than one without, a later position better."""
    details = told.get("details")
    token = details.get("token") if isinstance(details, dict) else None
    if told.get("reason") in ("new", None):
        return 0, 0
    if told.get("reason") == "parts":
        return (2, token) if isinstance(token, int) else (1, 0)
    return 3, 0


def _answer(request_id: str, instance: str, reason: str, sentence: str, details: object = None) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "instance": instance,
        "reason": reason,
        "why_miss": sentence,
        "details": details if isinstance(details, dict) else {},
    }
