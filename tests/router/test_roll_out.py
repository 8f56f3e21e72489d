"""A roll-out: four instances are replaced in turn while 64 streams run, and no stream fails.

``kvrouter drain --wait`` drains each instance. It ends, starts at the same address as another process, and registers
again. Instances are stand-ins; ``benchmarks/roll_out.py`` does the same with real engines.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable

import httpx
import pytest

from router.console.drain import main
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import Received, Responder, StandIn

STREAMS = 64
PIECES = 5
PIECE_SECONDS = 0.25


async def answer_slowly(request: Received, respond: Responder) -> None:
    """Send a stream of numbered pieces that takes more than a second."""
    await respond.start_stream()
    for number in range(PIECES):
        delta = {"content": f"{number} "}
        choice = {"index": 0, "delta": delta, "finish_reason": "stop" if number == PIECES - 1 else None}
        await respond.event(json.dumps({"id": "1", "object": "chat.completion.chunk", "choices": [choice]}))
        await asyncio.sleep(PIECE_SECONDS)
    await respond.event("[DONE]")
    await respond.end_stream()


def read_content(text: str) -> str:
    """Return the content of a stream; "cut" with its last part if it has no end."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    if events[-1:] != ["[DONE]"]:
        return f"cut: {text[-300:]}"
    return "".join(choice["delta"].get("content", "") for each in events[:-1] for choice in json.loads(each)["choices"])


def roll_all(instances: list[StandIn], router: RouterUnderTest) -> list[int]:
    """Replace the instances in turn, and return the number of requests that each new process has received."""
    for number, instance in enumerate(instances):
        assert main([instance.key, "--wait", "--until-restart", "--router", router.url]) == 0
        assert instance.running == 0
        instance.stop()
        instance.received.clear()
        instance.start()
        answer = instance.register(router.url, start_id=f"second-{number}")
        assert answer.json() == {"status": "success"}
    return [len(instance.received) for instance in instances]


async def keep_streaming(client: httpx.AsyncClient, url: str, outcomes: Counter[str], is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        try:
            answer = await client.post(f"{url}/v1/chat/completions", json={"messages": [], "stream": True})
        except httpx.HTTPError as exc:
            outcomes[repr(exc)] += 1
            continue
        outcomes[
            read_content(answer.text) if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"
        ] += 1


def test_a_roll_out_of_all_instances_loses_none_of_64_streams(
    make_router: Callable[..., RouterUnderTest], stand_in: Callable[..., StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.console.drain.EMPTY_SECONDS", 0.3)
    monkeypatch.setattr("router.console.drain.POLL_SECONDS", 0.1)
    # On a busy machine, stand-ins are slow to accept connections.
    monkeypatch.setattr("router.http.pool.CONNECT_SECONDS", 60.0)
    instances = [stand_in("mixed", answer_slowly) for _ in range(4)]
    router = make_router(workers=2, policy="request_num", access_log="off", health_check_timeout_secs=60.0)
    for number, instance in enumerate(instances):
        instance.register(router.url, start_id=f"first-{number}")
    outcomes: Counter[str] = Counter()

    async def run() -> list[int]:
        is_over = asyncio.Event()
        # A connection for each request: the router closes an idle one if the client is slow to use it.
        limits = httpx.Limits(max_connections=STREAMS, max_keepalive_connections=0)
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=300, limits=limits) as client:
            streams = [
                asyncio.ensure_future(keep_streaming(client, router.workers[number % 2].url, outcomes, is_over))
                for number in range(STREAMS)
            ]
            served = await asyncio.to_thread(roll_all, instances, router)
            is_over.set()
            await asyncio.gather(*streams)
            return served

    served = asyncio.run(run())
    whole = "".join(f"{number} " for number in range(PIECES))
    assert set(outcomes) == {whole}, outcomes
    assert outcomes[whole] >= 2 * STREAMS
    assert all(served[:-1]), "a new process got no requests"
    assert [one["state"] for one in router.client.get("/registered").json()["mixed"]] == ["healthy"] * 4
