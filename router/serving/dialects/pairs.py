"""Pairs: the ``Pair`` object for two instances, created once; and the changes for a single instance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from weakref import WeakValueDictionary

from router.fleet import EngineKind, Instance, KvConnector
from router.serving.dialects.dialect import LegPlan, Pair
from router.serving.dialects.fastdeploy import FastDeployPair, plan_fastdeploy
from router.serving.dialects.in_order import InOrderPair, plan_by_header
from router.serving.dialects.sglang import SglangPair, name_sglang_sequences, plan_sglang
from router.serving.dialects.vllm import BootstrapServer, KvstorePair, MooncakePair, NixlPair
from router.serving.reading.api import EngineIds
from router.serving.reading.parsed_request import ParsedRequest

__all__ = ["Pairs", "plan_alone"]

MAX_PAIRS = 10_000
_VLLM_PAIRS: Mapping[KvConnector, Callable[[Instance, Instance], Pair]] = {
    KvConnector.NIXL: NixlPair,
    KvConnector.KVSTORE: KvstorePair,
}


class Pairs:
    """The pairs created so far, by the keys of their instances."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Pair] = OrderedDict()
        # By prefill instance, the bootstrap servers that its pairs use.
        self._bootstrap_servers: WeakValueDictionary[str, BootstrapServer] = WeakValueDictionary()

    def find_pair(self, prefill: Instance, decode: Instance) -> Pair:
        """Return the pair of these two, which ``may_pair`` has allowed."""
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
        """Discard all facts about this instance after a failed attempt, because it may have been restarted."""
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
        told = BootstrapServer(prefill)
        known = self._bootstrap_servers.get(prefill.key)
        if known is None or known.address != told.address:
            known = self._bootstrap_servers[prefill.key] = told
        return known


def plan_alone(instance: Instance, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, EngineIds | None]:
    """Return the changes for an instance without partner, and the ids by which the request is aborted there, if any."""
    engine = instance.registration.engine
    if engine is EngineKind.FASTDEPLOY:
        return plan_fastdeploy(parsed, request_id), parsed.name_at_engines(request_id)
    if engine is EngineKind.SGLANG:
        return plan_sglang(parsed, request_id), name_sglang_sequences(parsed, request_id)
    return plan_by_header(parsed, request_id), None
