"""kvstore why-miss, with folders and stand-ins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_backend.config import load_config
from kvstore_backend.manifest import MANIFEST_BYTES, Manifest, manifest_key
from kvstore_backend.pool import open_store
from tests.kvstore_backend.cli.operator.pools import Commands, fill_pool, folder_url, space
from tests.support.json_http import Asked, JsonServer
from tests.support.memory import Memory
from tests.support.ports import free_port
from tests.support.strict_registration import Announcing

FIRST, SECOND = space("first"), space("second")
TOKENS = list(range(12))


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A pool with two namespaces."""
    pool_url = folder_url(tmp_path / "pool")
    for namespace in (FIRST, SECOND):
        fill_pool(load_config(pool_url), namespace, TOKENS)
    return pool_url


def write(path: Path, prompt: object) -> Path:
    path.write_text(prompt if isinstance(prompt, str) else json.dumps(prompt))
    return path


@contextlib.contextmanager
def server(status: int, content: object) -> Iterator[tuple[str, list[Any]]]:
    """Start a stand-in for an instance or a router with one answer; yield its address and the requests."""
    requests: list[Any] = []

    def answer(request: Asked) -> tuple[int, object]:
        requests.append((request.path, request.headers["Authorization"], request.body))
        return status, content

    with JsonServer(answer) as listening:
        yield listening.address, requests


def test_two_namespaces_of_a_pool_are_compared(url: str, kvstore: Commands) -> None:
    verdict = kvstore("why-miss", url, "--between", FIRST.digest, SECOND.digest[:8], "--json").json
    assert verdict["details"]["fields"] == {"model": ["first", "second"]}
    lines = kvstore("why-miss", url, "--between", FIRST.digest, FIRST.digest).output
    assert lines.startswith("same_setup: ")


def test_two_instances_are_compared_without_a_pool(kvstore: Commands) -> None:
    other = Manifest({**FIRST.fields, "kv_dtype": "bfloat16"})
    with (
        server(200, {"manifest": Manifest(FIRST.fields).to_json()}) as (first, _),
        server(200, {"manifest": other.to_json()}) as (second, _),
    ):
        verdict = kvstore("why-miss", "--between", first, f"http://{second}", "--json").json
    assert verdict["reason"] == "other_dtype"
    assert f"'float32' of {first}, 'bfloat16' of http://{second}" in verdict["sentence"]


def test_prompts_of_token_ids_are_compared(tmp_path: Path, kvstore: Commands) -> None:
    stored, prompt = write(tmp_path / "a", TOKENS), write(tmp_path / "b", [*TOKENS[:6], 99, *TOKENS[7:], 1])
    verdict = kvstore("why-miss", "--prompt-file", prompt, "--compare-with", stored, "--json").json
    assert (verdict["reason"], verdict["details"]["token"], verdict["details"]["second"]) == ("diverges", 6, "99")


def test_prompts_are_converted_to_tokens_by_an_instance(tmp_path: Path, kvstore: Commands) -> None:
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    talk, text = write(tmp_path / "talk", {**messages, "model": "m"}), write(tmp_path / "t", "Hi")
    with server(200, {"tokens": TOKENS}) as (instance, requests):
        ended = kvstore("why-miss", "--instance", instance, "--prompt-file", talk, "--compare-with", text)
    assert ended.output == "same_prompt: both prompts have the same 12 tokens\n"
    assert [(path, body) for path, _, body in requests] == [("/tokenize", {"prompt": "Hi"}), ("/tokenize", messages)]


@pytest.mark.parametrize(
    ("status", "content", "sentence"),
    [
        (404, {"detail": "Not Found"}, "answered with status 404: it is other software"),
        (400, {"error": {"message": "messages: one is empty"}}, "answered with status 400: messages: one is empty"),
        (200, {"tokens": "many"}, "did not return a list of token ids from /tokenize"),
        (200, ["so"], "answered with status 200: it is other software"),
    ],
)
def test_an_unexpected_answer_of_an_instance_gets_one_sentence(
    tmp_path: Path, status: int, content: object, sentence: str, kvstore: Commands
) -> None:
    text = write(tmp_path / "t", "Hi")
    with server(status, content) as (instance, _):
        ended = kvstore("why-miss", "--instance", instance, "--prompt-file", text, "--compare-with", text)
    assert sentence in ended.sentence


def test_an_unreachable_instance_or_pool_gets_one_sentence(kvstore: Commands) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert f"no instance answers at {address}" in kvstore("why-miss", "--between", address, address).sentence
    dead = kvstore("why-miss", f"mooncake://{address}", "--between", "aaaa", "bbbb").sentence
    assert "aaaa" not in dead
    assert address.partition(":")[2] in dead


def test_a_pool_without_a_namespace_gets_one_sentence(tmp_path: Path, kvstore: Commands) -> None:
    folder = tmp_path / "pool"
    arguments = ("why-miss", folder_url(folder), "--between", FIRST.digest, SECOND.digest)
    assert "no process has opened this pool yet" in kvstore(*arguments).sentence
    store = Announcing(open_store(load_config(folder_url(folder))))
    assert "the pool has no namespace" in kvstore(*arguments).sentence
    invalid = Memory(b"?" * MANIFEST_BYTES)
    assert all(store.put(["theirs", manifest_key(FIRST.digest)], [invalid.value] * 2))
    assert "in it are of other software" in kvstore(*arguments).sentence
    assert all(store.exists(["theirs", manifest_key(FIRST.digest)]))
    store.close()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    assert (
        "it is not the folder of a pool"
        in kvstore("why-miss", folder_url(tmp_path / "photos"), "--between", "aa", "bb").sentence
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt-file", "x"], "--prompt-file is compared with an earlier prompt; also give --compare-with FILE"),
        (["--between", "nowhere:1/x", "eeee"], "the pool has no namespace 'nowhere:1/x'"),
        (
            ["--prompt-file", "x", "--compare-with", "/nowhere/at/all"],
            "--compare-with names '/nowhere/at/all', which cannot be read: No such file",
        ),
        (["--between", "ffff", "eeee"], "the pool has no namespace 'ffff'"),
        (["--between", "", FIRST.digest], "the pool has several namespaces that begin with ''"),
    ],
)
def test_unusable_arguments_get_one_sentence(url: str, kvstore: Commands, arguments: list[str], sentence: str) -> None:
    assert sentence in kvstore("why-miss", url, *arguments).sentence


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("a text", "give --model FOLDER, or --instance HOST:PORT"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "only an instance can convert messages to tokens"),
        *(([1, wrong], "must have a text, messages or a list of token ids") for wrong in (-2, 1 << 32, True)),
        ([], "must have a text, messages or a list of token ids"),
    ],
)
def test_a_prompt_that_cannot_be_read_gets_one_sentence(
    tmp_path: Path, kvstore: Commands, prompt: object, sentence: str
) -> None:
    path = write(tmp_path / "prompt", prompt)
    assert sentence in kvstore("why-miss", "--prompt-file", path, "--compare-with", path).sentence
