"""kvstore clear removes the selected blocks, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore_backend.backend import Status
from kvstore_backend.cli.operator import clear
from kvstore_backend.config import load_config
from kvstore_backend.manifest import manifest_key
from kvstore_backend.pool import open_store
from kvstore_backend.stores.file import FileStore
from kvstore_backend.stores.holdings import FolderHoldings
from tests.kvstore_backend.cli.operator.pools import Commands, fill_pool, folder_url, list_keys, space
from tests.support.json_http import Asked, JsonServer
from tests.support.memory import Memory
from tests.support.ports import free_ports

FIRST, SECOND = space("first"), space("second")
PROMPT = list(range(12))


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A pool with two namespaces, of three blocks each."""
    url = folder_url(tmp_path / "pool")
    for namespace in (FIRST, SECOND):
        fill_pool(load_config(url), namespace, PROMPT)
    return url


def count_blocks(folder: Path) -> dict[str, int]:
    """Count the blocks of each namespace in the pool's folder."""
    keys = list_keys(folder / "pool")
    return {each.model: sum(key.startswith(each.prefix) for key in keys) for each in (FIRST, SECOND)}


@pytest.mark.parametrize(
    ("named", "left"),
    [
        (["--namespace", FIRST.digest], {"first": 0, "second": 3}),
        (["--namespace", FIRST.digest[:8]], {"first": 0, "second": 3}),
        (["--namespace", FIRST.digest, "--tokens", "0,1,2,3,4,5,6,7,7,7,7,7"], {"first": 1, "second": 3}),
        (["--namespace", FIRST.digest, "--namespace", SECOND.digest, "--tokens", "0,1,2,3"], {"first": 2, "second": 2}),
        (["--namespace", FIRST.digest, "--tokens", "0,1,2,3", "--salt", "no"], {"first": 3, "second": 3}),
        (["--namespace", "0" * 32], {"first": 3, "second": 3}),
        (["--all"], {"first": 0, "second": 0}),
    ],
)
def test_the_selected_blocks_are_removed_and_counted(
    tmp_path: Path, url: str, kvstore: Commands, named: list[str], left: dict[str, int]
) -> None:
    planned = kvstore("clear", url, *named, "--dry-run", "--json").json
    assert count_blocks(tmp_path) == {"first": 3, "second": 3}
    report = kvstore("clear", url, *named, "--json").json
    assert count_blocks(tmp_path) == left
    assert sum(report["removed"].values()) == sum(planned["removed"].values()) == 6 - sum(left.values())
    # The manifests of the namespaces remain.
    assert len(list_keys(tmp_path / "pool")) == sum(left.values()) + 2
    assert manifest_key(FIRST.digest).replace("/", "%2F") in list_keys(tmp_path / "pool")


def test_all_blocks_of_a_pool_that_cannot_list_its_keys_are_removed_and_counted(
    tmp_path: Path, url: str, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderHoldings, "is_listed", False)  # as with a tenant of Mooncake
    assert kvstore("clear", url, "--all").output == "6 blocks removed of all namespaces\n"
    assert count_blocks(tmp_path) == {"first": 0, "second": 0}


def test_blocks_that_arrive_in_the_next_seconds_are_also_removed_and_counted(
    tmp_path: Path, url: str, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        fill_pool(load_config(url), FIRST, PROMPT)

    monkeypatch.setattr(clear, "_SETTLE_SECONDS", 6.0)
    monkeypatch.setattr(clear, "time", SimpleNamespace(sleep=wait))
    report = kvstore("clear", url, "--namespace", FIRST.digest, "--json").json
    assert waits == [6.0]
    assert (report["removed"], report["removed_late"]) == ({FIRST.digest: 3}, 3)
    assert count_blocks(tmp_path) == {"first": 0, "second": 3}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no blocks are selected; give --namespace DIGEST (kvstore ls shows digests), --prefix or --tokens"),
        (["--tokens", "0,1,2,3"], "the pool has 2 namespaces: "),
        (["--namespace", FIRST.digest[:7]], "it must be 32 hex digits, or at least the first 8 of them"),
        (["--caches", "--all"], "--caches clears the own caches of instances; name them with --instances or --router"),
        (["--namespace", "zz"], "--namespace is 'zz'; it must be 32 hex digits, or at least the first 8 of them"),
        (
            ["--namespace", "00000000"],
            "--namespace is '00000000', but no digest begins with it; the pool has 2 namespaces",
        ),
        (["--namespace", FIRST.digest, "--tokens", "1,2"], "the prefix has 2 tokens, less than one block of 4"),
        (["--namespace", FIRST.digest, "--tokens", "1,x"], "--tokens must be whole numbers separated by commas"),
        (
            ["--namespace", FIRST.digest, "--tokens", "1,2,3,-1"],
            "the tokens of the prefix cannot be used: token ids must be",
        ),
        (["--namespace", FIRST.digest, "--prefix", "text"], "a text needs a tokenizer; give --model FOLDER"),
        (
            ["--namespace", "0" * 32, "--tokens", "1"],
            f"the pool has no manifest (description) of namespace {'0' * 32}; also give --block-size",
        ),
        (["--all", "--namespace", FIRST.digest], "--all removes the blocks of all namespaces; leave out --all"),
        (["--all", "--tenant", "a"], "--tenant is 'a', but a file pool has no tenants"),
    ],
)
def test_an_invalid_selection_removes_nothing(
    tmp_path: Path, url: str, kvstore: Commands, arguments: list[str], sentence: str
) -> None:
    assert sentence in kvstore("clear", url, *arguments).sentence
    assert count_blocks(tmp_path) == {"first": 3, "second": 3}


def test_a_text_is_converted_with_the_tokenizer_of_a_checkpoint(tmp_path: Path, url: str, kvstore: Commands) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {str(number): number for number in range(12)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    named = ["--namespace", FIRST.digest, "--prefix", "0 1 2 3 4", "--model", tmp_path]
    assert kvstore("clear", url, *named).output == f"1 blocks removed of namespace {FIRST.digest}\n"
    assert count_blocks(tmp_path) == {"first": 2, "second": 3}


def terminal(monkeypatch: pytest.MonkeyPatch, answer: str) -> list[str]:
    """Replace the terminal by one that gives this answer; return the list of its questions."""
    questions: list[str] = []

    def reply(question: str) -> str:
        questions.append(question)
        if not answer:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", reply)
    monkeypatch.setattr(clear, "_is_terminal", lambda: True)
    return questions


@pytest.mark.parametrize(
    ("answer", "is_removed"), [("y", True), ("Yes ", True), ("n", False), ("no", False), ("", False)]
)
def test_the_command_asks_for_confirmation_on_a_terminal(
    tmp_path: Path, url: str, kvstore: Commands, monkeypatch: pytest.MonkeyPatch, answer: str, is_removed: bool
) -> None:
    questions = terminal(monkeypatch, answer)
    ended = kvstore("clear", url, "--namespace", FIRST.digest)
    assert questions == ["remove them? [y/N] "]
    assert f"3 blocks of namespace {FIRST.digest}\n" in ended.output
    assert ended.status == (0 if is_removed else 1)
    assert ("nothing was removed" in ended.output) != is_removed
    assert count_blocks(tmp_path) == {"first": 0 if is_removed else 3, "second": 3}


@pytest.mark.parametrize("flags", [["--yes"], ["--json"], ["--dry-run"]])
def test_a_script_is_not_asked(url: str, kvstore: Commands, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    questions = terminal(monkeypatch, "n")
    assert kvstore("clear", url, "--all", *flags).status == 0
    assert questions == []


class Fleet:
    """One server that answers for a router and its instances."""

    def __init__(self, answers: dict[str, tuple[int, object]]) -> None:
        self.paths: list[str] = []
        self._answers = answers

    def answer(self, request: Asked) -> tuple[int, object]:
        self.paths.append(request.path)
        return self._answers.get(request.path, (404, {}))


@pytest.mark.parametrize(
    ("digest", "cached", "sentence"),
    [
        (FIRST.digest, 31, "still has 31 blocks in its own cache; --caches clears it"),
        (FIRST.digest, 0, "has no blocks in its own cache"),
        (SECOND.digest, 31, ""),
        (None, None, "does not report its own cache; --caches clears the cache"),
    ],
)
def test_the_blocks_in_the_own_caches_of_instances_are_reported(
    url: str, kvstore: Commands, digest: str | None, cached: int | None, sentence: str
) -> None:
    report = {"digest": digest, "cached_blocks": cached} if digest else {"error": "no path"}
    fleet = Fleet({"/kvcache": (200 if digest else 404, report)})
    with JsonServer(fleet.answer) as server:
        ended = kvstore("clear", url, "--namespace", FIRST.digest, "--instances", server.address)
        assert ended.status == 0, ended.errors
        report = kvstore("clear", url, "--namespace", FIRST.digest, "--json", "--instances", server.address).json
        assert report["cached_blocks"] == ({server.address: cached} if sentence else {})
    assert ended.output.splitlines()[1:] == ([f"the instance at {server.address} {sentence}"] if sentence else [])


def test_a_cache_is_cleared_by_the_first_path_that_the_instance_has(url: str, kvstore: Commands) -> None:
    fleet = Fleet({"/flush_cache": (200, {}), "/kvcache": (200, {"digest": FIRST.digest, "cached_blocks": 0})})
    with JsonServer(fleet.answer) as server:
        named = ["--namespace", FIRST.digest, "--caches", "--instances", server.address]
        assert kvstore("clear", url, *named).status == 0
    assert fleet.paths == ["/clear_prefix_cache", "/reset_prefix_cache", "/flush_cache", "/kvcache"]


def test_an_instance_that_does_not_clear_its_cache_is_reported(tmp_path: Path, url: str, kvstore: Commands) -> None:
    with JsonServer(Fleet({"/clear_prefix_cache": (503, {})}).answer) as server:
        ended = kvstore("clear", url, "--all", "--caches", "--instances", server.address)
    assert (
        ended.sentence == f"the instance at {server.address} did not clear its own cache; it answered with status 503"
    )
    assert count_blocks(tmp_path) == {"first": 0, "second": 0}


def test_a_router_lists_its_instances_and_clears_their_caches(tmp_path: Path, url: str, kvstore: Commands) -> None:
    answers: dict[str, tuple[int, object]] = {"/kvcache": (200, {"digest": FIRST.digest, "cached_blocks": 2})}
    fleet = Fleet(answers)
    token = tmp_path / "token"
    token.write_text("secret\n")
    with JsonServer(fleet.answer) as server:
        host, _, port = server.address.partition(":")
        answers["/registered"] = 200, {"mixed": [{"host_ip": host, "port": int(port)}], "prefill": [], "decode": []}
        answers["/admin/clear_prefix_cache"] = 502, {"instances": {"a:1": "success", "b:2": "it is away"}}
        named = ["--namespace", FIRST.digest, "--router", server.address, "--token-file", token]
        assert f"{server.address} still has 2 blocks" in kvstore("clear", url, *named).output
        assert (
            kvstore("clear", url, *named, "--caches").sentence
            == "the instance at b:2 did not clear its own cache: it is away"
        )
        answers["/admin/clear_prefix_cache"] = 401, {}
        assert "cleared no caches; it answered with status 401" in kvstore("clear", url, *named, "--caches").sentence


def test_removed_blocks_are_counted_if_no_instance_answers(tmp_path: Path, url: str, kvstore: Commands) -> None:
    [port] = free_ports(1)
    ended = kvstore("clear", url, "--namespace", FIRST.digest, "--instances", f"127.0.0.1:{port}")
    assert ended.output == f"3 blocks removed of namespace {FIRST.digest}\n"
    assert ended.sentence.startswith(f"no instance answers at 127.0.0.1:{port}: ")
    assert count_blocks(tmp_path) == {"first": 0, "second": 3}


@pytest.mark.parametrize("flags", [[], ["--caches"]])
def test_nothing_is_removed_if_the_router_does_not_answer(
    tmp_path: Path, url: str, kvstore: Commands, flags: list[str]
) -> None:
    [port] = free_ports(1)
    ended = kvstore("clear", url, "--namespace", FIRST.digest, "--router", f"127.0.0.1:{port}", *flags)
    assert ended.sentence.startswith(f"no router answers at 127.0.0.1:{port}: ")
    assert count_blocks(tmp_path) == {"first": 3, "second": 3}
    assert not list((tmp_path / "pool").glob("blocks/*/kvstore-cleared*"))


def test_a_pool_that_is_named_after_the_instances_is_refused(
    tmp_path: Path, url: str, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder_url(tmp_path / "other")
    fill_pool(load_config(other), FIRST, PROMPT)
    monkeypatch.setenv("KVSTORE_FILE_PATH", str(tmp_path / "pool"))
    ended = kvstore("clear", "--namespace", FIRST.digest, "--instances", "127.0.0.1:1", other)
    assert ended.sentence.startswith(f"--instances has {other!r}, which is not HOST:PORT; write the configuration")
    assert count_blocks(tmp_path) == {"first": 3, "second": 3}


def test_a_pool_that_stores_no_mark_is_cleared_with_an_error(
    tmp_path: Path, url: str, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clear, "_write_mark", lambda holdings, key: False)
    assert ("the pool did not store the mark that tells instances of this removal") in kvstore(
        "clear", url, "--namespace", FIRST.digest
    ).sentence
    assert count_blocks(tmp_path) == {"first": 0, "second": 3}


def test_the_default_pool_is_that_of_the_instance(
    tmp_path: Path, url: str, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("MOONCAKE_", "KVSTORE_"))]:
        monkeypatch.delenv(name)
    fleet = Fleet({"/kvcache": (200, {"pool": {"url": url}, "digest": FIRST.digest, "cached_blocks": 0})})
    with JsonServer(fleet.answer) as server:
        assert kvstore("clear", "--namespace", FIRST.digest, "--instances", server.address).status == 0
        stats = kvstore("stats", "--instances", server.address)
        assert "cannot be read" in stats.sentence  # so the pool was found
    assert count_blocks(tmp_path) == {"first": 0, "second": 3}
    with JsonServer(Fleet({"/kvcache": (200, {"pool": None})}).answer) as server:
        ended = kvstore("clear", "--namespace", FIRST.digest, "--instances", server.address)
    assert (
        ended.sentence
        == f"the instance at {server.address} does not report which pool it uses; give the pool as CONFIG"
    )


def test_the_error_names_at_most_four_namespaces(tmp_path: Path, kvstore: Commands) -> None:
    url, digests = folder_url(tmp_path / "pool"), []
    for number in range(6):
        digests.append(space(str(number)).digest)
        fill_pool(load_config(url), space(str(number)), PROMPT[:4])
        if number == 3:
            four = ", ".join(sorted(digests))
            assert f"the pool has 4 namespaces: {four}; choose" in kvstore("clear", url, "--tokens", "0,1,2,3").sentence
    named = ", ".join(sorted(digests)[:4])
    assert (
        f"the pool has 6 namespaces: {named} and 2 more; "
        "choose" in kvstore("clear", url, "--tokens", "0,1,2,3").sentence
    )


def test_keys_of_other_software_are_counted_and_not_selected(tmp_path: Path, kvstore: Commands) -> None:
    url, memory = folder_url(tmp_path / "pool"), Memory(b"theirs")
    store = open_store(load_config(url))
    sentence = kvstore("clear", url, "--tokens", "0,1,2,3").sentence
    assert sentence == "the pool has no blocks to select"
    store.register(memory.address, memory.nbytes)
    assert all(store.put(["theirs", "more"], [memory.value] * 2))
    store.unregister(memory.address, memory.nbytes)
    store.close()
    sentence = kvstore("clear", url, "--tokens", "0,1,2,3").sentence
    assert sentence == "the pool has no blocks to select, only 2 keys of other software"


def test_a_prefix_without_a_namespace_selects_the_only_namespace(tmp_path: Path, kvstore: Commands) -> None:
    url = folder_url(tmp_path / "pool")
    fill_pool(load_config(url), FIRST, PROMPT)
    assert kvstore("clear", url, "--tokens", "0,1,2,3,4,5,6,7", "--json").json["removed"] == {FIRST.digest: 2}


def test_the_command_fails_if_blocks_cannot_be_removed(
    url: str, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileStore, "remove", lambda _self, keys, *, force: [Status.FAILED] * len(keys))
    ended = kvstore("clear", url, "--namespace", FIRST.digest)
    assert "0 blocks were removed; 3 could not be removed and may still be in the pool" in ended.sentence
