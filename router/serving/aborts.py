"""Aborts: tells engines to stop requests whose response nobody will read.

Closing a connection is not enough: FastDeploy's engine stops at a disconnect only when configured to, and the
KV that a prefill instance has already handed over waits at the decode instance for good. SGLang's takes seconds to
notice. vLLM's stops at once, and has nothing else that could be asked.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from router.fleet import EngineKind, Instance, Tasks, gather_spread
from router.http import BadBody, ConnectionPool, UpstreamError
from router.serving.reading.api import EngineIds

__all__ = ["ABORT_PATH", "AbortOutcome", "AbortScope", "Aborter", "list_unknown_ids", "read_asked_ids"]

_log = logging.getLogger("router.serving.aborts")

ABORT_PATH = "/v1/abort_requests"
_SGLANG_PATH = "/abort_request"
ABORT_SECONDS = 5.0
# Of one request; each costs every process and every instance some work.
MAX_IDS = 1000
# SGLang takes one id a request: so many are sent to an instance at once.
_AT_ONCE = 16

_PREFIX, _NUMBER = re.compile("^(chatcmpl-|cmpl-|resp_|msg_)"), re.compile(r"_[0-9]+$")


class AbortScope:
    """The requests that an abort means: those with the asked ids, or all; of one client, or of everybody."""

    def __init__(self, tag: str, asked: Sequence[Any] | None) -> None:
        """
        Args:
            tag: what the ids of the client's requests end with at engines; ``""`` for everybody's requests.
            asked: the ids as the client wrote them; None for all requests.
        """
        self.tag = tag
        self.asked = asked
        self._ids = frozenset(each for each in asked or () if isinstance(each, str))
        # Every request whose own id is none of these is passed over by one look-up.
        cores = {core for each in self._ids for core in (each, _NUMBER.sub("", each))}
        self._cores = cores | {_PREFIX.sub("", core) for core in cores}

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> AbortScope:
        """The scope that another process has dumped."""
        return cls(dumped["tag"], dumped["asked"])

    def dump(self) -> dict[str, Any]:
        """The scope as plain data."""
        return {"tag": self.tag, "asked": self.asked and sorted(self._ids)}

    def reaches(self, tag: str) -> bool:
        """Whether it may mean requests of the client that has this tag."""
        return not self.tag or self.tag == tag

    def find_meant(self, ids: EngineIds, tag: str) -> Collection[str]:
        """Those of the asked ids that mean a request.

        Args:
            ids: by which its client knows it.
            tag: of its client.
        """
        own = ids.request_id
        if not own or (own not in self._cores and own + tag not in self._cores):
            return ()
        meant = ids.find_meant(self._ids)
        return {*meant, *ids._replace(request_id=own + tag).find_meant(self._ids)} if tag else meant

    def tell_engines(self, members: Mapping[str, Any], engine_ids: Sequence[str]) -> Mapping[str, Any]:
        """The members of the abort that instances get.

        Args:
            members: the client's own.
            engine_ids: by which engines know the requests that the router has found.
        """
        if not self.tag:
            return members if self.asked is None else {**members, "req_ids": [*self.asked, *engine_ids]}
        # Another router, of which this one does not know, may have sent the request.
        return {"req_ids": [*(form for each in sorted(self._ids) for form in self._add_tag(each)), *engine_ids]}

    def remove_tag(self, aborted: Iterable[Any]) -> list[Any]:
        """What instances say that they aborted, by the ids that the client knows."""
        if not self.tag:
            return list(aborted)
        untagged = []
        for entry in aborted:
            name = entry.get("request_id") if isinstance(entry, dict) else entry
            if isinstance(name, str):
                name = name.replace(self.tag, "")
                entry = {**entry, "request_id": name} if isinstance(entry, dict) else name
            untagged.append(entry)
        return untagged

    def _add_tag(self, asked: str) -> list[str]:
        """The forms that an id may have at engines; the number at its end may be a sequence's, or the client's own."""
        if self.tag in asked:
            return [asked]
        core = _NUMBER.sub("", asked)
        return [asked + self.tag] if core == asked else [asked + self.tag, core + self.tag + asked[len(core) :]]


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
        if not members.get("abort_all") and not members.get("req_ids"):
            return outcome
        body = orjson.dumps(members)

        async def abort_at(instance: Instance) -> None:
            response = await self._abort_at(instance, members, body)
            if isinstance(response, str):
                outcome.errors.append(response)
                return
            result = response.get("result")
            found = result if isinstance(result, dict) else response
            outcome.aborted.extend(_entries(found, "aborted"))
            if members.get("abort_all"):  # else each instance names nearly all of the ids
                outcome.not_found.extend(_entries(found, "not_found"))

        await gather_spread(map(abort_at, list(instances)))
        return outcome

    async def _abort_quietly(self, instance: Instance, engine_ids: Sequence[str]) -> None:
        members = {"req_ids": list(engine_ids)}
        response = await self._abort_at(instance, members, orjson.dumps(members))
        if isinstance(response, str):
            _log.info("abort of %s failed: %s", ", ".join(engine_ids), response)

    async def _abort_at(self, instance: Instance, members: Mapping[str, Any], body: bytes) -> dict[str, Any] | str:
        """The instance's response to an abort in FastDeploy's form, or one sentence about why there is none."""
        engine = instance.registration.engine
        if engine is EngineKind.FASTDEPLOY:
            return await self._post(instance, ABORT_PATH, body)
        if engine is not EngineKind.SGLANG:
            return {}  # its connections are closed, and there is no more to do
        if members.get("abort_all"):
            return await self._post(instance, _SGLANG_PATH, b'{"rid":"","abort_all":true}')
        ids = sorted({each for each in members["req_ids"] if isinstance(each, str) and each})
        for first in range(0, len(ids), _AT_ONCE):
            bodies = [orjson.dumps({"rid": each}) for each in ids[first : first + _AT_ONCE]]
            for response in await asyncio.gather(*(self._post(instance, _SGLANG_PATH, each) for each in bodies)):
                if isinstance(response, str):
                    return response
        return {}

    async def _post(self, instance: Instance, path: str, body: bytes) -> dict[str, Any] | str:
        headers = [(b"content-type", b"application/json")]
        try:
            response = await self._upstream.fetch(
                instance.address, "POST", path, headers=headers, body=body, timeout=ABORT_SECONDS
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


def read_asked_ids(members: Mapping[str, Any]) -> list[Any] | None:
    """The ids in the body of an abort, at most ``MAX_IDS``; None where it asks for all requests.

    Raises:
        BadBody: it asks for nothing, or for what cannot be an id.
    """
    asked = members.get("req_ids")
    if not members.get("abort_all"):
        if not (isinstance(asked, list) and asked):
            raise BadBody('the body must have "req_ids", a list of request ids, or "abort_all": true', "req_ids")
        if len(asked) > MAX_IDS:
            raise BadBody(f"req_ids has {len(asked)} ids; one request may have {MAX_IDS}: send several", "req_ids")
        if any(isinstance(each, list | dict) for each in asked):
            raise BadBody("req_ids has a list or an object in it; it must have ids, which are texts", "req_ids")
    try:
        orjson.dumps(members)
    except orjson.JSONEncodeError as exc:
        raise BadBody(f"the body cannot be passed on: {exc}", "req_ids") from None
    return None if members.get("abort_all") else asked


def _entries(found: dict[str, Any], name: str) -> list[Any]:
    entries = found.get(name)
    return entries if isinstance(entries, list) else []
