"""run_pd_storage.sh --keep: the conversation is verified, clients send requests, then processes are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from engine.make_model import MAX_NEW_TOKENS
from tests.examples.readme import readme_blocks
from tests.examples.script import EXAMPLES, ROOT, Script, running
from tests.support import plain_http
from tests.support.waiting import wait_until

ROUTER = "http://127.0.0.1:52700"
DECODE = "http://127.0.0.1:52500"
QUESTION: ChatCompletionUserMessageParam = {"role": "user", "content": "Tell me a story about the sea and the wind."}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(free_ports: None) -> Iterator[Script]:
    """Run run_pd_storage.sh --keep --dashboard until it waits for Ctrl-C."""
    with running("run_pd_storage.sh", "--keep", "--dashboard") as script:
        script.wait_for("Ctrl-C stops everything", deadline=400)
        yield script


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_the_conversation_is_verified_and_ends_with_a_table(cluster: Script) -> None:
    assert "verified: in each turn after the first, prefill read from the pool what decode had" in cluster.output
    assert re.search(r"^request +prompt tokens +own cache +pool +computed +first token", cluster.output, re.MULTILINE)
    assert re.search(r"All \d+ keys in the pool are our backend's \(kv1-", cluster.output)


def test_the_dashboard_is_at_the_printed_address(cluster: Script) -> None:
    found = re.search(r"See it in a browser:  (\S+)$", cluster.output, re.MULTILINE)
    assert found is not None
    page = plain_http.get(found[1])
    assert (page.status_code, "Where prompts come from" in page.text) == (200, True)


def test_the_last_turn_read_at_least_a_block_from_the_pool(cluster: Script) -> None:
    found = re.search(r"^turn 3 +(\d+) +(\d+) +(\d+) +(\d+) ", cluster.output, re.MULTILINE)
    assert found is not None
    prompt, own, pool, computed = map(int, found.groups())
    assert prompt == own + pool + computed
    assert pool >= 64


def test_the_usage_has_the_sources_of_the_prompt(cluster: Script) -> None:
    question: ChatCompletionUserMessageParam = {
        "role": "user",
        "content": "Tell me of every river, and of every road. " * 10,
    }
    with client(ROUTER) as ai:
        for _ in range(2):
            answer = ai.chat.completions.create(model="any", messages=[question], max_tokens=2)
    assert answer.usage is not None
    details: Any = answer.usage.prompt_tokens_details  # with members that are not in OpenAI's API
    assert details.cached_tokens >= 64
    assert details.cached_tokens == details.own_cached_tokens + details.pool_cached_tokens


@pytest.mark.parametrize("url", [ROUTER, DECODE], ids=["router", "instance"])
def test_the_openai_client_gets_the_same_response_with_and_without_streaming(cluster: Script, url: str) -> None:
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


def test_the_curl_command_of_the_readme_works(cluster: Script) -> None:
    command, _ = readme_curls()
    assert answer_of(command)["usage"]["completion_tokens"] == 30


def test_a_response_without_a_limit_ends(cluster: Script) -> None:
    answer = plain_http.post(f"{ROUTER}/v1/chat/completions", json={"messages": [QUESTION]}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == MAX_NEW_TOKENS


def test_the_readmes_prompt_comes_from_the_pool_at_the_other_port(cluster: Script) -> None:
    _, questions = readme_curls()
    first, second = questions.splitlines()
    assert question_lines(cluster) == [line.replace("@examples", f"@{ROOT}/examples") for line in (first, second)]
    blocks = pool_keys()
    saved = answer_of(first)["usage"]["prompt_tokens"] // 64
    wait_until(lambda: pool_keys() >= blocks + saved, "the prompt to be in the pool")
    assert answer_of(second)["usage"]["prompt_tokens_details"]["pool_cached_tokens"] >= 64


@pytest.mark.parametrize("command", ["doctor", "stats", "bench"])
def test_the_commands_that_keep_prints_show_the_pool(cluster: Script, command: str) -> None:
    lines = [line.strip() for line in cluster.output.partition("To look at the pool:")[2].splitlines()]
    settings = [line for line in lines if line.startswith((". ", "export "))]
    (asked,) = [line for line in lines if line.startswith(f"kvstore {command}")]
    if command == "stats":
        assert asked in (ROOT / "docs" / "operations.md").read_text()
    script = "\n".join(["set -e", *settings, asked])
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended


def test_the_logs_that_the_docs_name_exist(cluster: Script) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    named = set(re.findall(r"\blog_(?:\*|prefill|decode|router|master)/[\w.]+", pages))
    assert named >= {"log_*/api_server.log", "log_router/nohup"}
    assert [name for name in named if not list(EXAMPLES.glob(name))] == []


def readme_curls() -> list[str]:
    return [block for block in readme_blocks("bash") if block.startswith("curl ")]


def question_lines(cluster: Script) -> list[str]:
    return [line.strip() for line in cluster.output.splitlines() if line.startswith("  curl ")]


def answer_of(command: str) -> Any:
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return json.loads(ended.stdout)


def pool_keys() -> int:
    found = re.search(r"^master_key_count (\d+)", plain_http.get("http://127.0.0.1:15003/metrics").text, re.MULTILINE)
    assert found
    return int(found[1])


def test_the_python_program_of_the_readme_prints_a_story(cluster: Script) -> None:
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
def test_an_invalid_body_gets_an_error_in_openais_format(cluster: Script, body: bytes, status: int) -> None:
    answer = plain_http.post(f"{ROUTER}/v1/chat/completions", content=body, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


# This test must be the last one that uses the fixture, because it kills instances.
def test_each_request_gets_a_response_after_decode_and_then_the_master_are_killed(cluster: Script) -> None:
    line = re.search(r"^Processes:(.*)$", cluster.output, re.MULTILINE)
    assert line is not None
    pids = dict(part.split("=") for part in line[1].split())
    for victim in ("decode", "master"):
        os.kill(int(pids[victim]), signal.SIGKILL)
        answer = plain_http.post(
            f"{ROUTER}/v1/chat/completions", json={"messages": [QUESTION], "max_tokens": 5}, timeout=60
        )
        assert answer.status_code == 200 or answer.json()["error"]["message"]
    cluster.interrupt()
    assert cluster.end(60) == 0
    assert cluster.left_behind() == []
