"""kvstore why-miss, on folders and stand-ins; what it finds in each situation is in tests/engine/telemetry/why_miss."""

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


def test_a_prompt_of_token_ids_is_looked_for(url: str, tmp_path: Path, kvstore: Commands) -> None:
    stored, asked = write(tmp_path / "a", TOKENS), write(tmp_path / "b", [*TOKENS[:6], 99, *TOKENS[7:], 1])
    told = kvstore(
        "why-miss", url, "--namespace", FIRST.digest, "--prompt-file", asked, "--compare-with", stored, "--json"
    ).told
    assert (told["reason"], told["details"]["token"], told["details"]["block"]) == ("parts", 6, 1)


def test_a_request_is_asked_of_the_router_with_its_token(tmp_path: Path, kvstore: Commands) -> None:
    token = write(tmp_path / "token", "# the admin's\nsecret\n")
    told = {"reason": "slow", "why_miss": "computing it was quicker", "details": {}}
    with server(200, told) as (router, asked):
        ended = kvstore("why-miss", "--router", router, "--request-id", "a/b", "--token-file", token)
    assert ended.output == "slow: computing it was quicker\n"
    assert asked == [("/admin/why_miss/a%2Fb", "Bearer secret", None)]


def test_a_prompt_is_asked_of_an_instance(tmp_path: Path, kvstore: Commands) -> None:
    talk, text = (
        write(tmp_path / "talk", {"messages": [{"role": "user", "content": "Hi"}]}),
        write(tmp_path / "t", "Hi"),
    )
    with server(200, {"reason": "new", "sentence": "it is new", "details": {}}) as (instance, asked):
        assert kvstore("why-miss", "--instance", instance, "--prompt-file", talk, "--salt", "s").status == 0
        assert kvstore("why-miss", "--instance", instance, "--prompt-file", text, "--compare-with", talk).status == 0
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    assert [body for *_, body in asked] == [{**messages, "cache_salt": "s"}, {"prompt": "Hi", "compare_with": messages}]


@pytest.mark.parametrize(
    ("status", "told", "said"),
    [
        (404, {"detail": "Not Found"}, "answered 404, and knows nothing of misses"),
        (404, {"error": {"message": "this instance remembers no request 'x'"}}, "remembers no request 'x'"),
        (200, {"reason": "because", "sentence": "so", "details": {}}, "says nothing that is known here"),
        (200, ["so"], "knows nothing of misses"),
    ],
)
def test_an_instance_that_does_not_tell_is_one_sentence(
    status: int, told: object, said: str, kvstore: Commands
) -> None:
    with server(status, told) as (instance, _):
        sentence = kvstore("why-miss", "--instance", instance, "--request-id", "x").sentence
    assert said in sentence


def test_nobody_there_is_one_sentence(kvstore: Commands) -> None:
    gone = f"127.0.0.1:{free_port()}"
    assert f"no router answers at {gone}" in kvstore("why-miss", "--router", gone, "--request-id", "x").sentence
    dead = kvstore("why-miss", f"mooncake://{gone}", "--between", "aaaa", "bbbb").sentence
    assert "aaaa" not in dead
    assert gone.partition(":")[2] in dead


def test_an_empty_pool_a_pool_of_anothers_and_no_pool_are_one_sentence_each(tmp_path: Path, kvstore: Commands) -> None:
    prompt, folder = write(tmp_path / "prompt", TOKENS), tmp_path / "pool"
    arguments = ("why-miss", folder_url(folder), "--prompt-file", prompt)
    assert "no process has opened this pool yet" in kvstore(*arguments).sentence
    store = Announcing(open_store(load_config(folder_url(folder))))
    assert "the pool holds no namespace" in kvstore(*arguments).sentence
    lie = Memory(b"?" * MANIFEST_BYTES)
    assert all(store.put(["theirs", manifest_key(FIRST.digest)], [lie.value] * 2))
    assert "has no manifest in the pool that is true of it" in kvstore(*arguments).sentence or "other software"
    assert all(store.exists(["theirs", manifest_key(FIRST.digest)]))
    store.close()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    assert (
        "it is not a pool's" in kvstore("why-miss", folder_url(tmp_path / "photos"), "--between", "aa", "bb").sentence
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing is asked: give --between A B, --prompt-file FILE or --request-id ID"),
        (["--request-id", "x"], "--request-id needs --router HOST:PORT, or --instance HOST:PORT, and not both"),
        (["--instance", "nowhere", "--request-id", "x"], "--instance is 'nowhere'; it must be HOST:PORT"),
        (["--compare-with", "x"], "--compare-with needs a prompt to compare"),
        (["--prompt-file", "/nowhere/at/all"], "prompt file /nowhere/at/all cannot be read: No such file"),
        (["--between", "ffff", "eeee"], "the pool has no namespace 'ffff'"),
        (["--router", "127.0.0.1:1", "--request-id", "x", "--token-file", "/nowhere"], "--token-file /nowhere cannot"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(url: str, kvstore: Commands, arguments: list[str], said: str) -> None:
    assert said in kvstore("why-miss", url, *arguments).sentence


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a text", "give --model FOLDER for its tokenizer, or --instance HOST:PORT"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "which only an instance renders"),
        ([1, -2], "neither a text nor token ids"),
        ([1, 1 << 32], "neither a text nor token ids"),
        ([1, True], "neither a text nor token ids"),
        ([], "neither a text, nor a list of token ids, nor messages"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_sentence(
    url: str, tmp_path: Path, kvstore: Commands, prompt: object, said: str
) -> None:
    asked = write(tmp_path / "prompt", prompt)
    assert said in kvstore("why-miss", url, "--namespace", FIRST.digest, "--prompt-file", asked).sentence


def test_several_namespaces_are_told_apart_by_hand(url: str, tmp_path: Path, kvstore: Commands) -> None:
    asked = write(tmp_path / "prompt", TOKENS)
    assert "the pool has several namespaces" in kvstore("why-miss", url, "--prompt-file", asked).sentence
