"""FastDeploy's metrics: names, types, labels and buckets, and the values for its dashboards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric

from engine.telemetry.metrics import EngineMetrics
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.running import Engine

TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000"
SECONDS = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
RATES = " ".join(str(rate) for rate in range(0, 201, 5))

# Types, and buckets of histograms, from FastDeploy 2.6's fastdeploy/metrics/metrics.py and its
# docs/online_serving/metrics.md. Those of storage and preemption are from its newest files.
FASTDEPLOYS = {
    "available_batch_size": ("gauge", ""),
    "available_gpu_resource": ("gauge", ""),
    "batch_size": ("gauge", ""),
    "cpu_hit_token_rate": ("gauge", ""),
    "free_gpu_block_num": ("gauge", ""),
    "gpu_hit_token_rate": ("gauge", ""),
    "hit_req_rate": ("gauge", ""),
    "hit_token_rate": ("gauge", ""),
    "max_batch_size": ("gauge", ""),
    "max_gpu_block_num": ("gauge", ""),
    "num_requests_preempted": ("gauge", ""),
    "prefix_cache_token_num": ("counter", ""),
    "prefix_cpu_cache_token_num": ("counter", ""),
    "prefix_storage_cache_token_num": ("counter", ""),
    "request_preempted": ("counter", ""),
    "request_success": ("counter", ""),
    "requests_number": ("counter", ""),
    "send_cache_failed_num": ("counter", ""),
    "request_decode_time_seconds": ("histogram", SECONDS),
    "request_inference_time_seconds": ("histogram", SECONDS),
    "request_generation_tokens": ("histogram", TOKENS),
    "request_params_max_tokens": ("histogram", TOKENS),
    "request_prompt_tokens": ("histogram", TOKENS),
    "request_token_ratio": ("histogram", RATES),
}

PROMPT = list(range(3, 43))


def collect() -> dict[str, Metric]:
    return {metric.name: metric for metric in EngineMetrics().registry.collect()}


@pytest.mark.parametrize(("name", "expected"), FASTDEPLOYS.items())
def test_a_metric_of_fastdeploy_has_its_type_no_labels_and_its_buckets(name: str, expected: tuple[str, str]) -> None:
    metric = collect()[f"fastdeploy:{name}"]
    bounds = [sample.labels["le"] for sample in metric.samples if sample.name.endswith("_bucket")]
    assert (metric.type, [float(bound) for bound in bounds[:-1]]) == (expected[0], [*map(float, expected[1].split())])
    assert {label for sample in metric.samples for label in sample.labels} <= {"le"}


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(tiny_checkpoint, store=MemoryStore(64 << 20)) as running:
        yield running


def value(engine: Engine, name: str) -> float:
    return engine.metric(f"fastdeploy:{name}")


def test_tokens_from_the_pool_and_from_the_own_cache_have_different_metrics(engine: Engine) -> None:
    engine.answer(PROMPT)  # no token is cached
    engine.answer(PROMPT)  # two blocks of 16 tokens in the own cache
    engine.core.clear_prefix_cache()
    engine.answer(PROMPT)  # the same two blocks in the pool
    assert value(engine, "prefix_gpu_cache_token_num_total") == 32
    assert (
        value(engine, "prefix_storage_cache_token_num_total") == engine.metric("kvstore_pool_cached_tokens_total") == 32
    )
    assert value(engine, "prefix_cache_token_num_total") == 64
    assert value(engine, "hit_req_rate") == pytest.approx(2 / 3)
    assert value(engine, "hit_token_rate") == pytest.approx(64 / 120)
    assert value(engine, "gpu_hit_token_rate") == pytest.approx(32 / 120)
    assert value(engine, "cpu_hit_token_rate") == value(engine, "prefix_cpu_cache_token_num_total") == 0


def test_requests_and_their_sizes_are_counted(engine: Engine) -> None:
    engine.answer(PROMPT, 5)
    aborted = engine.begin(PROMPT, 900)
    aborted.next()
    engine.core.abort_sequence(aborted.sequence)
    aborted.wait()
    assert (value(engine, "requests_number_total"), value(engine, "request_success_total")) == (2, 1)
    assert value(engine, "request_prompt_tokens_sum") == 2 * len(PROMPT)
    assert value(engine, "request_params_max_tokens_sum") == 905
    assert (value(engine, "request_generation_tokens_sum"), value(engine, "request_generation_tokens_count")) == (5, 1)
    for name in ("request_inference_time_seconds", "request_decode_time_seconds", "request_token_ratio"):
        assert value(engine, f"{name}_count") == 1


def test_metrics_have_the_current_batch_size_and_blocks(engine: Engine) -> None:
    assert (value(engine, "max_batch_size"), value(engine, "available_batch_size")) == (4, 4)
    assert value(engine, "max_gpu_block_num") == value(engine, "free_gpu_block_num") == 64
    running = engine.begin(PROMPT, 900)
    running.next()
    assert (value(engine, "batch_size"), value(engine, "available_batch_size")) == (1, 3)
    assert value(engine, "available_gpu_resource") < 1
    engine.core.abort_sequence(running.sequence)
    running.wait()
    engine.wait_until_idle()
    assert value(engine, "available_gpu_resource") == 1
    cached = engine.core.count_cached_blocks()
    assert value(engine, "free_gpu_block_num") == 64 - cached < 64, "blocks with contents are available, and not free"


def test_metrics_count_waiting_preempted_requests_and_all_preemptions(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, num_blocks=9, start=False) as engine:
        submitted = engine.begin_at_once([[each, *PROMPT] for each in range(2)], 40)
        counts = []
        preempt = engine.scheduler._wait_anew

        def record_preemption(sequence: object) -> None:
            preempt(sequence)  # type: ignore[arg-type]
            counts.append(value(engine, "num_requests_preempted"))

        engine.scheduler._wait_anew = record_preemption  # type: ignore[method-assign]
        engine.core.start()
        for one in submitted:
            one.wait()
        assert counts
        assert counts[0] == 1
        assert value(engine, "num_requests_preempted") == 0
        assert value(engine, "request_preempted_total") == engine.metric("kvstore_preemptions_total") >= 1


def test_the_settings_of_the_cache_are_labels() -> None:
    metrics = EngineMetrics()
    metrics.describe_cache({"block_size": 64, "kvcache_storage_backend": None})
    labels = {"block_size": "64", "kvcache_storage_backend": "None"}
    assert metrics.registry.get_sample_value("fastdeploy:cache_config_info", labels) == 1
