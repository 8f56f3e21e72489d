"""A router with two workers reads the KV events of an instance: its index agrees with the cached tokens of requests.

The queries are those of a gateway that uses Mooncake's conductor or Dynamo's indexer (RFC 1403 of Mooncake).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.cluster import QUESTION, ask, instance, router
from tests.support import plain_http
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

pytest.importorskip("zmq", reason="pyzmq is not installed; pip install '.[kv-events]'")


def test_the_answer_to_a_query_equals_the_cached_tokens_of_a_request(tmp_path: Path, model: Path) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    endpoint, replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    events = {"endpoint": endpoint, "replay_endpoint": replay_endpoint, "bind": True, "enable_kv_cache_events": True}
    with router(tmp_path, "--kv-events", "--workers", "2", splitwise=False) as running_router:
        towards = ("--router", f"127.0.0.1:{running_router.port}", "--kv-events-config", json.dumps(events))
        with instance(tmp_path, model, *towards) as running:
            running_router.wait_for(mixed=1)
            usage = ask(running_router.url, messages)["usage"]
            answer = plain_http.post(f"{running.url}/tokenize", json={"messages": messages}).json()
            assert len(answer["tokens"]) == usage["prompt_tokens"]

            def query(**members: Any) -> dict[str, Any]:
                question = {"model": "default", "token_ids": answer["tokens"], **members}
                told: dict[str, Any] = plain_http.post(f"{running_router.url}/query", json=question).json()
                return told

            key = f"127.0.0.1:{running.port}"
            whole = usage["prompt_tokens"] // 64 * 64
            assert usage["prompt_tokens_details"]["cache_write_tokens"] == whole > 0
            for _ in range(4):  # each worker must give the same answer
                wait_until(lambda: query()["instances"].get(key, {}).get("gpu") == whole, "the prompt's blocks")
            again = ask(running_router.url, messages)["usage"]["prompt_tokens_details"]
            assert again["cached_tokens"] == min(whole, (usage["prompt_tokens"] - 1) // 64 * 64)
            assert query(cache_salt="another")["instances"][key]["gpu"] == 0
            assert query(block_size=32)["instances"] == {}
