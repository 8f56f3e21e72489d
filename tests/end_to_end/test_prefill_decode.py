"""Prefill and decode instances behind the router, sharing one real Mooncake pool; and what is left when parts die."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.end_to_end.cluster import QUESTION, Instance, Router, ask, instance, router
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.waiting import wait_until

PREFILL = ("--splitwise-role", "prefill")
DECODE = ("--splitwise-role", "decode", "--enable-output-caching")
BLOCK = 64


@dataclass
class System:
    """One of each."""

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
    """A system for tests that do it no harm."""
    with system(tmp_path_factory.mktemp("system"), model) as running:
        yield running


def text(answer: dict[str, Any]) -> str:
    assert answer["status"] == 200, answer
    content: str = answer["choices"][0]["message"]["content"]
    return content


def conversation(about: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{about}: {QUESTION}"}]


def test_second_turn_reads_what_decode_generated_from_the_pool(shared: System, cold: Instance) -> None:
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


def test_decode_gets_the_prompt_from_prefill_although_there_is_a_pool(shared: System) -> None:
    ask(shared.router.url, conversation("handed over"), max_tokens=5)
    before = shared.decode.metric('kvstore_handed_over_total{way="direct"}')
    ask(shared.router.url, conversation("handed over, too"), max_tokens=5)
    assert shared.decode.metric('kvstore_handed_over_total{way="direct"}') == before + 1
    assert shared.decode.metric("kvstore_pool_cached_tokens_total") == 0


def test_many_conversations_at_once_get_their_own_answers(shared: System, cold: Instance) -> None:
    questions = [conversation(f"number {i}") for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda question: ask(shared.router.url, question, max_tokens=20), questions))
    expected = [text(ask(cold.url, question, max_tokens=20)) for question in questions]
    assert [text(answer) for answer in answers] == expected


@pytest.mark.parametrize("target", ["router", "prefill"])
def test_openai_client_streams_what_it_also_gets_at_once(shared: System, target: str) -> None:
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


def test_conversation_survives_decode_then_master_being_killed(tmp_path: Path, model: Path, cold: Instance) -> None:
    messages = conversation("fault")
    expected = text(ask(cold.url, messages, max_tokens=30))
    with system(tmp_path, model) as parts:
        url = parts.router.url
        assert text(ask(url, messages, max_tokens=30)) == expected

        parts.decode.process.kill()
        refused = ask(url, messages, max_tokens=30)
        assert refused["status"] in (502, 503), refused
        assert "decode" in refused["error"]["message"]

        towards = ("--router", f"127.0.0.1:{parts.router.port}")
        with instance(tmp_path, model, *DECODE, *towards, port=parts.decode.port, master=parts.master) as decode:
            wait_until(lambda: ask(url, messages, max_tokens=1)["status"] == 200, "the new decode instance to serve")
            assert text(ask(url, messages, max_tokens=30)) == expected

            parts.master.kill()
            assert text(ask(url, messages, max_tokens=30)) == expected
            new = conversation("a prompt nobody has seen")
            assert text(ask(url, new, max_tokens=10)) == text(ask(cold.url, new, max_tokens=10))
            decode.process.stop()
            assert decode.process.exit_code == 0, decode.process.output
        parts.prefill.process.stop()
        assert parts.prefill.process.exit_code == 0, parts.prefill.process.output


def test_prefill_killed_in_the_middle_leaves_an_answer_or_a_clear_error(
    tmp_path: Path, model: Path, cold: Instance
) -> None:
    messages = conversation("prefill dies") * 3
    with system(tmp_path, model) as parts, ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, parts.router.url, messages, max_tokens=10)
        wait_until(lambda: parts.prefill.metric("fastdeploy:num_requests_running") == 1, "prefill to begin")
        parts.prefill.process.kill()
        answer = running.result()
        if answer["status"] == 200:
            assert text(answer) == text(ask(cold.url, messages, max_tokens=10))
        else:
            assert answer["status"] in (502, 503), answer
            assert answer["error"]["message"]
        wait_until(lambda: parts.decode.metric("fastdeploy:num_requests_running") == 0, "decode to be free")
