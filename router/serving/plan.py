"""The plan of an attempt: for each leg, how the client's request is changed for its instance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from router.fleet import EngineKind, Instance, KvConnector
from router.http import ApiError, ConnectionPool, ExchangeMaker, PreparedHead, RequestEnded, encode_member, splice_parts
from router.serving.attempt import Leg
from router.serving.dialects import (
    BootstrapServer,
    FastDeployPair,
    InOrderPair,
    KvstorePair,
    LegPlan,
    MooncakePair,
    NixlPair,
    NotAsPair,
    Pair,
    SglangPair,
    name_sglang_sequences,
    plan_by_header,
    plan_fastdeploy,
    plan_sglang,
)
from router.serving.reading.api import EngineIds
from router.serving.reading.parsed_request import ParsedRequest
from router.serving.resume import (
    CannotContinue,
    ResponseMerger,
    Resumption,
    StreamMerger,
    continue_stream,
    find_obstacle,
    needs_prompt,
    streams_token_ids,
)
from router.serving.selection import Selection

if TYPE_CHECKING:
    from router.telemetry import RequestTrace

__all__ = ["LegMaker", "Pairs", "UpstreamPlan", "list_members", "make_merger", "plan_requests", "request_usage"]

_Data: TypeAlias = "bytes | tuple[bytes, ...]"

MAX_PAIRS = 10_000
_VLLM_PAIRS: Mapping[KvConnector, Callable[[Instance, Instance], Pair]] = {
    KvConnector.NIXL: NixlPair,
    KvConnector.KVSTORE: KvstorePair,
}
# Engines that read a request's id from a header, and perhaps from the body.
_BY_HEADER = (EngineKind.VLLM, EngineKind.OPENAI)
_NOTHING = LegPlan({})
_PARAMS = "kv_transfer_params"


class Pairs:
    """The pairs that were created so far, by the keys of their instances."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Pair] = OrderedDict()
        # The bootstrap server of each prefill instance, which all its pairs use.
        self._bootstrap_servers: WeakValueDictionary[str, BootstrapServer] = WeakValueDictionary()

    def find_pair(self, prefill: Instance, decode: Instance) -> Pair:
        """Return the pair of two instances, which must be able to form one (``may_pair``)."""
        keys = (prefill.key, decode.key)
        known = self._known.get(keys)
        if known is not None:
            first, second = known.registrations
            if first is prefill.registration and second is decode.registration:
                return known
            if first == prefill.registration and second == decode.registration:  # a heartbeat
                known.registrations = prefill.registration, decode.registration
                return known
        if known is None and len(self._known) >= MAX_PAIRS:
            self._known.popitem(last=False)
        pair = self._known[keys] = self._make_pair(prefill, decode)
        return pair

    def forget_prefill(self, prefill: Instance) -> None:
        """Discard what is known about a prefill instance after a failed attempt, because it may have been restarted."""
        for keys in [keys for keys in self._known if keys[0] == prefill.key]:
            del self._known[keys]
        self._bootstrap_servers.pop(prefill.key, None)

    def _make_pair(self, prefill: Instance, decode: Instance) -> Pair:
        registration = prefill.registration
        if registration.engine is EngineKind.FASTDEPLOY:
            return FastDeployPair(prefill, decode)
        if registration.engine is EngineKind.SGLANG:
            return SglangPair(prefill, decode)
        if registration.engine is not EngineKind.VLLM:
            return InOrderPair(prefill, decode)
        if registration.kv_connector is KvConnector.MOONCAKE:
            return MooncakePair(prefill, decode, self._find_bootstrap_server(prefill))
        return _VLLM_PAIRS[registration.kv_connector](prefill, decode)

    def _find_bootstrap_server(self, prefill: Instance) -> BootstrapServer:
        server = BootstrapServer(prefill)
        known = self._bootstrap_servers.get(prefill.key)
        if known is None or known.address != server.address:
            known = self._bootstrap_servers[prefill.key] = server
        return known


class UpstreamPlan(NamedTuple):
    """The plan of an attempt: its instances, and for each leg the changes of the client's request."""

    selection: Selection
    pair: Pair | None
    answering: LegPlan
    prefill: LegPlan | None
    engine_ids: EngineIds | None
    """Ids with which the request is aborted at its engines; None if closing the connections is enough."""


def plan_requests(pairs: Pairs, selection: Selection, parsed: ParsedRequest, request_id: str) -> UpstreamPlan:
    """Return the plan for the selected instances. If the pair cannot serve the request, plan it for decode alone.

    Raises:
        RequestEnded: decode cannot serve the request alone, either.
        NotReady: the router must first query the id of prefill's engine.
    """
    if parsed.body is None:
        return UpstreamPlan(selection, None, _NOTHING, None, None)
    if selection.prefill is not None:
        pair = pairs.find_pair(selection.prefill, selection.answering)
        try:
            prefill, answering, engine_ids = pair.plan(parsed, request_id)
        except NotAsPair as exc:
            if not exc.decode_serves_alone:
                raise RequestEnded(ApiError(400, str(exc), "not_as_pair")) from None
            selection = selection._replace(prefill=None, decisions=selection.decisions[-1:])
        else:
            return UpstreamPlan(selection, pair, answering, prefill, engine_ids)
    answering, engine_ids = _plan_alone(selection.answering, parsed, request_id)
    return UpstreamPlan(selection, None, answering, None, engine_ids)


def _plan_alone(instance: Instance, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, EngineIds | None]:
    """Return the changes of a request for one instance, not a pair, and the ids with which it is aborted there.

    The ids are None if closing the connection is enough.
    """
    engine = instance.registration.engine
    if engine is EngineKind.FASTDEPLOY:
        return plan_fastdeploy(parsed, request_id), parsed.name_at_engines(request_id)
    if engine is EngineKind.SGLANG:
        return plan_sglang(parsed, request_id), name_sglang_sequences(parsed, request_id)
    return plan_by_header(parsed, request_id), None


def list_members(
    parsed: ParsedRequest,
    engine: EngineKind,
    merger: StreamMerger | ResponseMerger | None,
    resumption: Resumption | None,
    own_id: str = "",
) -> dict[str, bytes]:
    """Return the members that the body of each leg gets, in all dialects.

    Args:
        parsed: the request.
        engine: engine of the instance that generates the response.
        merger: merger of the response's segments; None if there is only one.
        resumption: state of the resumption if the response so far is to be continued; else None.
        own_id: the id of this attempt if clients have API keys, or if it is not ASCII; else ``""``. It replaces a
            ``request_id`` in the body, which could be the id of another client's request or of an earlier attempt.

    Raises:
        RequestEnded: this engine cannot continue the response.
    """
    members: dict[str, bytes] = {}
    if parsed.cache_salt:
        members["cache_salt"] = parsed.cache_salt
    if parsed.model:
        members["model"] = parsed.model
    if own_id and engine in _BY_HEADER and parsed.body is not None and "request_id" in parsed.body.members:
        members["request_id"] = encode_member("request_id", own_id)
    if merger is None:
        return members
    assert parsed.body is not None
    is_wanted = isinstance(merger, StreamMerger) and not parsed.body.members.get("return_token_ids")
    if is_wanted and (engine is EngineKind.FASTDEPLOY or streams_token_ids(engine, parsed.api.is_chat)):
        members["return_token_ids"] = b'"return_token_ids":true'
    if resumption is not None:
        continued = _continue_answer(merger, engine, resumption, is_chat=parsed.api.is_chat)
        members |= {name: encode_member(name, value) for name, value in continued.items()}
    return members


def request_usage(parsed: ParsedRequest, engine: EngineKind) -> tuple[dict[str, bytes], bool]:
    """Return the body member with which a stream reports its usage; empty if the stream does so anyway.

    The member is also left out if the engine might refuse it, or if it would change the meaning of the client's own
    options.

    Returns:
        The member, and whether the other events may have a null usage because of it.

    Raises:
        RequestEnded: the client's own options cannot be encoded again.
    """
    if parsed.body is None or not parsed.wants_stream or not parsed.api.is_continuable or engine is EngineKind.OPENAI:
        return {}, False
    options = parsed.body.members.get("stream_options")
    if options is None:
        options = {}
    elif not isinstance(options, dict) or options.get("include_usage", True) or options.get("continuous_usage_stats"):
        return {}, False
    try:
        member = encode_member("stream_options", {**options, "include_usage": True})
    except TypeError:
        message = "stream_options is nested too deeply or has a number out of range"
        raise RequestEnded(ApiError(400, message, "invalid_body", "stream_options")) from None
    return {"stream_options": member}, engine is not EngineKind.SGLANG  # SGLang always writes them


def make_merger(
    parsed: ParsedRequest, plan: UpstreamPlan, *, may_be_resumed: bool
) -> StreamMerger | ResponseMerger | None:
    """Return the merger of a response that several instances may generate in turn; None if only one instance generates
    it.

    Args:
        parsed: the request.
        plan: the plan of the first attempt.
        may_be_resumed: whether another instance may continue a stream if its instance dies.
    """
    body, engine, is_chat = parsed.body, plan.selection.answering.registration.engine, parsed.api.is_chat
    if body is None or not parsed.api.is_continuable:
        return None
    may_be_preempted = plan.pair is not None and plan.pair.merges_segments
    is_stream = parsed.wants_stream
    if not may_be_preempted and not (is_stream and may_be_resumed and not find_obstacle(body, engine, is_chat)):
        return None
    if not is_stream:
        return ResponseMerger(body)
    return StreamMerger(body, keeps_prompt=not may_be_preempted and needs_prompt(engine))


class LegMaker:
    """Creates the legs of one attempt."""

    __slots__ = ("_is_fresh", "_members", "_parsed", "_plan", "_sender", "_trace", "_upstream")

    def __init__(
        self,
        upstream: ConnectionPool,
        parsed: ParsedRequest,
        plan: UpstreamPlan,
        members: Mapping[str, bytes],
        is_fresh: bool,
        trace: RequestTrace | None,
        sender: ExchangeMaker,
    ) -> None:
        """
        Args:
            upstream: the connections to instances.
            parsed: the request.
            plan: the plan of the attempt.
            members: members that the body of each leg gets, in all dialects.
            is_fresh: whether each leg gets a new connection.
            trace: the trace of the request, so that the head of each leg names its span; None if it is not traced.
            sender: makes the exchange of the answering leg: ``upstream``, or the gateway from which the request came.
        """
        self._upstream, self._sender = upstream, sender
        self._parsed = parsed
        self._plan = plan
        self._members = members
        self._is_fresh = is_fresh
        self._trace = trace

    def make_legs(self) -> tuple[Leg, Leg | None]:
        """Return the answering leg and, in a pair, prefill's leg. Nothing is sent yet.

        If prefill comes first, the answering leg has no request until ``set_decode_request`` is called.
        """
        plan = self._plan
        selection, decisions = plan.selection, plan.selection.decisions
        data: _Data = ()
        if plan.pair is None or not plan.pair.is_prefill_first:
            data = self._encode_body(plan.answering, self._members)
        answering = self._make_leg(self._sender, selection.answering, plan.answering, data, decisions[-1].work)
        if selection.prefill is None or plan.prefill is None:
            return answering, None
        try:
            if plan.prefill is not plan.answering:
                data = self._encode_body(plan.prefill, self._cut_members(plan.prefill))
            return answering, self._make_leg(self._upstream, selection.prefill, plan.prefill, data, decisions[0].work)
        except BaseException:
            answering.finish()  # otherwise the load of its instance would include the leg permanently
            raise

    def set_decode_request(self, leg: Leg, answer: bytes) -> None:
        """Set the request of decode's leg, after prefill has responded."""
        plan = self._plan
        assert plan.pair is not None
        data = self._encode_body(plan.answering, _join(plan.pair.plan_decode(answer), self._members))
        head = self._add_to_head(plan.answering.head, leg.span_id)
        leg.exchange = self._sender.prepare_exchange(leg.instance.address, head, data, self._is_fresh)

    def _make_leg(self, sender: ExchangeMaker, instance: Instance, plan: LegPlan, data: _Data, work: float) -> Leg:
        span_id = 0 if self._trace is None else self._trace.make_span_id()
        head = self._add_to_head(plan.head, span_id) if plan.head or span_id else self._parsed.head
        exchange = sender.prepare_exchange(instance.address, head, data, self._is_fresh)
        return Leg(instance, exchange, self._parsed.features.prompt_tokens, work, span_id)

    def _add_to_head(self, lines: bytes, span_id: int) -> PreparedHead:
        head = self._parsed.head
        if self._trace is not None:
            lines += self._trace.make_head_line(span_id)
        return head._replace(start=head.start + lines)

    def _cut_members(self, plan: LegPlan) -> dict[str, bytes]:
        """Return the members that the router adds to the body of prefill's leg, in addition to those in ``plan``.

        Members that ``plan`` sets or drops are left out, and options of a stream. ``kv_transfer_params`` are returned
        anyway, because ``_encode_body`` merges them.
        """
        undone = {*plan.members, *plan.dropped, "return_token_ids", "stream_options"} - {_PARAMS}
        return {name: member for name, member in self._members.items() if name not in undone}

    def _encode_body(self, plan: LegPlan, members: Mapping[str, bytes]) -> _Data:
        body = self._parsed.body
        if body is None:
            return self._parsed.data
        added = {**plan.members, **members} if _PARAMS not in members else _join(plan.members, members)
        return splice_parts(body, added, plan.dropped)


def _join(first: Mapping[str, bytes], second: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the members of both mappings. If both have ``kv_transfer_params``, the parameters are merged."""
    joined = {**first, **second}
    if _PARAMS in first and _PARAMS in second:
        joined[_PARAMS] = first[_PARAMS][:-1] + b"," + second[_PARAMS].partition(b"{")[2]
    return joined


def _continue_answer(
    merger: StreamMerger | ResponseMerger, engine: EngineKind, resumption: Resumption, *, is_chat: bool
) -> Mapping[str, Any]:
    """Return the members with which an engine continues the response so far.

    Raises:
        RequestEnded: this engine cannot continue the response.
    """
    if isinstance(merger, ResponseMerger):
        return merger.resume_members()
    try:
        return continue_stream(merger, engine, is_chat)
    except CannotContinue as exc:
        raise RequestEnded(resumption.explain(str(exc))) from None
