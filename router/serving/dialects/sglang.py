"""SGLang: both legs are sent together, with the same body, which contains the id of a room.

``bootstrap_room`` is a number that no other request has. For a batch of prompts, the body has lists of host, port and
room. An instance of a pair rejects requests without a room. Source: SGLang 0.5, ``srt/disaggregation`` and its router.
"""

from __future__ import annotations

import random

from router.fleet import Instance
from router.http import encode_member
from router.serving.dialects.dialect import NO_MEMBERS, LegPlan, NotAsPair, Pair, members_to_strip
from router.serving.reading.api import EngineIds
from router.serving.reading.parsed_request import ParsedRequest

__all__ = ["SglangPair", "name_sglang_sequences", "plan_sglang"]

_ROOM_BITS = 63


class SglangPair(Pair):
    """A pair of SGLang instances. Decode connects to prefill's bootstrap server, to get the KV from prefill."""

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        super().__init__(prefill, decode)
        self._place = (prefill.address.host, prefill.registration.bootstrap_port)

    def plan(self, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, LegPlan, EngineIds | None]:
        if parsed.samples > 1:
            message = (
                "n is more than 1, but a pair of SGLang instances generates one answer per request; send n requests"
            )
            raise NotAsPair(message, decode_serves_alone=False)
        host, port = self._place
        members = dict(plan_sglang(parsed, request_id).members)
        if parsed.is_batch:
            count = parsed.num_prompts
            rooms = [random.getrandbits(_ROOM_BITS) for _ in range(count)]
            values = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}
        else:
            room = random.getrandbits(_ROOM_BITS)
            values = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
        members |= {name: encode_member(name, value) for name, value in values.items()}
        plan = LegPlan(members, members_to_strip(parsed, "request_id"))
        return plan, plan, name_sglang_sequences(parsed, request_id)


def plan_sglang(parsed: ParsedRequest, request_id: str) -> LegPlan:
    """Return the changes of a request for one instance, not a pair.

    They set the member ``rid``, the request's id, if the API has this member.
    """
    dropped = members_to_strip(parsed, "request_id")
    if not parsed.api.takes_rid:
        return LegPlan(NO_MEMBERS, dropped)
    ids = EngineIds("", request_id, parsed.num_prompts).list_ids()
    return LegPlan({"rid": encode_member("rid", ids if parsed.is_batch else ids[0])}, dropped)


def name_sglang_sequences(parsed: ParsedRequest, request_id: str) -> EngineIds | None:
    """Return the values of ``rid``, for an abort; None if the API has no ``rid``, so that no abort can be sent."""
    return EngineIds("", request_id, parsed.num_prompts) if parsed.api.takes_rid else None
