"""kvstore why-miss, on folders and stand-ins."""

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
    """A pool with two set-ups."""
    found = folder_url(tmp_path / "pool")
    for namespace in (FIRST, SECOND):
        fill_pool(load_config(found), namespace, TOKENS)
    return found


def write(path: Path, prompt: object) -> Path:
    path.write_text(prompt if isinstance(prompt, str) else json.dumps(prompt))
    return path


@contextlib.contextmanager
def server(status: int, told: object) -> Iterator[tuple[str, list[Any]]]:
    """Stands in for an instance or a router that answers everything so: its address, and what it was asked."""
    asked: list[Any] = []

    def answer(request: Asked) -> tuple[int, object]:
        asked.append((request.path, request.headers["Authorization"], request.body))
        return status, told

    with JsonServer(answer) as listening:
        yield listening.address, asked


def test_two_namespaces_of_a_pool_are_compared(url: str, kvstore: Commands) -> None:
    told = kvstore("why-miss", url, "--between", FIRST.digest, SECOND.digest[:8], "--json").told
    assert told["details"]["fields"] == {"model": ["first", "second"]}
    lines = kvstore("why-miss", url, "--between", FIRST.digest, FIRST.digest).output
    assert lines.startswith("same_setup: ")


def test_two_instances_are_compared_without_a_pool(kvstore: Commands) -> None:
    other = Manifest({**FIRST.fields, "kv_dtype": "bfloat16"})
    with (
        server(200, {"manifest": Manifest(FIRST.fields).to_json()}) as (first, _),
        server(200, {"manifest": other.to_json()}) as (second, _),
    ):
        told = kvstore("why-miss", "--between", first, f"http://{second}", "--json").told
    assert told["reason"] == "other_dtype"
    assert f"'float32' of {first}, 'bfloat16' of http://{second}" in told["sentence"]


def test_prompts_of_token_ids_are_compared(tmp_path: Path, kvstore: Commands) -> None:
    stored, asked = write(tmp_path / "a", TOKENS), write(tmp_path / "b", [*TOKENS[:6], 99, *TOKENS[7:], 1])
    told = kvstore("why-miss", "--prompt-file", asked, "--compare-with", stored, "--json").told
    assert (told["reason"], told["details"]["token"], told["details"]["second"]) == ("diverges", 6, "99")


def test_prompts_are_converted_to_tokens_by_an_instance(tmp_path: Path, kvstore: Commands) -> None:
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    talk, text = write(tmp_path / "talk", {**messages, "model": "m"}), write(tmp_path / "t", "Hi")
    with server(200, {"tokens": TOKENS}) as (instance, asked):
        ended = kvstore("why-miss", "--instance", instance, "--prompt-file", talk, "--compare-with", text)
    assert ended.output == "same_prompt: both prompts have the same 12 tokens\n"
    assert [(path, body) for path, _, body in asked] == [("/tokenize", {"prompt": "Hi"}), ("/tokenize", messages)]


@pytest.mark.parametrize(
    ("status", "told", "said"),
    [
        (404, {"detail": "Not Found"}, "answered with status 404: it is other software"),
        (400, {"error": {"message": "messages: one is empty"}}, "answered with status 400: messages: one is empty"),
        (200, {"tokens": "many"}, "did not return a list of token ids from /tokenize"),
        (200, ["so"], "answered with status 200: it is other software"),
    ],
)
def test_an_instance_that_does_not_answer_as_one_is_one_sentence(
    tmp_path: Path, status: int, told: object, said: str, kvstore: Commands
) -> None:
    text = write(tmp_path / "t", "Hi")
    with server(status, told) as (instance, _):
        ended = kvstore("why-miss", "--instance", instance, "--prompt-file", text, "--compare-with", text)
    assert said in ended.sentence


def test_nobody_there_is_one_sentence(kvstore: Commands) -> None:
    gone = f"127.0.0.1:{free_port()}"
    assert f"no instance answers at {gone}" in kvstore("why-miss", "--between", gone, gone).sentence
    dead = kvstore("why-miss", f"mooncake://{gone}", "--between", "aaaa", "bbbb").sentence
    assert "aaaa" not in dead
    assert gone.partition(":")[2] in dead


def test_an_empty_pool_a_pool_of_anothers_and_no_pool_are_one_sentence_each(tmp_path: Path, kvstore: Commands) -> None:
    folder = tmp_path / "pool"
    arguments = ("why-miss", folder_url(folder), "--between", FIRST.digest, SECOND.digest)
    assert "no process has opened this pool yet" in kvstore(*arguments).sentence
    store = Announcing(open_store(load_config(folder_url(folder))))
    assert "the pool has no namespace" in kvstore(*arguments).sentence
    lie = Memory(b"?" * MANIFEST_BYTES)
    assert all(store.put(["theirs", manifest_key(FIRST.digest)], [lie.value] * 2))
    assert "has no valid manifest in the pool" in kvstore(*arguments).sentence or "other software"
    assert all(store.exists(["theirs", manifest_key(FIRST.digest)]))
    store.close()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    assert (
        "it is not the folder of a pool"
        in kvstore("why-miss", folder_url(tmp_path / "photos"), "--between", "aa", "bb").sentence
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
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
def test_what_cannot_be_asked_is_one_sentence(url: str, kvstore: Commands, arguments: list[str], said: str) -> None:
    assert said in kvstore("why-miss", url, *arguments).sentence


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a text", "give --model FOLDER, or --instance HOST:PORT"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "only an instance can convert messages to tokens"),
        *(([1, wrong], "must have a text, messages or a list of token ids") for wrong in (-2, 1 << 32, True)),
        ([], "must have a text, messages or a list of token ids"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, kvstore: Commands, prompt: object, said: str
) -> None:
    asked = write(tmp_path / "prompt", prompt)
    assert said in kvstore("why-miss", "--prompt-file", asked, "--compare-with", asked).sentence
