"""vLLM: the legs of a pair have ``kv_transfer_params``, in a format that depends on the connector.

- Our own connector: prefill first, then decode finds the blocks in the pool. Prefill's request announces that decode
  follows (``do_remote_decode``), so that prefill responds when its blocks can be read. Decode's request has no such
  parameters.
- NixlConnector: prefill first. Prefill's response says where its blocks are, and the router copies this into decode's
  request. Prefill stores the blocks until decode fetches them, for at most 30 s.
- MooncakeConnector: both at the same time. Before, the router creates a ``transfer_id`` for both, and gets the id of
  prefill's engine from prefill's bootstrap server.

Source: vLLM 0.32, ``distributed/kv_transfer/kv_connector/v1`` and its example proxies; observed in runs of vLLM.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from typing import Any

import orjson

from router.fleet import Instance
from router.http import Address, ConnectFailed, ConnectionPool, UpstreamError, Usage, encode_member
from router.serving.dialects.dialect import (
    MIN_HANDED_OVER_TOKENS,
    NO_MEMBERS,
    LegPlan,
    NotAsPair,
    NotReady,
    Pair,
    members_to_strip,
    request_id_header,
)
from router.serving.dialects.in_order import InOrderPair, cut_to_one_token
from router.serving.reading.parsed_request import ParsedRequest

__all__ = ["KvstorePair", "MooncakePair", "NixlPair"]

QUERY_SECONDS = 5.0

_TO_REMOTE_DECODE = encode_member(
    "kv_transfer_params",
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
)

_BEFORE_DECODE = {"kv_transfer_params": encode_member("kv_transfer_params", {"do_remote_decode": True})}

_PARAMS = re.compile(rb'"kv_transfer_params"\s*:\s*\{')


class KvstorePair(InOrderPair):
    """Sends prefill's request first. Prefill responds when its blocks are in the pool; decode's request follows."""

    def plan(self, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, LegPlan, None]:
        prefill, decode, ids = super().plan(parsed, request_id)
        return prefill._replace(members={**prefill.members, **_BEFORE_DECODE}), decode, ids


class NixlPair(Pair):
    """Sends prefill's request first. Decode fetches the blocks that prefill's response names."""

    is_prefill_first = True
    may_err_late = True

    def plan(self, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, LegPlan, None]:
        _require_one_sequence(parsed)
        head = request_id_header(parsed, request_id)
        prefill = cut_to_one_token(parsed, head)
        members = {**prefill.members, "kv_transfer_params": _TO_REMOTE_DECODE}
        return prefill._replace(members=members), LegPlan(NO_MEMBERS, members_to_strip(parsed), head), None

    def plan_decode(self, answer: bytes) -> Mapping[str, bytes]:
        try:
            params = orjson.loads(answer)["kv_transfer_params"]
        except (ValueError, KeyError, TypeError):
            params = None
        # Without parameters (for example if the prompt is shorter than a block), decode computes the prompt.
        return {"kv_transfer_params": encode_member("kv_transfer_params", params)} if params else NO_MEMBERS

    def find_lost_hand_over(self, answer: bytes, prefill: Usage, decode: Usage) -> str:
        if _PARAMS.search(answer) or (prefill.prompt_tokens or 0) < MIN_HANDED_OVER_TOKENS:
            return ""
        return "prefill's response has no kv_transfer_params; start prefill with NixlConnector"


class BootstrapServer:
    """The bootstrap server of a prefill instance with MooncakeConnector, which reports the ids of its engines.

    All pairs with this prefill instance share this object.
    """

    def __init__(self, prefill: Instance) -> None:
        self.address = Address(prefill.address.host, prefill.registration.bootstrap_port)
        self.engines: dict[str, str] = {}
        """The ids of prefill's engines, by data-parallel rank; empty until they are learned."""
        self._learning: asyncio.Task[str] | None = None

    async def learn_engines(self, upstream: ConnectionPool) -> None:
        """Query the ids of the engines. Requests that wait for them at the same time share one query.

        Raises:
            ConnectFailed: the server does not report the ids.
        """
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._query_engines(upstream))
        if trouble := await asyncio.shield(self._learning):
            raise ConnectFailed(trouble)

    async def _query_engines(self, upstream: ConnectionPool) -> str:
        """Query the ids of the engines. Return why the server does not report them; ``""`` if it does."""
        no_server = f"{self.address} reports no engine id at /query, so it is not a bootstrap server"
        try:
            response = await upstream.fetch(self.address, "GET", "/query", timeout=QUERY_SECONDS)
            ranks = orjson.loads(response.body)
            self.engines = {rank: str(ranks[rank]["engine_id"]) for rank in ranks}
        except UpstreamError as exc:
            return str(exc)
        except (ValueError, KeyError, TypeError):
            return no_server
        return "" if self.engines else no_server


class MooncakePair(Pair):
    """Sends both requests together. Decode waits for the blocks that prefill sends under the same ``transfer_id``."""

    may_err_late = True

    def __init__(self, prefill: Instance, decode: Instance, bootstrap: BootstrapServer) -> None:
        super().__init__(prefill, decode)
        self._bootstrap = bootstrap

    def plan(self, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, LegPlan, None]:
        _require_one_sequence(parsed)
        if parsed.api.may_end_early:
            message = "this API has no ignore_eos: prefill transfers no KV if its only token ends the response"
            raise NotAsPair(message, decode_serves_alone=True)
        engines = self._bootstrap.engines
        if not engines:
            raise NotReady(self._bootstrap.learn_engines)
        rank = random.choice(list(engines))
        head = request_id_header(parsed, request_id)
        transfer = {"transfer_id": f"{random.getrandbits(128):032x}"}
        sends = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
        fetches = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            **transfer,
            "remote_engine_id": engines[rank],
            "remote_bootstrap_addr": self._bootstrap.address.url,
        }
        prefill_head = head if len(engines) == 1 else head + b"x-data-parallel-rank: %s\r\n" % rank.encode()
        prefill = cut_to_one_token(parsed, prefill_head)
        members = {**prefill.members, "ignore_eos": b'"ignore_eos":true', **_encode_params(sends)}
        dropped = [*prefill.dropped, "stop_token_ids"]
        decode = LegPlan(_encode_params(fetches), members_to_strip(parsed), head)
        return LegPlan(members, dropped, prefill_head), decode, None


def _encode_params(params: dict[str, Any]) -> dict[str, bytes]:
    return {"kv_transfer_params": encode_member("kv_transfer_params", params)}


def _require_one_sequence(parsed: ParsedRequest) -> None:
    """Raise ``NotAsPair`` for several sequences: vLLM 0.32 transfers only the first sequence, and decode fails."""
    assert parsed.body is not None
    embedded = parsed.body.members.get("prompt_embeds")  # prompts in addition to those in ``prompt``
    embeds_several = isinstance(embedded, list) or (embedded and parsed.body.members.get("prompt"))
    if parsed.samples > 1 or parsed.num_prompts > 1 or embeds_several:
        raise NotAsPair("the request is for several answers", decode_serves_alone=True)
