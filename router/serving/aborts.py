"""Aborts: make engines stop requests when no client will read the response.

For some engines, closing the connection is not enough. FastDeploy's engine does not stop at a disconnect if
``FD_ENABLE_REQUEST_DISCONNECT_STOP_INFERENCE`` is 0, and KV that a prefill instance has already transferred stays at
the decode instance permanently. SGLang notices a disconnect only after seconds. vLLM stops immediately, and has no
endpoint for aborts.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from kvcommon.json_objects import load_object
from router.fleet import EngineKind, Instance, Tasks, gather_spread
from router.http import BadBody, ConnectionPool, UpstreamError
from router.serving.reading.api import EngineIds

__all__ = ["ABORT_PATH", "AbortOutcome", "AbortScope", "Aborter", "list_unknown_ids", "read_asked_ids"]

_log = logging.getLogger("router.serving.aborts")

ABORT_PATH = "/v1/abort_requests"
_SGLANG_PATH = "/abort_request"
ABORT_SECONDS = 5.0
# Maximum number of ids in one abort, because each id causes work in every process and at every instance.
MAX_IDS = 1000
# Maximum number of concurrent aborts at one instance of SGLang, which accepts one id per request.
_AT_ONCE = 16

_PREFIX, _NUMBER = re.compile("^(chatcmpl-|cmpl-|resp_|msg_)"), re.compile(r"_[0-9]+$")


class AbortScope:
    """The requests that an abort selects: those with certain ids or all, of one client or of all clients."""

    def __init__(self, tag: str, asked: Sequence[Any] | None) -> None:
        """
        Args:
            tag: suffix of the client's request ids at engines; ``""`` for the requests of all clients.
            asked: the ids in the client's abort; None for all requests.
        """
        self.tag = tag
        self.asked = asked
        self._ids = frozenset(each for each in asked or () if isinstance(each, str))
        # The ids that a selected request may have. So a request that is not selected is skipped with one look-up.
        cores = {core for each in self._ids for core in (each, _NUMBER.sub("", each))}
        self._cores = cores | {_PREFIX.sub("", core) for core in cores}

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> AbortScope:
        """Return the scope from the result of ``dump`` in another process."""
        return cls(dumped["tag"], dumped["asked"])

    def dump(self) -> dict[str, Any]:
        """Return the scope as plain data, for ``load`` in another process."""
        return {"tag": self.tag, "asked": self.asked and sorted(self._ids)}

    def reaches(self, tag: str) -> bool:
        """Return whether the abort may select requests of the client whose tag is ``tag``."""
        return not self.tag or self.tag == tag

    def matching_ids(self, ids: EngineIds, tag: str) -> Collection[str]:
        """Return those ids of the abort that select a request.

        Args:
            ids: the ids by which the client knows the request.
            tag: suffix of the request's ids at engines; ``""`` if there is none.
        """
        own = ids.request_id
        if not own or (own not in self._cores and own + tag not in self._cores):
            return ()
        meant = ids.matching_ids(self._ids)
        return {*meant, *ids._replace(request_id=own + tag).matching_ids(self._ids)} if tag else meant

    def make_members(self, members: Mapping[str, Any], engine_ids: Sequence[str]) -> Mapping[str, Any]:
        """Return the members of the abort that is sent to instances.

        Args:
            members: the members of the client's abort.
            engine_ids: ids at engines of the selected requests that this router knows.
        """
        if not self.tag:
            return members if self.asked is None else {**members, "req_ids": [*self.asked, *engine_ids]}
        # The client's ids are sent, too, because a router that is unknown to this one may have sent the request.
        return {"req_ids": [*(form for each in sorted(self._ids) for form in self._add_tag(each)), *engine_ids]}

    def remove_tag(self, aborted: Iterable[Any]) -> list[Any]:
        """Return the aborted requests that instances report, without the tag, which the client does not know."""
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
        """Return the forms that an id may have at engines.

        There are two if the id ends with a number: it may be the index of a sequence, or a part of the client's own id.
        """
        if self.tag in asked:
            return [asked]
        core = _NUMBER.sub("", asked)
        return [asked + self.tag] if core == asked else [asked + self.tag, core + self.tag + asked[len(core) :]]


class AbortOutcome(NamedTuple):
    """The responses of the instances to an abort."""

    aborted: list[Any]
    """The aborted requests, as the instances report them."""
    not_found: list[Any]
    """The ids of requests that the instances do not know, as they report them."""
    errors: list[str]
    """One sentence for each instance at which the abort failed."""


class Aborter:
    """Sends ``POST /v1/abort_requests`` to instances, or the equivalent request of their engines."""

    def __init__(self, upstream: ConnectionPool, tasks: Tasks, count: Callable[[str], None]) -> None:
        """
        Args:
            upstream: the connections to instances.
            tasks: runs aborts in the background.
            count: called with the key of each instance to which ``abort_soon`` sends an abort.
        """
        self._upstream = upstream
        self._tasks = tasks
        self._count = count

    def abort_soon(self, instance: Instance, engine_ids: Sequence[str]) -> None:
        """Abort requests at one instance, in the background. A failure is only logged.

        An abort has its own connection, so it may reach the instance before the request, and FastDeploy ignores ids
        that it does not know. It is not sent again, because a client may send another request with the same id.
        """
        self._count(instance.key)
        _log.debug("aborting request %s at instance %s", ", ".join(engine_ids), instance.key)
        self._tasks.run_in_background(self._abort_quietly(instance, engine_ids))

    async def abort_everywhere(self, instances: Iterable[Instance], members: Mapping[str, Any]) -> AbortOutcome:
        """Send an abort with these members, in FastDeploy's format, to all ``instances``. Return their responses."""
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
            if members.get("abort_all"):  # otherwise each instance lists all ids of requests at other instances
                outcome.not_found.extend(_entries(found, "not_found"))

        await gather_spread(map(abort_at, list(instances)))
        return outcome

    async def _abort_quietly(self, instance: Instance, engine_ids: Sequence[str]) -> None:
        members = {"req_ids": list(engine_ids)}
        response = await self._abort_at(instance, members, orjson.dumps(members))
        if isinstance(response, str):
            _log.info("the abort of request %s failed: %s", ", ".join(engine_ids), response)

    async def _abort_at(self, instance: Instance, members: Mapping[str, Any], body: bytes) -> dict[str, Any] | str:
        """Return the instance's response to an abort in FastDeploy's format; one sentence if the abort failed."""
        engine = instance.registration.engine
        if engine is EngineKind.FASTDEPLOY:
            return await self._post(instance, ABORT_PATH, body)
        if engine is not EngineKind.SGLANG:
            return {}  # the router closes the connection, which is enough for this engine
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
        return load_object(response.body) or {}


def list_unknown_ids(asked: Iterable[Any], aborted: Iterable[Any]) -> list[Any]:
    """Return those of the ids ``asked`` that match none of the requests in ``aborted``.

    Args:
        asked: the ids in the client's abort. An id may be only a part of a request's id.
        aborted: entries that instances report: ``chatcmpl-<id>_0``, or an object with this text as its ``request_id``.
    """
    known: set[Any] = set()
    for entry in aborted:
        name = entry.get("request_id") if isinstance(entry, dict) else entry
        if isinstance(name, str):
            for form in (name, _NUMBER.sub("", name)):
                known |= {form, _PREFIX.sub("", form)}
    return [each for each in asked if not (isinstance(each, str) and known & {each, _PREFIX.sub("", each)})]


def read_asked_ids(members: Mapping[str, Any]) -> list[Any] | None:
    """Return the ids in the body of an abort; None if it selects all requests.

    Raises:
        BadBody: the body names no requests, too many requests, or an invalid id.
    """
    asked = members.get("req_ids")
    if not members.get("abort_all"):
        if not (isinstance(asked, list) and asked):
            raise BadBody('the body must have "req_ids", a list of request ids, or "abort_all": true', "req_ids")
        if len(asked) > MAX_IDS:
            raise BadBody(
                f"req_ids has {len(asked)} ids; at most {MAX_IDS} are allowed; send several requests", "req_ids"
            )
        if any(isinstance(each, list | dict) for each in asked):
            raise BadBody("req_ids has a list or an object in it; each id must be a text", "req_ids")
    try:
        orjson.dumps(members)
    except orjson.JSONEncodeError as exc:
        raise BadBody(
            f"the body cannot be sent on, because it cannot be encoded as JSON again: {exc}", "req_ids"
        ) from None
    return None if members.get("abort_all") else asked


def _entries(found: dict[str, Any], name: str) -> list[Any]:
    entries = found.get(name)
    return entries if isinstance(entries, list) else []
