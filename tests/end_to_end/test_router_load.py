"""Two mixed instances with a router: the cached tokens in the usage, and many concurrent streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.cluster import Instance, Router, check_cached_tokens, instance, router
from tests.support import plain_http
from tests.support.waiting import wait_until

STREAMS = 200
TOKENS = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[Router, list[Instance]]]:
    folder = tmp_path_factory.mktemp("served")
    with router(folder, splitwise=False) as running:
        towards = ("--router", f"127.0.0.1:{running.port}")
        with instance(folder, model, *towards) as first, instance(folder, model, *towards) as second:
            running.wait_for(mixed=2)
            yield running, [first, second]


def test_the_usage_has_the_cached_tokens_in_the_instances_logs(
    served: tuple[Router, list[Instance]],
) -> None:
    check_cached_tokens(served[0].url, served[1])


def test_200_concurrent_streams_succeed(served: tuple[Router, list[Instance]]) -> None:
    running, instances = served

    async def stream(client: httpx.AsyncClient, number: int) -> tuple[int, int, str]:
        """Return the status, the number of tokens, and the end of a stream."""
        messages = [{"role": "user", "content": f"Question {number % 20}: what lies behind hill {number}?"}]
        options = {"stream_options": {"include_usage": True}, "stream": True, "ignore_eos": True}
        body = {"messages": messages, "max_tokens": TOKENS, **options}
        response = await client.post(f"{running.url}/v1/chat/completions", json=body)
        *events, last, nothing = response.text.split("\n\n")
        usage = json.loads(events[-1].removeprefix("data: ")).get("usage") or {}
        return response.status_code, usage.get("completion_tokens", -1), last + nothing

    async def all_of_them() -> list[tuple[int, int, str]]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=100, limits=limits) as client:
            return await asyncio.gather(*(stream(client, i) for i in range(STREAMS)))

    assert set(asyncio.run(all_of_them())) == {(200, TOKENS, "data: [DONE]")}
    free = [0.0] * len(instances)
    wait_until(lambda: [i.metric("fastdeploy:num_requests_running") for i in instances] == free, "free instances")
    registered = plain_http.get(f"{running.url}/registered").json()["mixed"]
    assert [(one["running_requests"], one["running_tokens"]) for one in registered] == [(0, 0), (0, 0)]
