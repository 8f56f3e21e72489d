"""Figures of the router, of instances and of the pool's masters, read from their own accounts; nothing here asks them.

Counters grow for as long as their process lives; ``history`` takes their growth from two looks at them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvcommon.mooncake import Segment, read_segment
from router.console.client import Sample

__all__ = [
    "COMPUTED",
    "HANDED_OVER",
    "ORIGINS",
    "OWN_CACHE",
    "POOL",
    "InstanceFigures",
    "Listed",
    "MasterFigures",
    "RouterFigures",
    "read_instance_figures",
    "read_listed",
    "read_loads",
    "read_master_figures",
    "read_router_figures",
    "read_segments",
]

OWN_CACHE, POOL, HANDED_OVER, COMPUTED = ORIGINS = ("own_cache", "pool", "handed_over", "computed")
"""Where the KV of a prompt's token can come from."""

Samples = Mapping[str, Sequence[Sample]]

# Our engine and FastDeploy, vLLM, SGLang: the same figure under their names, of which an instance has one at most.
_PROMPT = ("fastdeploy:prompt_tokens_total", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_OWN = (
    *("fastdeploy:prefix_gpu_cache_token_num_total", "vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "fastdeploy:prefix_gpu_cache_token_num",
)
_VLLM_OUTSIDE = "vllm:external_prefix_cache_hits_total"
_POOL = ("kvstore_pool_cached_tokens_total", _VLLM_OUTSIDE)
_GENERATED = ("fastdeploy:generation_tokens_total", "vllm:generation_tokens_total", "sglang:generation_tokens_total")
_RUNNING = ("fastdeploy:num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("fastdeploy:num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("fastdeploy:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "sglang:token_usage")


class Listed(NamedTuple):
    """An instance as the router lists it."""

    key: str
    """``host:port``."""
    role: str
    metrics_url: str
    state: str = ""
    """``""`` where the router does not tell: it wants its admin token."""
    trouble: str = ""
    breaker: str = "closed"
    weight: float | None = None
    running: int = 0
    """Requests, as the router counts them."""
    running_tokens: int = 0
    engine: str = ""
    kv_connector: str = ""
    """How a pair of vLLM's hands KV over; ``""`` where the router does not tell."""
    models: tuple[str, ...] = ()


def describe_loss(listed: Sequence[Listed], drained: Collection[str]) -> str:
    """A sentence on roles of models that no instance would take requests for, were these drained; empty: there is none.

    Args:
        listed: all instances.
        drained: their keys.
    """
    open_to_requests = [each for each in listed if each.state == "healthy"]
    before = {(each.role, model) for each in open_to_requests for model in each.models or ("",)}
    left = [each for each in open_to_requests if each.key not in drained]
    lost = before - {(each.role, model) for each in left for model in each.models or ("",)}
    told = sorted(f"no {role} instance{f' of {model}' if model else ''}" for role, model in lost)
    return f"{' and '.join(told)} would take requests any more" if told else ""


class RouterFigures(NamedTuple):
    """The figures on ``/metrics`` of the router; counters but for ``running`` and ``queued``."""

    answers: Mapping[str, float]
    """Requests by the status of their answers."""
    first_token: Mapping[float, float]
    """Streams whose first token came within so many seconds."""
    output_token: Mapping[float, float]
    """Streams whose later tokens took so many seconds each."""
    tokens: Mapping[str, float]
    retries: Mapping[str, float]
    """Attempts that failed, by instance."""
    resumptions: Mapping[str, float]
    """Streams taken over from an instance that failed."""
    running: float
    queued: float


class InstanceFigures(NamedTuple):
    """The figures on ``/metrics`` of an instance; None for those that are not there."""

    origins: Mapping[str, float] | None
    """Counters: prompt tokens by where their KV came from."""
    generated: float | None
    running: float | None
    waiting: float | None
    memory_used: float | None
    """The share of its KV blocks that are held, 0 to 1."""
    pool_open: bool | None
    """Whether it has joined the pool."""
    pool_paused: bool
    """Whether it leaves the pool alone for a while, because calls failed."""
    looked_up: Mapping[str, float]
    """Counters: blocks looked up in the pool, by ``ok``, ``absent``, ``failed``."""
    moved_bytes: Mapping[str, float]
    """Counters: bytes put into the pool and read from it, by ``put`` and ``get``."""
    rejected: float
    """Counter: blocks whose bytes did not verify."""


class MasterFigures(NamedTuple):
    """The figures of a ``mooncake_master``."""

    role: str
    """``leader`` or ``standby``."""
    serves: bool
    leader: str
    """The leader's address, where this one follows; ``""`` if it does not say."""
    capacity: float
    used: float
    keys: float
    clients: float
    evicted_keys: float
    evicted_bytes: float
    refused_writes: float
    reads: float
    reads_found: float
    file_capacity: float
    file_used: float
    segments: tuple[Segment, ...] = ()

    @property
    def counters(self) -> Mapping[str, float]:
        """Those figures that only grow."""
        return {
            "evicted_keys": self.evicted_keys,
            "evicted_bytes": self.evicted_bytes,
            "refused_writes": self.refused_writes,
            "reads": self.reads,
            "reads_found": self.reads_found,
        }


def read_router_figures(samples: Samples) -> RouterFigures:
    """The figures of the router's ``/metrics``."""
    return RouterFigures(
        answers=_sum_by(samples.get("http_requests_total", ()), "status_code"),
        first_token=_read_buckets(samples, "router_time_to_first_token_seconds"),
        output_token=_read_buckets(samples, "router_time_per_output_token_seconds"),
        tokens=_sum_by(samples.get("router_tokens_total", ()), "kind"),
        retries=_sum_by(samples.get("router_retries_total", ()), "instance"),
        resumptions=_sum_by(samples.get("router_resumptions_total", ()), "instance"),
        running=_sum_all(samples, ("router_running_requests",)) or 0.0,
        queued=_sum_all(samples, ("router_queued_requests",)) or 0.0,
    )


def read_loads(samples: Samples) -> list[Listed]:
    """The instances as the router's ``/metrics`` names them, to anybody who asks: less than ``/registered`` does."""
    breakers = {each.labels.get("instance", ""): each.value for each in samples.get("router_instance_breaker_open", ())}
    openness = {0.0: "closed", 0.5: "half_open", 1.0: "open"}
    found = []
    for each in samples.get("router_instance_requests", ()):
        key = each.labels.get("instance", "")
        found.append(
            Listed(
                key,
                each.labels.get("role", "mixed"),
                f"http://{key}/metrics",
                breaker=openness.get(breakers.get(key, 0.0), "closed"),
                running=int(each.value),
            )
        )
    return found


def read_listed(entry: Mapping[str, Any]) -> Listed:
    """An entry of the router's ``/registered``."""
    url = str(entry["url"])
    host = url.rpartition(":")[0]
    return Listed(
        key=url.rpartition("://")[2],
        role=str(entry["role"]),
        metrics_url=f"{host}:{entry.get('metrics_port') or url.rpartition(':')[2]}/metrics",
        state=str(entry.get("state", "")),
        trouble=str(entry.get("trouble") or ""),
        breaker=str(entry.get("breaker", "closed")),
        weight=float(entry.get("weight", 1.0)),
        running=int(entry.get("running_requests", 0)),
        running_tokens=int(entry.get("running_tokens", 0)),
        engine=str(entry.get("engine", "")),
        kv_connector=str(entry.get("kv_connector") or ""),
        models=tuple(map(str, entry.get("models") or ())),
    )


def read_instance_figures(samples: Samples, listed: Listed) -> InstanceFigures:
    """The figures of an instance's ``/metrics``, of any of the engines."""
    joined = _sum_all(samples, ("kvstore_pool_open",))
    blocks = [each for each in samples.get("kvstore_blocks_total", ()) if each.labels.get("operation") == "exists"]
    return InstanceFigures(
        origins=_read_origins(samples, takes_over=_takes_over(samples, listed)),
        generated=_sum_all(samples, _GENERATED),
        running=_sum_all(samples, _RUNNING),
        waiting=_sum_all(samples, _WAITING),
        memory_used=_sum_all(samples, _USAGE),
        pool_open=None if joined is None else joined > 0,
        pool_paused=(_sum_all(samples, ("kvstore_breaker_open",)) or 0.0) > 0,
        looked_up=_sum_by(blocks, "status"),
        moved_bytes=_sum_by(samples.get("kvstore_bytes_total", ()), "operation"),
        rejected=_sum_all(samples, ("kvstore_rejected_blocks_total",)) or 0.0,
    )


def read_master_figures(
    health: Mapping[str, Any], figures: Mapping[str, float], segments: Sequence[Segment] = ()
) -> MasterFigures:
    """The figures of a master's ``/health``, ``/metrics`` and ``/get_segments_detail``."""

    def find_figure(name: str) -> float:
        return figures.get(name, 0.0)

    return MasterFigures(
        role=str(health.get("role", "")),
        serves=bool(health.get("service_ready", True)),
        leader=str(health.get("leader_address") or ""),
        capacity=find_figure("master_total_capacity_bytes"),
        used=find_figure("master_allocated_bytes"),
        keys=find_figure("master_key_count"),
        clients=find_figure("master_active_clients"),
        evicted_keys=find_figure("master_evicted_key_count"),
        evicted_bytes=find_figure("master_evicted_size_bytes"),
        refused_writes=find_figure("master_put_start_alloc_failures_total"),
        reads=find_figure("total_get_nums_"),
        reads_found=find_figure("valid_get_nums_"),
        file_capacity=find_figure("master_total_file_capacity_bytes"),
        file_used=find_figure("master_allocated_file_size_bytes"),
        segments=tuple(segments),
    )


def read_segments(page: Mapping[str, Any]) -> list[Segment]:
    """The entries of a master's ``/get_segments_detail``; those that lack a figure are left out."""
    found = []
    for each in page.get("segments", ()):
        try:
            found.append(read_segment(each))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _read_origins(samples: Samples, *, takes_over: bool) -> dict[str, float] | None:
    """Prompt tokens by their origin.

    Args:
        takes_over: whether tokens that came from outside were handed over, and not read from the pool.
    """
    if told := samples.get("kvstore_prompt_tokens_total"):
        by_origin = _sum_by(told, "origin")
        return {origin: by_origin.get(origin, 0.0) for origin in ORIGINS}
    prompt = _sum_all(samples, _PROMPT)
    if prompt is None:
        return None
    own, outside = _sum_all(samples, _OWN) or 0.0, _sum_all(samples, _POOL) or 0.0
    pool, handed_over = (0.0, outside) if takes_over else (outside, 0.0)
    return {OWN_CACHE: own, POOL: pool, HANDED_OVER: handed_over, COMPUTED: max(0.0, prompt - own - outside)}


def _takes_over(samples: Samples, listed: Listed) -> bool:
    """Whether it is a decode instance of vLLM that gets prompts from its prefill instance, not by way of the pool.

    vLLM counts both as hits outside. Of an instance that has a connector for each, all are said to be handed over: the
    prefill instance gives it all that it has not cached itself.
    """
    if listed.role != "decode" or not samples.get(_VLLM_OUTSIDE):
        return False
    if listed.kv_connector:
        return listed.kv_connector != "kvstore"
    return "vllm:kvstore_blocks_total" not in samples


def _read_buckets(samples: Samples, name: str) -> dict[float, float]:
    by_bound = _sum_by(samples.get(f"{name}_bucket", ()), "le")
    return {float(bound): count for bound, count in by_bound.items()}


def _sum_by(samples: Iterable[Sample], label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for each in samples:
        key = each.labels.get(label, "")
        sums[key] = sums.get(key, 0.0) + each.value
    return sums


def _sum_all(samples: Samples, names: Iterable[str]) -> float | None:
    """The sum of all samples of the first of ``names`` that there are any of."""
    for name in names:
        if found := samples.get(name):
            return sum(each.value for each in found)
    return None
