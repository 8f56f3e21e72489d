"""Aborts: tells engines to stop requests whose answer nobody will read.

Closing a connection is not enough: FastDeploy's engine stops at a disconnect only when configured to, and what a
prefill instance has already handed over waits at the decode instance for good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import orjson

from router.fleet import Instance, Tasks
from router.http.errors import UpstreamError
from router.http.pool import Upstream

__all__ = ["AbortOutcome", "Aborter"]

_log = logging.getLogger("router.serving.aborts")

ABORT_PATH = "/v1/abort_requests"
ABORT_SECONDS = 5.0


class AbortOutcome(NamedTuple):
    """What instances said to an abort: entries as they sent them, and one sentence per instance that failed."""

    aborted: list[Any]
    not_found: list[Any]
    errors: list[str]


class Aborter:
    """Sends ``POST /v1/abort_requests`` to instances."""

    def __init__(self, upstream: Upstream, tasks: Tasks, count: Callable[[str], None]) -> None:
        """
        Args:
            count: called with the key of each instance that is told to stop a request nobody waits for.
        """
        self._upstream = upstream
        self._tasks = tasks
        self._count = count

    def abort_soon(self, instance: Instance, engine_ids: Sequence[str]) -> None:
        """Abort requests at one instance, in the background; a failure is logged and otherwise ignored."""
        self._count(instance.key)
        self._tasks.run_in_background(self._abort_quietly(instance, engine_ids))

    async def abort_everywhere(self, instances: Iterable[Instance], body: bytes) -> AbortOutcome:
        """Send ``body`` to all ``instances`` at once and gather what they say."""
        outcome = AbortOutcome([], [], [])
        answers = await asyncio.gather(*(self._post(instance, body) for instance in instances))
        for answer in answers:
            if isinstance(answer, str):
                outcome.errors.append(answer)
                continue
            result = answer.get("result")
            found = result if isinstance(result, dict) else answer
            outcome.aborted.extend(_entries(found, "aborted"))
            outcome.not_found.extend(_entries(found, "not_found"))
        return outcome

    async def _abort_quietly(self, instance: Instance, engine_ids: Sequence[str]) -> None:
        answer = await self._post(instance, orjson.dumps({"req_ids": list(engine_ids)}))
        if isinstance(answer, str):
            _log.info("abort of %s failed: %s", ", ".join(engine_ids), answer)

    async def _post(self, instance: Instance, body: bytes) -> dict[str, Any] | str:
        """The instance's answer, or one sentence about why there is none."""
        headers = [(b"content-type", b"application/json")]
        try:
            answer = await self._upstream.fetch(
                instance.address, "POST", ABORT_PATH, headers=headers, body=body, timeout=ABORT_SECONDS
            )
        except UpstreamError as exc:
            return str(exc)
        if answer.status != 200:
            return f"{instance.key} answered POST {ABORT_PATH} with {answer.status}"
        try:
            value = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            value = None
        return value if isinstance(value, dict) else {}


def _entries(found: dict[str, Any], name: str) -> list[Any]:
    entries = found.get(name)
    return entries if isinstance(entries, list) else []
