"""Figures are read from the metrics of routers, of each engine's instances, and of masters."""

from __future__ import annotations

import pytest

from kvcommon.mooncake import parse_plain_metrics
from router.console.client import parse_samples
from router.console.dashboard.figures import (
    Listed,
    read_instance_figures,
    read_listed,
    read_loads,
    read_master_figures,
    read_router_figures,
    read_segments,
)

MIXED = Listed("10.0.0.1:1", "mixed", "")
ROUTER = """
http_requests_total{method="POST",endpoint="/v1/chat/completions",status_code="200"} 7
http_requests_total{method="GET",endpoint="other",status_code="200"} 1
http_requests_total{method="POST",endpoint="/v1/chat/completions",status_code="503"} 2
router_time_to_first_token_seconds_bucket{le="0.1"} 3
router_time_to_first_token_seconds_bucket{le="+Inf"} 4
router_tokens_total{kind="prompt"} 100
router_retries_total{instance="10.0.0.1:1"} 2
router_running_requests 3
router_queued_requests 1
router_instance_requests{role="prefill",instance="10.0.0.1:1"} 2
router_instance_breaker_open{role="prefill",instance="10.0.0.1:1"} 0.5
"""


def test_responses_of_a_router_are_counted_by_status_and_streams_by_time() -> None:
    figures = read_router_figures(parse_samples(ROUTER))
    assert figures.answers == {"200": 8, "503": 2}
    assert figures.first_token == {0.1: 3, float("inf"): 4}
    assert (figures.output_token, figures.retries) == ({}, {"10.0.0.1:1": 2})
    assert (figures.running, figures.queued) == (3, 1)


def test_loads_are_read_without_the_list_of_instances() -> None:
    (load,) = read_loads(parse_samples(ROUTER))
    assert load[:3] == ("10.0.0.1:1", "prefill", "http://10.0.0.1:1/metrics")
    assert (load.state, load.breaker, load.running) == ("", "half_open", 2)


def test_the_url_of_an_instances_metrics_follows_from_its_registration() -> None:
    listed = read_listed({"url": "https://[::1]:8000", "role": "decode", "metrics_port": "9000", "weight": 0.5})
    assert (listed.key, listed.metrics_url, listed.weight) == ("[::1]:8000", "https://[::1]:9000/metrics", 0.5)


@pytest.mark.parametrize(
    ("page", "origins"),
    [
        (
            'kvstore_prompt_tokens_total{origin="pool"} 64\nkvstore_prompt_tokens_total{origin="computed"} 6\n'
            "fastdeploy:prompt_tokens_total 1000\n",
            {"own_cache": 0, "pool": 64, "handed_over": 0, "computed": 6},
        ),
        (
            "fastdeploy:prompt_tokens_total 100\nfastdeploy:prefix_gpu_cache_token_num_total 32\n"
            "kvstore_pool_cached_tokens_total 8\n",
            {"own_cache": 32, "pool": 8, "handed_over": 0, "computed": 60},
        ),
        (
            'vllm:prompt_tokens_total{engine="0"} 40\nvllm:prompt_tokens_total{engine="1"} 60\n'
            'vllm:prefix_cache_hits_total{engine="0"} 16\nvllm:external_prefix_cache_hits_total{engine="1"} 32\n',
            {"own_cache": 16, "pool": 32, "handed_over": 0, "computed": 52},
        ),
        (
            "sglang:prompt_tokens_total 100\nsglang:cached_tokens_total 70\n",
            {"own_cache": 70, "pool": 0, "handed_over": 0, "computed": 30},
        ),
        (
            'sglang:prompt_tokens_total 100\nsglang:cached_tokens_total{cache_source="device"} 40\n'
            'sglang:cached_tokens_total{cache_source="host"} 10\n'
            'sglang:cached_tokens_total{cache_source="storage"} 20\n',
            {"own_cache": 50, "pool": 20, "handed_over": 0, "computed": 30},
        ),
        ("something_else 1\n", None),
    ],
    ids=["ours", "FastDeploy", "vLLM", "SGLang", "SGLang by source", "another"],
)
def test_the_origins_of_prompts_are_read_for_each_engine(page: str, origins: dict[str, float] | None) -> None:
    assert read_instance_figures(parse_samples(page), MIXED).origins == origins


@pytest.mark.parametrize(
    ("role", "connector", "more", "origin"),
    [
        ("decode", "nixl", "", "handed_over"),
        ("decode", "mooncake", "vllm:kvstore_blocks_total 1\n", "handed_over"),
        ("decode", "kvstore", "", "pool"),
        ("decode", "", "", "handed_over"),
        ("decode", "", "vllm:kvstore_blocks_total 1\n", "pool"),
        ("prefill", "nixl", "", "pool"),
    ],
    ids=["NIXL", "with the pool", "our connector", "unknown", "unknown, with the pool", "prefill"],
)
def test_external_hits_of_vllm_have_the_right_origin(role: str, connector: str, more: str, origin: str) -> None:
    """vLLM has one counter, of external hits, for direct transfers and for the pool."""
    entry = {"url": "http://10.0.0.1:8000", "role": role, "engine": "vllm", "kv_connector": connector}
    page = f"vllm:prompt_tokens_total 100\nvllm:external_prefix_cache_hits_total 64\n{more}"
    origins = read_instance_figures(parse_samples(page), read_listed(entry)).origins
    assert origins == {"own_cache": 0, "pool": 0, "handed_over": 0, "computed": 36, origin: 64}


def test_the_figures_of_an_instance_show_its_use_of_the_pool() -> None:
    page = """
kvstore_pool_open 1
kvstore_breaker_open 1
kvstore_blocks_total{operation="exists",status="ok"} 5
kvstore_blocks_total{operation="get",status="ok"} 4
kvstore_bytes_total{operation="get"} 100
kvstore_rejected_blocks_total{reason="checksum"} 1
fastdeploy:time_to_first_token_seconds_bucket{le="+Inf"} 4
fastdeploy:time_to_first_token_seconds_count 4
fastdeploy:time_to_first_token_seconds_sum 0.5
"""
    figures = read_instance_figures(parse_samples(page), MIXED)
    assert (figures.pool_open, figures.pool_paused, figures.rejected) == (True, True, 1)
    assert (figures.looked_up, figures.moved_bytes) == ({"ok": 5}, {"get": 100})
    assert (figures.running, figures.memory_used) == (None, None)
    assert (figures.first_tokens, figures.first_token_seconds) == (4, 0.5)


def test_the_names_of_a_masters_metrics_need_no_suffixes_of_prometheus() -> None:
    page = '# TYPE master_key_count gauge\nmaster_key_count 3\nmaster_evicted_key_count 7\nwith_labels{a="b"} 1\n'
    segments = read_segments(
        {
            "segments": [
                {"segment_name": "a:1", "allocator_used_bytes": "5", "allocator_capacity_bytes": 10},
                {"segment_name": "odd"},
            ]
        }
    )
    figures = read_master_figures({"role": "leader", "service_ready": False}, parse_plain_metrics(page), segments)
    assert (figures.role, figures.serves, figures.keys, figures.evicted) == ("leader", False, 3, 7)
    assert [(each.name, each.used, each.capacity) for each in figures.segments] == [("a:1", 5, 10)]


def test_a_page_that_is_no_metrics_is_refused() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        parse_plain_metrics("<html> hello</html>\n")
