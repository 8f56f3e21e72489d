"""examples/cache_storage, run for real: what they verify, what they say when something is wrong, what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.examples.script import EXAMPLES, Script, running, script_environment

ROUTER = "http://127.0.0.1:52700"
DECODE = "http://127.0.0.1:52500"
QUESTION = {"role": "user", "content": "Tell me a story about the sea and the wind."}

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("free_ports")]


@pytest.fixture(scope="module")
def kept(free_ports: None) -> Iterator[Script]:
    """run_pd_storage.sh --keep, verified and waiting for Ctrl-C."""
    with running("run_pd_storage.sh", "--keep") as script:
        script.wait_for("Ctrl-C stops everything", deadline=400)
        yield script


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_two_instances_share_the_pool(free_ports: None) -> None:
    with running("run.sh") as script:
        assert script.end(400) == 0, script.output
    assert "verified: instance 1 read from the pool what instance 0 had computed" in script.output
    assert script.left_behind() == []


def test_the_conversation_is_verified_and_ends_with_a_table(kept: Script) -> None:
    assert "verified: prefill read from the pool what decode had generated" in kept.output
    assert re.search(r"^request +prompt tokens +own cache +pool +computed +first token", kept.output, re.MULTILINE)


def test_the_usage_of_a_turn_tells_where_its_prompt_came_from(kept: Script) -> None:
    found = re.search(r"^turn 3 +(\d+) +(\d+) +(\d+) +(\d+) ", kept.output, re.MULTILINE)
    assert found is not None
    prompt, own, pool, computed = map(int, found.groups())
    assert prompt == own + pool + computed
    assert pool >= 64


@pytest.mark.parametrize("url", [ROUTER, DECODE], ids=["router", "instance"])
def test_the_openai_client_gets_one_answer_streaming_and_not(kept: Script, url: str) -> None:
    with client(url) as ai:
        model = ai.models.list().data[0].id if url == DECODE else "default"
        whole = ai.chat.completions.create(model=model, messages=[QUESTION], max_tokens=12, temperature=0)
        stream = ai.chat.completions.create(model=model, messages=[QUESTION], max_tokens=12, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert whole.choices[0].message.content
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12


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


def test_ctrl_c_while_starting_leaves_nothing_behind() -> None:
    with running("run.sh") as script:
        script.wait_for("starting instance_1", deadline=60)
        script.interrupt()
        assert script.end(60) == 130
    assert script.left_behind() == []


def test_a_child_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with running("run.sh", MODEL_NAME=str(tmp_path)) as script:
        assert script.end(60) == 1
    assert f"engine.api_server: --model '{tmp_path}' is not a checkpoint" in script.output
    assert "run.sh: instance_" in script.output.splitlines()[-1]
    assert script.left_behind() == []


def complaint(name: str, *arguments: str, **environment: str) -> str:
    """What the script says on standard error when it refuses to start."""
    ended = subprocess.run(
        [EXAMPLES / name, *arguments],
        env=script_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    return ended.stderr


def test_a_busy_port_is_named_with_what_it_was_for() -> None:
    with socket.create_server(("127.0.0.1", 52500)):
        said = complaint("run_pd_storage.sh")
    assert said == "run_pd_storage.sh: port 52500, wanted for decode, is in use; ss -tanp shows by what\n"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"MODEL_NAME": "/no/such/model"}, "MODEL_NAME=/no/such/model: there is no such folder; give "),
        ({"ENGINE": "fastdeply"}, "ENGINE=fastdeply is not known; use kvstore or fastdeploy"),
        ({"ROUTER": "nginx"}, "ROUTER=nginx is not known; use kvstore or fastdeploy"),
    ],
)
def test_a_wrong_choice_is_said_in_one_sentence(environment: dict[str, str], sentence: str) -> None:
    said = complaint("run_pd_storage.sh", **environment)
    assert said.startswith(f"run_pd_storage.sh: {sentence}")
    assert said.count("\n") == 1


def test_a_wrong_argument_is_said_in_one_sentence() -> None:
    assert complaint("run.sh", "--kep") == "run.sh: unknown argument '--kep'; the only one is --keep\n"
