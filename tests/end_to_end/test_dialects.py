"""Pairs in each dialect with the real router, for each API: decode uses the KV of prefill."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from engine.args import parse_args
from engine.serving.instance import Instance
from engine.serving.server import InstanceServer
from engine.serving.surroundings import find_surroundings
from simulation.actors.dialects import SglangDialect, VllmDialect, retain_prompts
from tests.end_to_end.cluster import Router, router
from tests.support.waiting import wait_until

MODEL = "few"
LENGTH = 12
QUESTION: Any = [{"role": "user", "content": "Where is the river in the old town behind the hill? " * 4}]


@contextlib.contextmanager
def serving(model: Path, role: str, dialect: str, at: Router | None = None) -> Iterator[str]:
    """Run an instance in this process; yield its URL."""
    bound, connector = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    argv = ["--model", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--splitwise-role", role, "--device", "cpu", "--max-model-len", "500"]
    argv += ["--block-size", "16", "--num-gpu-blocks-override", "128"]
    argv += ["--router", f"127.0.0.1:{at.port}"] if at else []
    args = parse_args(argv, {})
    at_port = connector.getsockname()[1]
    dialects = {"vllm": VllmDialect("127.0.0.1", at_port), "sglang": SglangDialect(role, at_port)}
    instance = Instance(args, find_surroundings(args), connector, dialects.get(dialect))
    retain_prompts(instance.receiver, instance.memory)
    server = InstanceServer(instance)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        wait_until(lambda: server.started, "the instance to listen")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """The responses of a mixed instance."""
    with serving(model, "mixed", "fastdeploy") as url:
        return answers_of(url)


def answers_of(url: str) -> dict[str, str]:
    """Return the texts that the clients of the APIs get, with and without streaming."""
    found = {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        ai: Any = client
        chat: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": LENGTH, "temperature": 0}
        found["chat"] = ai.chat.completions.create(**chat).choices[0].message.content
        chunks = ai.chat.completions.create(**chat, stream=True)
        found["chat stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        text: dict[str, Any] = {"model": MODEL, "prompt": "the river " * 30, "max_tokens": LENGTH, "temperature": 0}
        found["completion"] = ai.completions.create(**text).choices[0].text
        found["completion stream"] = "".join(
            chunk.choices[0].text for chunk in ai.completions.create(**text, stream=True) if chunk.choices
        )
    return found


def answers_of_other_apis(url: str) -> dict[str, str]:
    found = {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        ai: Any = client
        asked: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": LENGTH, "temperature": 0}
        found["response"] = ai.responses.create(**asked).output_text
        *_, last = ai.responses.create(**asked, stream=True)
        found["response stream"] = last.response.output_text
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        claude: Any = client
        asked = {"model": MODEL, "messages": QUESTION, "max_tokens": LENGTH, "extra_body": {"temperature": 0}}
        found["message"] = claude.messages.create(**asked).content[0].text
        events = claude.messages.create(**asked, stream=True)
        found["message stream"] = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    return found


def handed_over(url: str, way: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return next((float(line.split()[-1]) for line in lines if f'handed_over_total{{way="{way}"}}' in line), 0.0)


@pytest.mark.parametrize("dialect", ["fastdeploy", "vllm", "sglang"])
def test_decode_continues_prefills_prompt_in_each_api(
    model: Path, expected: dict[str, str], tmp_path: Path, dialect: str
) -> None:
    with (
        router(tmp_path) as front,
        serving(model, "prefill", dialect, front),
        serving(model, "decode", dialect, front) as decode,
    ):
        front.wait_for(prefill=1, decode=1)
        assert answers_of(front.url) == expected
        assert handed_over(decode, "direct") == len(expected)
        others = answers_of_other_apis(front.url)
        assert set(others.values()) == {expected["chat"]}
