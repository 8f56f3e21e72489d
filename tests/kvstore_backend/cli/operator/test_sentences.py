"""Commands with a pool that is empty, unreachable or foreign write one sentence and remove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_backend.cli.commands import COMMANDS as ALL
from kvstore_backend.config import load_config
from kvstore_backend.pool import open_store
from tests.kvstore_backend.cli.operator.pools import Commands, folder_url, list_keys, space
from tests.support.json_http import JsonServer
from tests.support.memory import Memory
from tests.support.strict_registration import Announcing

SPACE = space("first")
NAMED = ["--namespace", SPACE.digest]
Arguments = Callable[[Path, str], list[object]]

COMMANDS: dict[str, Arguments] = {
    "ls": lambda _, url: ["ls", url],
    "ls of a namespace": lambda _, url: ["ls", url, *NAMED],
    "ls of a prefix": lambda _, url: ["ls", url, *NAMED, "--tokens", "0,1,2,3", "--block-size", "4"],
    "clear": lambda _, url: ["clear", url, *NAMED],
    "clear all": lambda _, url: ["clear", url, "--all"],
    "pin": lambda _, url: ["pin", url, *NAMED],
    "unpin": lambda _, url: ["unpin", url, *NAMED],
}


@pytest.fixture
def other_server() -> Iterator[str]:
    """The address of a server that is not a Mooncake master."""

    with JsonServer(lambda _: (200, {})) as server:
        yield server.address


@pytest.mark.parametrize("name", ["ls", "why-miss", "clear", "pin", "unpin"])
def test_every_command_has_help_that_begins_with_its_summary(kvstore: Commands, name: str) -> None:
    ended = kvstore(name, "--help")
    assert ended.status == 0
    assert ALL[name].summary.split()[0] in ended.output
    assert "--json" in ended.output


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_pool_gets_a_short_answer(tmp_path: Path, kvstore: Commands, name: str) -> None:
    url = folder_url(tmp_path / "empty")
    open_store(load_config(url)).close()
    ended = kvstore(*COMMANDS[name](tmp_path, url), "--json")
    if name in ("pin", "unpin"):
        assert "only Mooncake can" in ended.sentence
    else:
        assert ended.json
    ended = kvstore(*COMMANDS[name](tmp_path, url))
    assert ended.output.count("\n") <= 4
    assert (ended.status == 0) != ended.errors.startswith("kvstore: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unusable_pool_gets_one_sentence(tmp_path: Path, kvstore: Commands, other_server: str, name: str) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "theirs" / "letter").write_text("dear")
    for url, sentence in (
        (folder_url(tmp_path / "nowhere"), f"folder {tmp_path}/nowhere does not exist: no process has opened"),
        (folder_url(tmp_path / "theirs"), "contains letter and no ledger, so it is not the folder of a pool"),
        ("mooncake://127.0.0.1:1?protocol=tcp", "no Mooncake master answers at 127.0.0.1:1 (Connection refused)"),
        (f"mooncake://{other_server}?protocol=tcp", f"an HTTP server answers at {other_server}, not a Mooncake master"),
        ("memory:", "a memory pool belongs to one process"),
    ):
        ended = kvstore(*COMMANDS[name](tmp_path, url), "--json")
        assert sentence in ended.sentence
        assert ended.output == ""
        assert ended.status == 1
    assert not (tmp_path / "nowhere").exists()
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["letter"]


@pytest.mark.parametrize("name", COMMANDS)
def test_keys_of_other_software_are_not_removed(tmp_path: Path, kvstore: Commands, name: str) -> None:
    url = folder_url(tmp_path / "theirs")
    store, memory = Announcing(open_store(load_config(url))), Memory(b"theirs")
    assert all(store.put(["lmcache@key", "kv1-short", "kvstore-manifest/none"], [memory.value] * 3))
    store.close()
    before = list_keys(tmp_path / "theirs")
    ended = kvstore(*COMMANDS[name](tmp_path, url))
    assert ended.status == 0 or ended.sentence
    assert list_keys(tmp_path / "theirs") == before
