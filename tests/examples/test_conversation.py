"""run_pd_storage.sh --keep: the conversation is verified, then clients talk to it, then parts of it are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.examples.readme import readme_blocks
from tests.examples.script import Script, running

ROUTER = "http://127.0.0.1:52700"
DECODE = "http://127.0.0.1:52500"
QUESTION: ChatCompletionUserMessageParam = {"role": "user", "content": "Tell me a story about the sea and the wind."}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def kept(free_ports: None) -> Iterator[Script]:
    """run_pd_storage.sh --keep, verified and waiting for Ctrl-C."""
    with running("run_pd_storage.sh", "--keep") as script:
        script.wait_for("Ctrl-C stops everything", deadline=400)
        yield script


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_the_conversation_is_verified_and_ends_with_a_table(kept: Script) -> None:
    assert "verified: prefill read from the pool what decode had generated" in kept.output
    assert re.search(r"^request +prompt tokens +own cache +pool +computed +first token", kept.output, re.MULTILINE)


def test_the_last_turn_read_at_least_a_block_from_the_pool(kept: Script) -> None:
    found = re.search(r"^turn 3 +(\d+) +(\d+) +(\d+) +(\d+) ", kept.output, re.MULTILINE)
    assert found is not None
    prompt, own, pool, computed = map(int, found.groups())
    assert prompt == own + pool + computed
    assert pool >= 64


def test_the_usage_tells_where_the_prompt_came_from(kept: Script) -> None:
    question: ChatCompletionUserMessageParam = {
        "role": "user",
        "content": "Tell me of every river, and of every road. " * 10,
    }
    with client(ROUTER) as ai:
        for _ in range(2):
            answer = ai.chat.completions.create(model="any", messages=[question], max_tokens=2)
    assert answer.usage is not None
    details: Any = answer.usage.prompt_tokens_details  # with members that OpenAI does not know
    assert details.cached_tokens >= 64
    assert details.cached_tokens == details.own_cached_tokens + details.pool_cached_tokens


@pytest.mark.parametrize("url", [ROUTER, DECODE], ids=["router", "instance"])
def test_the_openai_client_gets_one_answer_streaming_and_not(kept: Script, url: str) -> None:
    with client(url) as ai:
        model = ai.models.list().data[0].id if url == DECODE else "default"
        asked: Any = {"model": model, "messages": [QUESTION], "max_tokens": 12, "temperature": 0}
        whole = ai.chat.completions.create(**asked)
        stream = ai.chat.completions.create(**asked, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert whole.choices[0].message.content
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12


def test_the_curl_command_of_the_readme_gets_an_answer(kept: Script) -> None:
    (command,) = [block for block in readme_blocks("bash") if block.startswith("curl ")]
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(ended.stdout)["usage"]["completion_tokens"] == 30, ended


def test_the_python_program_of_the_readme_prints_a_story(kept: Script) -> None:
    (program,) = readme_blocks("python")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.split()) >= 20


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{this is not JSON", 400),
        (json.dumps({"messages": []}).encode(), 400),
        (json.dumps({"messages": [{"role": "user", "content": "word " * 40000}]}).encode(), 400),
    ],
    ids=["not-json", "no-messages", "too-long"],
)
def test_a_body_that_cannot_be_served_is_answered_in_openai_form(kept: Script, body: bytes, status: int) -> None:
    answer = httpx.post(f"{ROUTER}/v1/chat/completions", content=body, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


# The last to use `kept`, whose instances it kills.
def test_killing_decode_and_then_the_master_leaves_no_request_without_an_answer(kept: Script) -> None:
    line = re.search(r"^Processes:(.*)$", kept.output, re.MULTILINE)
    assert line is not None
    pids = dict(part.split("=") for part in line[1].split())
    for victim in ("decode", "master"):
        os.kill(int(pids[victim]), signal.SIGKILL)
        answer = httpx.post(f"{ROUTER}/v1/chat/completions", json={"messages": [QUESTION], "max_tokens": 5}, timeout=60)
        assert answer.status_code == 200 or answer.json()["error"]["message"]
    kept.interrupt()
    assert kept.end(60) == 0
    assert kept.left_behind() == []
