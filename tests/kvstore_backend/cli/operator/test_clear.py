"""kvstore clear removes what is named, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_backend.config import load_config
from kvstore_backend.manifest import manifest_key
from tests.kvstore_backend.cli.operator.pools import Commands, fill_pool, folder_url, space
from tests.kvstore_backend.cli.operator.pools import stored_keys as stored

FIRST, SECOND = space("first"), space("second")
PROMPT = list(range(12))


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A pool with two namespaces, of three blocks each."""
    url = folder_url(tmp_path / "pool")
    for namespace in (FIRST, SECOND):
        fill_pool(load_config(url), namespace, PROMPT)
    return url


def count(folder: Path) -> dict[str, int]:
    """The blocks of each namespace in the pool's folder."""
    keys = stored(folder / "pool")
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
def test_what_is_named_is_removed_and_counted(
    tmp_path: Path, url: str, kvstore: Commands, named: list[str], left: dict[str, int]
) -> None:
    would = kvstore("clear", url, *named, "--dry-run", "--json").told
    assert count(tmp_path) == {"first": 3, "second": 3}
    told = kvstore("clear", url, *named, "--json").told
    assert count(tmp_path) == left
    assert sum(told["removed"].values()) == sum(would["removed"].values()) == 6 - sum(left.values())
    # A namespace's description is none of its blocks.
    assert len(stored(tmp_path / "pool")) == sum(left.values()) + 2
    assert manifest_key(FIRST.digest).replace("/", "%2F") in stored(tmp_path / "pool")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing is named: give --namespace DIGEST (kvstore ls shows them), --prefix or --tokens"),
        (["--tokens", "0,1,2,3"], "the pool has 2 namespaces: "),
        (["--namespace", FIRST.digest[:7]], "it must be 32 hex digits, or at least the first 8 of them"),
        (["--caches", "--all"], "--caches clears the caches of instances: name them with --instances or --router"),
        (["--namespace", "zz"], "--namespace is 'zz'; it must be 32 hex digits, or at least the first 8 of them"),
        (
            ["--namespace", "00000000"],
            "--namespace is '00000000', but no namespace begins so: the pool has 2 namespaces",
        ),
        (["--namespace", FIRST.digest, "--tokens", "1,2"], "the prefix has 2 tokens, less than one block of 4"),
        (["--namespace", FIRST.digest, "--tokens", "1,x"], "--tokens must be whole numbers with commas between"),
        (["--namespace", FIRST.digest, "--tokens", "1,2,3,-1"], "--tokens cannot be meant so: token ids must be"),
        (["--namespace", FIRST.digest, "--prefix", "text"], "a text is named, but no --model FOLDER"),
        (["--namespace", "0" * 32, "--tokens", "1"], f"the pool has no manifest of namespace {'0' * 32}: say --block"),
        (["--all", "--namespace", FIRST.digest], "--all is everything: leave it out"),
        (["--all", "--tenant", "a"], "--tenant is 'a', but the store file knows no tenants"),
    ],
)
def test_what_cannot_be_meant_removes_nothing(
    tmp_path: Path, url: str, kvstore: Commands, arguments: list[str], sentence: str
) -> None:
    assert sentence in kvstore("clear", url, *arguments).sentence
    assert count(tmp_path) == {"first": 3, "second": 3}


def test_a_text_is_named_by_its_checkpoints_tokens(tmp_path: Path, url: str, kvstore: Commands) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {str(number): number for number in range(12)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    named = ["--namespace", FIRST.digest, "--prefix", "0 1 2 3 4", "--model", tmp_path]
    assert kvstore("clear", url, *named).output == f"1 blocks removed of namespace {FIRST.digest}\n"
    assert count(tmp_path) == {"first": 2, "second": 3}
