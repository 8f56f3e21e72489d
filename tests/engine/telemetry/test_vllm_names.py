"""Metrics with vLLM's names, for the endpoint picker of the Gateway API and for vLLM's dashboards.

Sources: ``vllm/v1/metrics/loggers.py`` of vLLM 0.32, and the picker's protocol for servers
(``docs/proposals/003-model-server-protocol`` of kubernetes-sigs/gateway-api-inference-extension).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.telemetry.vllm_names import VllmNames
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.running import Engine

PROMPT = list(range(3, 43))
LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine(tiny_checkpoint, store=MemoryStore(64 << 20)) as running:
        running.core.metrics.registry.register(VllmNames(running.core.metrics, "m", {"block_size": 16}))
        yield running


def read(engine: Engine, name: str, **labels: str) -> float | None:
    value: float | None = engine.core.metrics.registry.get_sample_value(f"vllm:{name}", LABELS | labels)
    return value


def test_each_prompt_token_has_one_of_vllms_sources(engine: Engine) -> None:
    engine.answer(PROMPT)  # computed
    engine.answer(PROMPT)  # two blocks of 16 tokens in the own cache
    engine.core.clear_prefix_cache()
    engine.answer(PROMPT)  # the same two blocks in the pool
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    counts = [read(engine, "prompt_tokens_by_source_total", source=source) for source in sources]
    assert counts == [3 * len(PROMPT) - 64, 32, 32]


def test_load_is_equal_to_the_metrics_with_fastdeploys_names(engine: Engine) -> None:
    running = engine.begin(PROMPT, 900)
    running.next()
    assert (read(engine, "num_requests_running"), read(engine, "num_requests_waiting")) == (1, 0)
    assert read(engine, "kv_cache_usage_perc") == engine.metric("fastdeploy:gpu_cache_usage_perc") > 0
    engine.core.abort_sequence(running.sequence)
    running.wait()


def test_the_cache_settings_are_labels(engine: Engine) -> None:
    labels = {"engine": "0", "block_size": "16"}
    assert engine.core.metrics.registry.get_sample_value("vllm:cache_config_info", labels) == 1


def test_names_and_labels_are_equal_to_those_of_vllm(engine: Engine) -> None:
    labels = {"model_name", "engine"}
    assert {
        (metric.name, metric.type): set(metric.samples[0].labels)
        for metric in engine.core.metrics.registry.collect()
        if metric.name.startswith("vllm:")
    } == {
        ("vllm:num_requests_running", "gauge"): labels,
        ("vllm:num_requests_waiting", "gauge"): labels,
        ("vllm:kv_cache_usage_perc", "gauge"): labels,
        ("vllm:prompt_tokens_by_source", "counter"): {*labels, "source"},
        ("vllm:cache_config_info", "gauge"): {"engine", "block_size"},
    }
