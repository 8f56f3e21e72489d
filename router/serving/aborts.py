"""Aborts: tells engines to stop requests whose response nobody will read.

Closing a connection is not enough: FastDeploy's engine stops at a disconnect only when configured to, and the
KV that a prefill instance has already handed over waits at the decode instance for good. SGLang's takes seconds to
notice. vLLM's stops at once, and has nothing else that could be asked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from router.fleet import EngineKind, Instance, Tasks
from router.http import ConnectionPool, UpstreamError

__all__ = ["ABORT_PATH", "AbortOutcome", "Aborter", "list_unknown_ids", "names_any"]

_log = logging.getLogger("router.serving.aborts")

ABORT_PATH = "/v1/abort_requests"
_SGLANG_PATH = "/abort_request"
ABORT_SECONDS = 5.0

_PREFIX, _NUMBER = re.compile("^(chatcmpl|cmpl)-"), re.compile(r"_\d+$")


class AbortOutcome(NamedTuple):
    """The instances' answers to an abort: entries as they sent them, and one sentence per instance that failed."""

    aborted: list[Any]
    not_found: list[Any]
    errors: list[str]


class Aborter:
    """Sends ``POST /v1/abort_requests`` to instances, or their engines' own form of it."""

    def __init__(self, upstream: ConnectionPool, tasks: Tasks, count: Callable[[str], None]) -> None:
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
        _log.debug("aborting %s at %s", ", ".join(engine_ids), instance.key)
        self._tasks.run_in_background(self._abort_quietly(instance, engine_ids))

    async def abort_everywhere(self, instances: Iterable[Instance], members: Mapping[str, Any]) -> AbortOutcome:
        """Tell all ``instances`` at once, by these members of FastDeploy's form, and gather their answers."""
        outcome = AbortOutcome([], [], [])
        responses = await asyncio.gather(*(self._abort_at(instance, members) for instance in instances))
        for response in responses:
            if isinstance(response, str):
                outcome.errors.append(response)
                continue
            result = response.get("result")
            found = result if isinstance(result, dict) else response
            outcome.aborted.extend(_entries(found, "aborted"))
            outcome.not_found.extend(_entries(found, "not_found"))
        return outcome

    async def _abort_quietly(self, instance: Instance, engine_ids: Sequence[str]) -> None:
        response = await self._abort_at(instance, {"req_ids": list(engine_ids)})
        if isinstance(response, str):
            _log.info("abort of %s failed: %s", ", ".join(engine_ids), response)

    async def _abort_at(self, instance: Instance, members: Mapping[str, Any]) -> dict[str, Any] | str:
        """The instance's response to an abort in FastDeploy's form, or one sentence about why there is none."""
        engine = instance.registration.engine
        if engine is EngineKind.FASTDEPLOY:
            return await self._post(instance, ABORT_PATH, members)
        if engine is not EngineKind.SGLANG:
            return {}  # its connections are closed, and there is no more to do
        if members.get("abort_all"):
            return await self._post(instance, _SGLANG_PATH, {"rid": "", "abort_all": True})
        ids = {each for each in members["req_ids"] if isinstance(each, str) and each}
        responses = await asyncio.gather(*(self._post(instance, _SGLANG_PATH, {"rid": each}) for each in ids))
        return next((each for each in responses if isinstance(each, str)), {})

    async def _post(self, instance: Instance, path: str, members: Mapping[str, Any]) -> dict[str, Any] | str:
        headers = [(b"content-type", b"application/json")]
        try:
            response = await self._upstream.fetch(
                instance.address, "POST", path, headers=headers, body=orjson.dumps(members), timeout=ABORT_SECONDS
            )
        except UpstreamError as exc:
            return str(exc)
        if response.status != 200:
            return f"{instance.key} answered POST {path} with {response.status}"
        try:
            value = orjson.loads(response.body)
        except orjson.JSONDecodeError:
            value = None
        return value if isinstance(value, dict) else {}


def list_unknown_ids(asked: Iterable[Any], aborted: Iterable[Any]) -> list[Any]:
    """Those of ``asked`` that mean none of the requests that instances say they ``aborted``.

    An instance says ``chatcmpl-<id>_0``, or an object with that as its ``request_id``; a client may write less of it.
    """
    known: set[Any] = set()
    for entry in aborted:
        name = entry.get("request_id") if isinstance(entry, dict) else entry
        if isinstance(name, str):
            for form in (name, _NUMBER.sub("", name)):
                known |= {form, _PREFIX.sub("", form)}
    return [each for each in asked if not (isinstance(each, str) and known & {each, _PREFIX.sub("", each)})]


def names_any(body: bytes, asked: Iterable[str]) -> bool:
    """Whether a request's body may have one of these ids as its ``request_id``: a guess that needs no parsing."""
    return b'"request_id"' in body and any(
        text.encode(errors="surrogatepass") in body
        for name in asked
        for core in {name, _NUMBER.sub("", name)}
        for form in {core, _PREFIX.sub("", core)}
        for text in {form, json.dumps(form)[1:-1], json.dumps(form, ensure_ascii=False)[1:-1]}
    )


def _entries(found: dict[str, Any], name: str) -> list[Any]:
    entries = found.get(name)
    return entries if isinstance(entries, list) else []
