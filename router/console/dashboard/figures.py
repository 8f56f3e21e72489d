"""Converts metrics of the router, of instances and of the pool's masters to plain data. Sends no requests.

A counter increases during the lifetime of its process. ``history`` computes the increase between two polls.
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
"""The possible origins of the KV of a prompt token."""

Samples = Mapping[str, Sequence[Sample]]

# The names of one metric in FastDeploy and our engine, in vLLM, and in SGLang. An instance reports at most one of them.
_PROMPT = ("fastdeploy:prompt_tokens_total", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_OWN = (
    *("fastdeploy:prefix_gpu_cache_token_num_total", "vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "fastdeploy:prefix_gpu_cache_token_num",
)
_VLLM_OUTSIDE = "vllm:external_prefix_cache_hits_total"
_POOL = ("kvstore_pool_cached_tokens_total", _VLLM_OUTSIDE)
_GENERATED = ("fastdeploy:generation_tokens_total", "vllm:generation_tokens_total", "sglang:generation_tokens_total")
_FIRST_TOKEN = tuple(f"{engine}:time_to_first_token_seconds" for engine in ("fastdeploy", "vllm", "sglang"))
_RUNNING = ("fastdeploy:num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("fastdeploy:num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("fastdeploy:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", "sglang:token_usage")


class Listed(NamedTuple):
    """An instance, as the router's ``/registered`` or ``/metrics`` describes it."""

    key: str
    """Address of the instance as ``host:port``."""
    role: str
    metrics_url: str
    state: str = ""
    """State of the instance; ``""`` if unknown, because the router reports it only to a client with its admin token."""
    trouble: str = ""
    breaker: str = "closed"
    weight: float | None = None
    running: int = 0
    """Number of running requests that the router has sent to the instance."""
    running_tokens: int = 0
    engine: str = ""
    kv_connector: str = ""
    """How a pair of vLLM instances transfers KV; ``""`` if unknown."""
    models: tuple[str, ...] = ()


def describe_loss(listed: Sequence[Listed], drained: Collection[str]) -> str:
    """Return a sentence that names the roles and models without a usable instance after a drain; ``""`` if there are
    none.

    Args:
        listed: all instances.
        drained: keys of the instances to drain.
    """
    open_to_requests = [each for each in listed if each.state == "healthy"]
    before = {(each.role, model) for each in open_to_requests for model in each.models or ("",)}
    left = [each for each in open_to_requests if each.key not in drained]
    lost = before - {(each.role, model) for each in left for model in each.models or ("",)}
    missing = sorted(f"no {role} instance{f' of {model}' if model else ''}" for role, model in lost)
    return f"{' and '.join(missing)} would take requests any more" if missing else ""


class RouterFigures(NamedTuple):
    """Values from the router's ``/metrics``: counters, except ``running`` and ``queued``."""

    answers: Mapping[str, float]
    """Number of requests, by the status of the response."""
    first_token: Mapping[float, float]
    """For each bound in seconds, the number of streams whose first token came within this time."""
    output_token: Mapping[float, float]
    """For each bound in seconds, the number of streams whose mean time per further token was within this time."""
    retries: Mapping[str, float]
    """Number of failed attempts, by instance."""
    resumptions: Mapping[str, float]
    """Number of streams that another instance continued, by the instance that failed."""
    running: float
    queued: float


class InstanceFigures(NamedTuple):
    """Values from an instance's ``/metrics``. A value that the instance does not report is None, 0 or empty."""

    origins: Mapping[str, float] | None
    """Counters of prompt tokens, by the origin of their KV."""
    generated: float | None
    running: float | None
    waiting: float | None
    memory_used: float | None
    """Fraction of the instance's KV blocks that are in use, from 0 to 1."""
    pool_open: bool | None
    """Whether the instance has joined the pool."""
    pool_paused: bool
    """Whether the instance does not use the pool at present, because calls to it failed."""
    looked_up: Mapping[str, float]
    """Counters of blocks that were looked up in the pool, by result: ``ok``, ``absent``, ``failed``."""
    moved_bytes: Mapping[str, float]
    """Counters of bytes that were written to the pool (``put``) and read from it (``get``)."""
    rejected: float
    """Counter of blocks from the pool whose checksum was wrong."""
    first_tokens: float = 0.0
    """Counter of requests with a first token."""
    first_token_seconds: float = 0.0
    """Sum of the times to first token, in seconds, of the requests that ``first_tokens`` counts."""


class MasterFigures(NamedTuple):
    """Values that a ``mooncake_master`` reports."""

    role: str
    """Role of the master: ``leader`` or ``standby``."""
    serves: bool
    """Whether the master serves requests at present."""
    leader: str
    """Address of the leader that this master follows; ``""`` if it is unknown."""
    capacity: float
    used: float
    keys: float
    clients: float
    evicted: float
    """Counter of the blocks that the master has evicted."""
    segments: tuple[Segment, ...] = ()


def read_router_figures(samples: Samples) -> RouterFigures:
    """Return the values from the samples of the router's ``/metrics``."""
    return RouterFigures(
        answers=_sum_by(samples.get("http_requests_total", ()), "status_code"),
        first_token=_read_buckets(samples, "router_time_to_first_token_seconds"),
        output_token=_read_buckets(samples, "router_time_per_output_token_seconds"),
        retries=_sum_by(samples.get("router_retries_total", ()), "instance"),
        resumptions=_sum_by(samples.get("router_resumptions_total", ()), "instance"),
        running=_sum_all(samples, ("router_running_requests",)) or 0.0,
        queued=_sum_all(samples, ("router_queued_requests",)) or 0.0,
    )


def read_loads(samples: Samples) -> list[Listed]:
    """Return the instances from the samples of the router's ``/metrics``.

    ``/metrics`` says less about instances than ``/registered``, but needs no token.
    """
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
    """Parse an entry of the router's ``/registered``."""
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
    """Return the values from the samples of an instance's ``/metrics``, for any engine."""
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
        first_tokens=_sum_all(samples, [f"{name}_count" for name in _FIRST_TOKEN]) or 0.0,
        first_token_seconds=_sum_all(samples, [f"{name}_sum" for name in _FIRST_TOKEN]) or 0.0,
    )


def read_master_figures(
    health: Mapping[str, Any], figures: Mapping[str, float], segments: Sequence[Segment] = ()
) -> MasterFigures:
    """Return the values from a master's ``/health``, ``/metrics`` and ``/get_segments_detail``."""
    return MasterFigures(
        role=str(health.get("role", "")),
        serves=bool(health.get("service_ready", True)),
        leader=str(health.get("leader_address") or ""),
        capacity=figures.get("master_total_capacity_bytes", 0.0),
        used=figures.get("master_allocated_bytes", 0.0),
        keys=figures.get("master_key_count", 0.0),
        clients=figures.get("master_active_clients", 0.0),
        evicted=figures.get("master_evicted_key_count", 0.0),
        segments=tuple(segments),
    )


def read_segments(page: Mapping[str, Any]) -> list[Segment]:
    """Parse the entries of a master's ``/get_segments_detail``. Incomplete entries are skipped."""
    found = []
    for each in page.get("segments", ()):
        try:
            found.append(read_segment(each))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _read_origins(samples: Samples, *, takes_over: bool) -> dict[str, float] | None:
    """Return the number of prompt tokens by origin; None if the instance does not report its prompt tokens.

    Args:
        takes_over: whether the instance gets KV from a prefill instance, not from the pool.
    """
    if counted := samples.get("kvstore_prompt_tokens_total"):
        by_origin = _sum_by(counted, "origin")
        return {origin: by_origin.get(origin, 0.0) for origin in ORIGINS}
    prompt = _sum_all(samples, _PROMPT)
    if prompt is None:
        return None
    own, outside = _sum_all(samples, _OWN) or 0.0, _sum_all(samples, _POOL) or 0.0
    # SGLang counts the tokens from all caches; recent versions say how many of them are from its storage, the pool.
    storage = _sum_by(samples.get("sglang:cached_tokens_total", ()), "cache_source").get("storage", 0.0)
    own, outside = own - storage, outside + storage
    pool, handed_over = (0.0, outside) if takes_over else (outside, 0.0)
    return {OWN_CACHE: own, POOL: pool, HANDED_OVER: handed_over, COMPUTED: max(0.0, prompt - own - outside)}


def _takes_over(samples: Samples, listed: Listed) -> bool:
    """Return whether this is a decode instance of vLLM that gets KV from its prefill instance, not from the pool.

    vLLM counts tokens from both sources as external hits. If an instance has a connector for the pool and a connector
    for a pair, all external hits count as transferred, because the prefill instance sends everything that the decode
    instance has not cached.
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
    """Return the sum of all samples of the first name that has samples; None if no name has samples."""
    for name in names:
        if found := samples.get(name):
            return sum(each.value for each in found)
    return None
