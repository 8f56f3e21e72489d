"""Prefill and decode instances with the router and a real Mooncake pool, also if processes die."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.end_to_end.cluster import QUESTION, Instance, Router, ask, check_cached_tokens, instance, router
from tests.support import plain_http
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.trace import find_logged
from tests.support.waiting import wait_until

PREFILL = ("--splitwise-role", "prefill")
DECODE = ("--splitwise-role", "decode", "--enable-output-caching")
BLOCK = 64
TOKENS = 800  # one or two seconds, during which a test can kill an instance


@dataclass
class System:
    """The processes of a system."""

    master: MooncakeMaster
    router: Router
    prefill: Instance
    decode: Instance


@contextlib.contextmanager
def system(folder: Path, model: Path) -> Iterator[System]:
    with mooncake_master(folder / "master.log") as master, router(folder) as running_router:
        towards = ("--router", f"127.0.0.1:{running_router.port}")
        with (
            instance(folder, model, *PREFILL, *towards, master=master) as prefill,
            instance(folder, model, *DECODE, *towards, master=master) as decode,
        ):
            running_router.wait_for(prefill=1, decode=1)
            yield System(master, running_router, prefill, decode)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[System]:
    """A system for tests that do not damage it."""
    with system(tmp_path_factory.mktemp("system"), model) as running:
        yield running


def text(answer: dict[str, Any]) -> str:
    assert answer["status"] == 200, answer
    content: str = answer["choices"][0]["message"]["content"]
    return content


def conversation(about: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{about}: {QUESTION}"}]


def test_the_second_turn_reads_the_output_of_decode_from_the_pool(shared: System, cold: Instance) -> None:
    messages = conversation("first")
    first = ask(shared.router.url, messages)
    assert text(first) == text(ask(cold.url, messages))
    shared.decode.wait_for_saves()

    messages += [{"role": "assistant", "content": text(first)}, {"role": "user", "content": "And then?"}]
    second = ask(shared.router.url, messages)

    assert text(second) == text(ask(cold.url, messages))
    details = second["usage"]["prompt_tokens_details"]
    assert details["pool_cached_tokens"] >= BLOCK, details
    assert details["cached_tokens"] >= first["usage"]["prompt_tokens"] + BLOCK, details


def test_decode_gets_the_prompt_from_prefill_also_with_a_pool(shared: System) -> None:
    ask(shared.router.url, conversation("handed over"), max_tokens=5)
    before = shared.decode.metric('kvstore_handed_over_total{way="direct"}')
    ask(shared.router.url, conversation("handed over, too"), max_tokens=5)
    assert shared.decode.metric('kvstore_handed_over_total{way="direct"}') == before + 1
    assert shared.decode.metric("kvstore_pool_cached_tokens_total") == 0


def test_many_concurrent_conversations_get_their_own_responses(shared: System, cold: Instance) -> None:
    questions = [conversation(f"number {i}") for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda question: ask(shared.router.url, question, max_tokens=20), questions))
    expected = [text(ask(cold.url, question, max_tokens=20)) for question in questions]
    assert [text(answer) for answer in answers] == expected


@pytest.mark.parametrize("target", ["router", "prefill"])
def test_the_openai_client_gets_the_same_text_with_and_without_streaming(shared: System, target: str) -> None:
    url = {"router": shared.router.url, "prefill": shared.prefill.url}[target]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked: Any = {"model": "any", "messages": conversation("client"), "max_tokens": 30, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30


def read_stream(url: str, path: str, body: dict[str, Any], on_line: Callable[[], None] = lambda: None) -> Any:
    """Return the text, usage, request id and decode instance of a stream; call ``on_line`` after each line."""
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    text, events = "", []
    with plain_http.stream("POST", f"{url}{path}", json={**body, **options, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        headers = response.headers
        for line in response.iter_lines():
            events += [line.removeprefix("data: ")] if line else []
            on_line()
    *chunks, done = events
    assert done == "[DONE]"
    for chunk in map(json.loads, chunks):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            text += choice.get("delta", choice).get("content", choice.get("text", "")) or ""
    usage = json.loads(chunks[-1])["usage"]
    return text, usage, headers.get("x-router-request-id"), headers.get("x-router-decode")


def test_after_a_clear_of_the_own_caches_a_prompt_comes_from_the_pool(shared: System) -> None:
    url, messages = shared.router.url, conversation("cleared")
    first = ask(url, messages, max_tokens=10)
    shared.prefill.wait_for_saves()
    again = ask(url, messages, max_tokens=10)["usage"]["prompt_tokens_details"]
    assert (again["own_cached_tokens"] > 0, again["pool_cached_tokens"]) == (True, 0)

    cleared = plain_http.post(f"{url}/admin/clear_prefix_cache")
    assert (cleared.status_code, cleared.json()["status"]) == (200, "success"), cleared.text

    after = ask(url, messages, max_tokens=10, request_id="after-clearing")
    details = after["usage"]["prompt_tokens_details"]
    assert (details["own_cached_tokens"], details["pool_cached_tokens"] > 0) == (0, True)
    assert text(after) == text(first)
    line = wait_until(
        lambda: next((each for each in shared.prefill.log.splitlines() if "request_id=after-clearing" in each), ""),
        "the request's line in the log",
    )
    assert f"storage_cache_token_num={details['pool_cached_tokens']}" in line


def test_a_stream_continues_after_its_decode_instance_is_killed(
    tmp_path: Path, model: Path, shared: System, cold: Instance
) -> None:
    path, body = "/v1/chat/completions", {"messages": conversation("killed")}
    url, towards = shared.router.url, ("--router", f"127.0.0.1:{shared.router.port}")
    with instance(tmp_path, model, *DECODE, *towards, master=shared.master) as victim:
        shared.router.wait_for(decode=2)
        lines = itertools.count(1)

        def on_line() -> None:
            if next(lines) == 3:
                victim.process.kill()

        order = {"instance": f"127.0.0.1:{shared.decode.port}"}
        for weight in (0, 1):  # with weight 0, it gets only requests that no other instance can process
            assert plain_http.post(f"{url}/admin/weight", json={**order, "weight": weight}).status_code == 200
            if not weight:
                text, usage, request_id, decode = read_stream(url, path, body, on_line)
    # The router may not have detected the end yet. It must not send the requests of later tests there.
    plain_http.post(f"{url}/admin/drain", json={"instance": f"127.0.0.1:{victim.port}"})
    attempts = plain_http.get(f"{url}/admin/explain/{request_id}").json()["attempts"]
    assert [attempt["ended"].partition(":")[0] for attempt in attempts] == ["broke off", "answered"]
    wait_until(lambda: request_id in find_logged([shared.prefill.log]), "prefill to have written its log")
    right, right_usage, _, _ = read_stream(cold.url, path, body)
    assert (text, decode) == (right, f"127.0.0.1:{victim.port}")
    assert usage.pop("prompt_tokens_details")["cached_tokens"] == find_logged([shared.prefill.log])[request_id]
    assert usage.items() <= right_usage.items()


def test_the_usage_has_the_cached_tokens_in_prefills_log(shared: System) -> None:
    check_cached_tokens(shared.router.url, [shared.prefill])
