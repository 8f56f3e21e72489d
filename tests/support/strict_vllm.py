"""Simulated vLLM pairs that check each request of a router by the rules in the sources of vLLM 0.32.

A ``StrictVllm`` is a set of instances with one connector. For a request that violates a rule, the response is that of
vLLM, and the rule is recorded in ``violations``. At the end of a test, there must be none.

- NixlConnector: prefill's response has ``kv_transfer_params``, a lease. Decode accepts only parameters that prefill has
  sent, unchanged, once each, with prefill's ``X-Request-Id``, before the lease ends and while prefill's process runs.
- MooncakeConnector: the requests to prefill and decode have the same new ``transfer_id``, and may run at the same time.
  Decode's request has prefill's engine id and bootstrap server, and waits for prefill's request without a limit.
- ``kvstore``, our own: prefill's request has ``do_remote_decode``; otherwise prefill responds before its blocks are in
  the pool. Decode's request has no parameters. After prefill's response, decode finds the blocks in the pool.

``kv_transfer_params`` may also have ``prompt_token_ids``, with or without the parameters of a connector. All APIs
except completions use them as the prompt, in place of the messages (``renderers/online_renderer.py``). vLLM removes
them before a connector gets the other parameters.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.router.stand_in import Behaviour, Received, Responder, StandIn
from tests.support.toy_model import PATHS, Asked, PrefixCache, blocks_of

__all__ = ["Connector", "StrictVllm"]

Connector = Literal["nixl", "mooncake", "kvstore"]

PREFILL_PARAMS: dict[Connector, dict[str, Any]] = {
    "nixl": {"do_remote_decode": True, "do_remote_prefill": False},
    "mooncake": {"do_remote_decode": True, "do_remote_prefill": False},
}
NULLS = {"remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_request_id"}
# Members that a router may add or change, in addition to the parameters of the dialect.
ADDED = {"stream_options", "return_token_ids", "kv_transfer_params"}
CUT = {"stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "stop", "ignore_eos", "n"}
CUT |= {"stop_token_ids", "best_of", "background"}
# Members of other engines' dialects.
FOREIGN = {"disaggregate_info", "bootstrap_host", "bootstrap_port", "bootstrap_room"}


@dataclass
class _Given:
    """``kv_transfer_params`` that prefill has sent."""

    params: dict[str, Any]
    request_id: str
    instance: StandIn
    prompt: list[int]
    ends_at: float
    is_taken: bool = False
    is_gone: bool = False


@dataclass
class StrictVllm:
    """Simulated instances of vLLM with the same connector.

    Attributes:
        is_marked: with ``kvstore``, whether prefill's requests must have ``do_remote_decode``. False if the router does
            not know that the engine is vLLM.
        lease_s: seconds after which prefill frees KV that decode has not fetched.
        tells_prefill_cache: whether decode reports prefill's cached tokens, as 0.32 does, or the received ones.
        asked: the requests of clients, by the member ``number`` of the body; both instances must get all members.
        token_s: duration of a token.
        breaks: the numbers of events after which the next streams end, one for each stream.
        violations: violations of rules, one sentence each.
        alone: number of requests without parameters, which decode computed itself.
        transfers: number of requests whose KV was transferred from prefill to decode.
        prefill_cached: the cached tokens that prefill reported, by ``X-Request-Id``.
    """

    connector: Connector = "nixl"
    is_marked: bool = True
    lease_s: float = 30.0
    tells_prefill_cache: bool = True
    token_s: float = 0.0
    breaks: list[int] = field(default_factory=list)
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    alone: int = 0
    transfers: int = 0
    prefill_cached: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    _given: dict[str, _Given] = field(default_factory=dict)
    _engines: dict[str, tuple[StandIn, str]] = field(default_factory=dict)
    _bootstraps: dict[str, StandIn] = field(default_factory=dict)
    _sent: dict[str, tuple[StandIn, list[int]]] = field(default_factory=dict)
    _received: Counter[str] = field(default_factory=Counter)
    _request_ids: dict[str, str] = field(default_factory=dict)
    _pool: set[int] = field(default_factory=set)
    _caches: dict[str, PrefixCache] = field(default_factory=dict)

    def serve(self, instance: StandIn, bootstrap: StandIn | None = None) -> Behaviour:
        """Return the behaviour of ``instance``; for prefill with MooncakeConnector, ``bootstrap`` is its other port."""
        behave = {"prefill": self._prefills, "decode": self._decodes, "mixed": self._computes}[instance.role](instance)
        self._caches[instance.key] = PrefixCache()
        instance.extra_fields = {"engine": "vllm", "kv_connector": self.connector}
        self.restart(instance)
        if bootstrap is not None:
            instance.extra_fields["bootstrap_port"] = bootstrap.port
            self._bootstraps[instance.key] = bootstrap
            bootstrap.behave = self._tells_engine(instance)
        instance.behave = behave
        return behave

    def restart(self, instance: StandIn) -> None:
        """Restart the engine of ``instance``: all its leases end."""
        self._engines[instance.key] = (instance, str(uuid.uuid4()))
        for given in self._given.values():
            given.is_gone |= given.instance is instance
        self._caches[instance.key] = PrefixCache()

    @property
    def stranded(self) -> int:
        """The number of unused leases and of MooncakeConnector's requests without the other request."""
        leases = sum(not (given.is_taken or given.is_gone) for given in self._given.values())
        return leases + len(self._sent.keys() - set(self._received))

    def _prefills(self, instance: StandIn) -> Behaviour:
        async def behave(request: Received, respond: Responder) -> None:
            if (asked := await self._read(request, respond)) is None:
                return
            refusal = self._check_prefill(asked, request)
            if refusal:
                await _refuse(respond, refusal)
                return
            request_id = request.header("x-request-id") or ""
            params = _read_params(asked) or {}
            await self._compute(asked, 1)
            cached = self._caches[instance.key].take(asked.prompts[0])
            self.prefill_cached[request_id] = cached
            given = None
            if self.connector == "nixl":
                given = self._lease(asked, request_id, instance, cached)
            elif self.connector == "mooncake":
                self._sent[params["transfer_id"]] = instance, asked.prompts[0]
            else:
                self._pool.update(*map(blocks_of, asked.prompts))
            answer_id = f"{_prefix(asked)}{request_id}"
            await _answer(respond, asked.whole(answer_id, cached, asked.generate(), kv_transfer_params=given))

        return behave

    def _decodes(self, instance: StandIn) -> Behaviour:
        async def behave(request: Received, respond: Responder) -> None:
            if (asked := await self._read(request, respond)) is None:
                return
            self._check_unchanged(asked, ADDED)
            params = _read_params(asked)
            own = self._caches[instance.key].take(asked.prompts[0])
            cached = own
            if self.connector == "kvstore":
                if params is not None:
                    self.violations.append("decode: kv_transfer_params, but our connector has none")
                names = blocks_of(asked.prompts[0])
                found = next((at for at, name in enumerate(names) if name not in self._pool), len(names))
                self.transfers += bool(found)
                self.alone += not found
            elif params is None:
                self.alone += 1
            elif _is_several(asked):
                # The real engine fails with several prompts. Of several samples, only one may read the lease.
                self.violations.append("decode: kv_transfer_params with several prompts or samples")
                respond.cut()
                return
            else:
                failed = await (
                    self._fetch(params, asked, request)
                    if self.connector == "nixl"
                    else self._pull(params, asked, respond)
                )
                if respond.peer_left.is_set():
                    respond.keep_alive = False
                    return
                if failed:
                    self.violations += [failed] * (not failed.startswith("gone: "))
                    await _fail_load(asked, respond)
                    return
                self.transfers += 1
                told = params.get("remote_prefill_cached_tokens")
                cached = told if self.tells_prefill_cache and isinstance(told, int) else asked.prompt_tokens - 1
            await self._say(asked, request, respond, cached)

        return behave

    def _computes(self, instance: StandIn) -> Behaviour:
        async def behave(request: Received, respond: Responder) -> None:
            if (asked := await self._read(request, respond)) is None:
                return
            self._check_unchanged(asked, ADDED - {"kv_transfer_params"})
            cached = self._caches[instance.key].take(asked.prompts[0])
            await self._say(asked, request, respond, cached)

        return behave

    def _tells_engine(self, instance: StandIn) -> Behaviour:
        async def behave(request: Received, respond: Responder) -> None:
            if (request.method, request.target) != ("GET", "/query"):
                self.violations.append(f"bootstrap server: {request.method} {request.target}, not GET /query")
                await respond.answer(404, b"{}")
                return
            workers = {"0": {"0": f"tcp://127.0.0.1:{instance.port}"}}
            told = {"0": {"engine_id": self._engines[instance.key][1], "worker_addr": workers}}
            await _answer(respond, json.dumps(told).encode())

        return behave

    async def _read(self, request: Received, respond: Responder) -> Asked | None:
        """Return the request; None if it is not for generation and was answered here."""
        if request.target == "/version":
            await _answer(respond, b'{"version": "0.32.0"}')
            return None
        if request.target not in PATHS or request.method != "POST":
            self.violations.append(f"{request.method} {request.target}: vLLM has no such path for a router")
            await respond.answer(404, b'{"detail": "Not Found"}')
            return None
        body = request.json
        for name in FOREIGN & body.keys():
            self.violations.append(f"{name}: a member of another engine's dialect")
        refusal = ""
        if body.get("stream_options") and not body.get("stream"):
            refusal = "Stream options can only be defined when `stream=True`."
        elif (limit := Asked.read(request.target, body).limit) is not None and limit < 1:
            refusal = f"max_tokens must be at least 1, got {limit}."
        elif limit is not None and body.get("min_tokens", 0) > limit:
            refusal = f"min_tokens must be less than or equal to max_tokens={limit}, got {body['min_tokens']}."
        elif not _are_ids(_find_forwarded_ids(request.target, body)):
            refusal = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers."
        if refusal:
            self.violations.append(refusal)
            await _refuse(respond, refusal)
            return None
        return Asked.read(request.target, body)

    def _check_prefill(self, asked: Asked, request: Received) -> str:
        """Return the rule that the request violates; '' if none."""
        body, request_id = asked.body, request.header("x-request-id")
        params = _read_params(asked)
        broken = ""
        if asked.is_stream:
            broken = "stream is true: kv_transfer_params are told in whole answers only"
        elif "stream_options" in body or "min_tokens" in body:
            broken = "stream_options or min_tokens reached prefill"
        elif asked.limit != 1 or any(body[name] != 1 for name in asked.limit_names):
            broken = f"the limit is {asked.limit} ({', '.join(asked.limit_names)}), not 1"
        elif not request_id:
            broken = "no X-Request-Id"
        elif self.connector == "kvstore":
            mark = {"do_remote_decode": True} if self.is_marked else None
            broken = "" if params == mark else f"kv_transfer_params are {params}, not {mark}"
        elif _is_several(asked):
            broken = "several prompts or samples: only the first one's kv_transfer_params are told"
        elif not isinstance(params, dict):
            broken = f"kv_transfer_params is {params!r}"
        else:
            broken = self._check_prefill_params(params)
        if request_id in self._request_ids and request_id in self.prefill_cached:
            broken = f"X-Request-Id {request_id} used twice"
        self._request_ids[str(request_id)] = asked.path
        if broken:
            self.violations.append(f"prefill: {broken}")
        else:
            self._check_unchanged(asked, ADDED | CUT)
        return broken

    def _check_prefill_params(self, params: dict[str, Any]) -> str:
        rest = {name: value for name, value in params.items() if name not in PREFILL_PARAMS[self.connector]}
        if any(params.get(name) is not value for name, value in PREFILL_PARAMS[self.connector].items()):
            return f"kv_transfer_params do not say do_remote_decode: {params}"
        if self.connector == "nixl":
            return "" if rest.keys() <= NULLS and not any(rest.values()) else f"kv_transfer_params with {rest}"
        transfer_id = rest.pop("transfer_id", None)
        if not isinstance(transfer_id, str) or not transfer_id or rest:
            return f"kv_transfer_params are {params}, not a transfer_id and the two flags"
        if transfer_id in self._sent:
            return f"transfer_id {transfer_id} used twice"
        return ""

    def _check_unchanged(self, asked: Asked, free: set[str]) -> None:
        """Record differences between a request and that of its client."""
        client = self.asked.get(str(asked.body.get("number")))
        if client is None:
            return
        for name in (client.keys() | asked.body.keys()) - free:
            if client.get(name) != asked.body.get(name):
                self.violations.append(f"{name} was {client.get(name)!r}, and came as {asked.body.get(name)!r}")

    def _lease(self, asked: Asked, request_id: str, instance: StandIn, cached: int) -> dict[str, Any]:
        engine_request = f"{_prefix(asked)}{request_id}-{uuid.uuid4().hex[:8]}"
        count = -(-asked.prompt_tokens // 16)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, count + 1))],
            "remote_engine_id": self._engines[instance.key][1],
            "remote_request_id": engine_request,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": asked.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }
        self._given[engine_request] = _Given(
            copy.deepcopy(params), request_id, instance, asked.prompts[0], time.monotonic() + self.lease_s
        )
        return params

    async def _fetch(self, params: Any, asked: Asked, request: Received) -> str:
        """Fetch prefill's KV. Return '' or the reason for a failure, with ``gone:`` if no rule was violated."""
        given = self._given.get(params.get("remote_request_id", "")) if isinstance(params, dict) else None
        if given is None:
            return f"decode: kv_transfer_params that no prefill gave out: {params}"
        if params != given.params:
            return f"decode: kv_transfer_params were changed: {params}, given out as {given.params}"
        if given.is_taken:
            return f"decode: kv_transfer_params of {given.request_id} came twice"
        if asked.prompts[0] != given.prompt:
            return f"decode: the prompt of {given.request_id} is not the one that prefill computed"
        if request.header("x-request-id") != given.request_id:
            return f"decode: X-Request-Id {request.header('x-request-id')}, prefill's was {given.request_id}"
        if time.monotonic() > given.ends_at:
            return f"decode: came after the lease of {given.request_id} had ended"
        if given.is_gone or not given.instance.is_listening:
            return "gone: prefill died"
        given.is_taken = True
        return ""

    async def _pull(self, params: Any, asked: Asked, respond: Responder) -> str:
        """Fetch prefill's KV with MooncakeConnector, after prefill's request; return as ``_fetch`` does."""
        names = {"do_remote_decode", "do_remote_prefill", "transfer_id", "remote_engine_id", "remote_bootstrap_addr"}
        if not isinstance(params, dict) or params.keys() != names:
            return f"decode: kv_transfer_params are {params}, not {sorted(names)}"
        if params["do_remote_prefill"] is not True or params["do_remote_decode"] is not False:
            return f"decode: kv_transfer_params do not say do_remote_prefill: {params}"
        transfer_id = params["transfer_id"]
        self._received[transfer_id] += 1
        if self._received[transfer_id] > 1:
            return f"decode: transfer_id {transfer_id} used twice"
        addresses = {
            f"http://127.0.0.1:{bootstrap.port}": self._engines[key] for key, bootstrap in self._bootstraps.items()
        }
        if params["remote_bootstrap_addr"] not in addresses:
            return f"decode: nobody's bootstrap server is at {params['remote_bootstrap_addr']}"
        instance, engine = addresses[params["remote_bootstrap_addr"]]
        if engine != params["remote_engine_id"]:
            return f"gone: {params['remote_engine_id']} is no engine there now"
        self.waiting += 1
        try:
            while transfer_id not in self._sent:
                if respond.peer_left.is_set():
                    return "left"
                await asyncio.sleep(0.01)
        finally:
            self.waiting -= 1
        sender, prompt = self._sent[transfer_id]
        if sender is not instance:
            return f"decode: {transfer_id} was sent to another prefill"
        return "" if asked.prompts[0] == prompt else f"decode: the prompt of {transfer_id} is not prefill's"

    async def _compute(self, asked: Asked, tokens: int) -> None:
        await asyncio.sleep(self.token_s * tokens)

    async def _say(self, asked: Asked, request: Received, respond: Responder, cached: int) -> None:
        """Send the response token by token, until the client leaves."""
        answer_id = f"{_prefix(asked)}{request.header('x-request-id') or uuid.uuid4().hex}"
        choices = asked.generate()
        if not asked.is_stream:
            await self._compute(asked, max(map(len, choices)))
            if respond.peer_left.is_set():
                respond.keep_alive = False
                return
            await _answer(respond, asked.whole(answer_id, cached, choices))
            return
        await respond.start_stream("text/event-stream; charset=utf-8")
        breaks_after = self.breaks.pop(0) if self.breaks else None
        for number, event in enumerate(asked.events(answer_id, cached, choices)):
            if respond.peer_left.is_set() or number == breaks_after:
                respond.cut()
                return
            await respond.chunk(event.encode())
            await self._compute(asked, 1)
        await respond.end_stream()
        respond.succeeded = True


async def _fail_load(asked: Asked, respond: Responder) -> None:
    """Send vLLM's error for missing KV (``kv_load_failure_policy`` fail); in a stream, after the status 200."""
    error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    if not asked.is_stream:
        await respond.answer(500, json.dumps({"error": error}).encode(), ("content-type", "application/json"))
        return
    await respond.start_stream("text/event-stream; charset=utf-8")
    if asked.path == "/v1/chat/completions":
        await respond.chunk(next(asked.events("chatcmpl-failed", 0, [[]])).encode())
    await respond.event(json.dumps({"error": error}))
    await respond.event("[DONE]")
    await respond.end_stream()


async def _refuse(respond: Responder, sentence: str) -> None:
    error = {"message": sentence, "type": "BadRequestError", "param": None, "code": 400}
    await respond.answer(400, json.dumps({"error": error}).encode(), ("content-type", "application/json"))


async def _answer(respond: Responder, body: bytes) -> None:
    await respond.answer(200, body, ("content-type", "application/json"))


def _read_params(asked: Asked) -> Any:
    """Return ``kv_transfer_params`` as a connector gets them; None if there are none."""
    params = asked.body.get("kv_transfer_params")
    if asked.path == "/v1/completions" or not isinstance(params, dict) or "prompt_token_ids" not in params:
        return params
    return {name: value for name, value in params.items() if name != "prompt_token_ids"} or None


def _find_forwarded_ids(path: str, body: dict[str, Any]) -> Any:
    """Return the token ids that replace the messages; None if there are none."""
    params = body.get("kv_transfer_params")
    return params.get("prompt_token_ids") if path != "/v1/completions" and isinstance(params, dict) else None


def _are_ids(value: Any) -> bool:
    """Return whether vLLM accepts the ids, or there are none."""
    if value is None:
        return True
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def _is_several(asked: Asked) -> bool:
    return len(asked.prompts) > 1 or asked.samples > 1


def _prefix(asked: Asked) -> str:
    return {"/v1/completions": "cmpl-", "/v1/responses": "resp_"}.get(asked.path, "chatcmpl-")
