"""Simulated SGLang pairs that check each request of a router by the rules in the sources of SGLang 0.5.

The requests to prefill and decode have the same body, with ``bootstrap_host`` and ``bootstrap_port`` of prefill and a
``bootstrap_room``: a number of 63 bits that is used only once. For a batch of prompts all three are lists. A request
waits for the other request with its room, without a limit and without a response. It ends if its client leaves, or if
``/abort_request`` has its ``rid``. For a request that violates a rule, the response is that of SGLang, and the rule is
recorded in ``violations``.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.router.stand_in import Behaviour, Received, Responder, StandIn
from tests.support.toy_model import PATHS, Asked, PrefixCache

__all__ = ["StrictSglang"]

ROOM_BITS = 63
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
# Members that a router may add to a request in addition to the rooms, or omit, because SGLang's name is ``rid``.
ADDED = {"stream_options", "return_token_ids", "rid", "request_id", *BOOTSTRAP}
FOREIGN = {"disaggregate_info", "kv_transfer_params", "request_id"}


@dataclass
class _Room:
    """The state of a room: the requests that have arrived, and the body of the first one."""

    body: dict[str, Any]
    came: set[str] = field(default_factory=set)
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    cached: int = 0


@dataclass
class StrictSglang:
    """Simulated instances of SGLang, which can form pairs.

    Attributes:
        tells_prefill_cache: whether decode reports prefill's cached tokens, as 0.5 does, or the received ones.
        asked: the requests of clients, by the member ``number`` of the body; both instances must get all members.
        token_s: duration of a token.
        violations: violations of rules, one sentence each.
        transfers: number of prompts whose KV was transferred from prefill to decode.
        waiting: number of requests in a room without the other request.
        prefill_cached: the cached tokens of prefill, by ``number``.
    """

    tells_prefill_cache: bool = True
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    token_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    transfers: int = 0
    waiting: int = 0
    prefill_cached: dict[str, int] = field(default_factory=dict)
    _rooms: dict[int, _Room] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)
    _rids: dict[str, asyncio.Event] = field(default_factory=dict)
    _caches: dict[str, PrefixCache] = field(default_factory=dict)

    def serve(self, instance: StandIn, bootstrap_port: int = 8998) -> Behaviour:
        """Return the behaviour of ``instance``; a prefill instance registers with this port."""
        self._caches[instance.key] = PrefixCache()
        instance.extra_fields = {"engine": "sglang"}
        if instance.role == "prefill":
            instance.extra_fields["bootstrap_port"] = self._ports[instance.key] = bootstrap_port
        instance.behave = self._serves(instance)
        return instance.behave

    @property
    def rooms_used(self) -> int:
        return len(self._rooms)

    def _serves(self, instance: StandIn) -> Behaviour:
        async def behave(request: Received, respond: Responder) -> None:
            if request.target == "/server_info":
                mode = "null" if instance.role == "mixed" else instance.role
                told = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": self._ports.get(instance.key)}
                await _answer(respond, {**told, "version": "0.5.23"})
                return
            if request.target == "/abort_request":
                await self._abort(request, respond)
                return
            if request.target not in PATHS or request.method != "POST":
                self.violations.append(f"{request.method} {request.target}: no path for a router")
                await respond.answer(404, b'{"detail": "Not Found"}')
                return
            asked = Asked.read(request.target, request.json)
            for name in FOREIGN & asked.body.keys():
                self.violations.append(f"{name}: a member of another engine's dialect")
            self._check_unchanged(asked)
            if instance.role == "mixed":
                cached = self._caches[instance.key].take(asked.prompts[0])
                await self._say(asked, respond, cached, asyncio.Event())
                return
            await self._pair(instance, asked, respond)

        return behave

    async def _pair(self, instance: StandIn, asked: Asked, respond: Responder) -> None:
        """Wait for the other request in each room, then respond; prefill generates one token."""
        if refusal := self._check_rooms(instance, asked):
            self.violations.append(f"{instance.role}: {refusal}")
            error = {"object": "error", "message": refusal, "type": "BadRequestError", "param": None, "code": 400}
            await respond.answer(400, json.dumps(error).encode(), ("content-type", "application/json"))
            return
        rooms = [self._rooms[number] for number in _listed(asked.body["bootstrap_room"])]
        aborted = self._rids.setdefault(str(asked.body.get("rid") or uuid.uuid4().hex), asyncio.Event())
        is_prefill = instance.role == "prefill"
        for room, prompt in zip(rooms, asked.prompts, strict=True):
            room.came.add(instance.role)
            if is_prefill:
                room.cached = self._caches[instance.key].take(prompt)
                self.prefill_cached[str(asked.body.get("number"))] = room.cached
        self.waiting += 1
        try:
            while not all(self._is_met(room, is_prefill) for room in rooms):
                if respond.peer_left.is_set() or aborted.is_set():
                    respond.keep_alive = False
                    return
                await asyncio.sleep(0.01)
        finally:
            self.waiting -= 1
        if is_prefill:
            await asyncio.sleep(self.token_s)
            for room in rooms:
                room.prefilled.set()
            self.transfers += len(rooms)
        cached = sum(room.cached for room in rooms) if is_prefill or self.tells_prefill_cache else asked.prompt_tokens
        await self._say(asked, respond, cached, aborted, tokens=1 if is_prefill else None)

    def _is_met(self, room: _Room, is_prefill: bool) -> bool:
        return "decode" in room.came if is_prefill else room.prefilled.is_set()

    def _check_rooms(self, instance: StandIn, asked: Asked) -> str:
        """Return the rule that the request violates; '' if none, and then its rooms exist."""
        body, count = asked.body, len(asked.prompts)
        missing = [name for name in BOOTSTRAP if body.get(name) is None]
        if missing:
            return f"Disaggregated request received without {', '.join(missing)}"
        if asked.samples > 1:
            return "n is more than 1: all samples would use one room"
        is_batch = asked.path == "/v1/completions" and not _is_one(body["prompt"])
        if any(isinstance(body[name], list) is not is_batch for name in BOOTSTRAP):
            return f"{count} prompts, but bootstrap_room is {body['bootstrap_room']!r}"
        hosts, ports, numbers = (_listed(body[name]) for name in BOOTSTRAP)
        if not len(hosts) == len(ports) == len(numbers) == count:
            return f"{count} prompts, but {len(numbers)} rooms"
        for host, port, number in zip(hosts, ports, numbers, strict=True):
            if type(number) is not int or not 0 <= number < 1 << ROOM_BITS:
                return f"bootstrap_room {number!r} is no number of {ROOM_BITS} bits"
            if host != "127.0.0.1" or port not in self._ports.values():
                return f"no prefill instance's bootstrap server is at {host}:{port}"
            if instance.role == "prefill" and port != self._ports[instance.key]:
                return f"bootstrap_port {port} is not that of this prefill instance"
        twice = [number for number, times in Counter(numbers).items() if times > 1]
        for number in numbers:
            room = self._rooms.get(number)
            if number in twice or (room is not None and instance.role in room.came):
                return f"bootstrap_room {number} used twice"
            if room is not None and room.body != body:
                changed = sorted(
                    name for name in room.body.keys() | body.keys() if room.body.get(name) != body.get(name)
                )
                return f"the legs of bootstrap_room {number} differ in {', '.join(changed)}"
        for number in numbers:
            self._rooms.setdefault(number, _Room(body))
        return ""

    def _check_unchanged(self, asked: Asked) -> None:
        client = self.asked.get(str(asked.body.get("number")))
        if client is None:
            return
        for name in (client.keys() | asked.body.keys()) - ADDED:
            if client.get(name) != asked.body.get(name):
                self.violations.append(f"{name} was {client.get(name)!r}, and came as {asked.body.get(name)!r}")

    async def _abort(self, request: Received, respond: Responder) -> None:
        rid = request.json.get("rid")
        if not rid:
            self.violations.append("/abort_request without a rid: SGLang ignores it")
        elif rid in self._rids:
            self._rids[rid].set()
        await respond.answer(200, b"")

    async def _say(
        self, asked: Asked, respond: Responder, cached: int, aborted: asyncio.Event, tokens: int | None = None
    ) -> None:
        """Send the response, with at most ``tokens`` tokens, until the client leaves."""
        choices = [choice[:tokens] for choice in asked.generate()]
        if not asked.is_stream:
            await asyncio.sleep(self.token_s * max(map(len, choices)))
            if respond.peer_left.is_set():
                respond.keep_alive = False
                return
            await respond.answer(
                200, asked.whole(uuid.uuid4().hex, cached, choices), ("content-type", "application/json")
            )
            return
        await respond.start_stream("text/event-stream")
        for event in asked.events(uuid.uuid4().hex, cached, choices):
            if respond.peer_left.is_set() or aborted.is_set():
                respond.keep_alive = False
                return
            await respond.chunk(event.encode())
            await asyncio.sleep(self.token_s)
        await respond.end_stream()
        respond.succeeded = True


async def _answer(respond: Responder, members: dict[str, Any]) -> None:
    await respond.answer(200, json.dumps(members).encode(), ("content-type", "application/json"))


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
