"""Files with secrets: API keys of clients, and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.settings import ApiKey, SettingsError, read_keys, read_token


def write(folder: Path, text: str) -> Path:
    path = folder / "secrets"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("# two of ours\nalice: sk-1\nbob: 'sk-2'\n", {"alice": "sk-1", "bob": "sk-2"}),
        ("sk-1\n\n sk-2 \n", {"key1": "sk-1", "key2": "sk-2"}),
        ("alice: 0123", {"alice": "0123"}),
    ],
)
def test_keys_are_read_with_their_names(tmp_path: Path, text: str, keys: dict[str, str]) -> None:
    assert read_keys(write(tmp_path, text), "--keys") == {name: ApiKey(key) for name, key in keys.items()}


@pytest.mark.parametrize(
    "text",
    [
        "alice: sk-1\nbob: {key: sk-2, tokens_per_sec: 500, priority: -3}\n",
        "alice: {key: sk-1}\nbob:\n  key: 'sk-2'\n  tokens_per_sec: 5e2\n  priority: '-3'\n",
    ],
)
def test_a_key_can_have_a_rate_and_a_priority(tmp_path: Path, text: str) -> None:
    assert read_keys(write(tmp_path, text), "--keys") == {"alice": ApiKey("sk-1"), "bob": ApiKey("sk-2", 500.0, -3)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n\n", "is empty"),
        ("a: k1\na: k2", "the name 'a' is given twice"),
        ("a: k1\nb: k1", "'a' and 'b' have the same key"),
        ("k1\nk1", "'key1' and 'key2' have the same key"),
        ("a: 'k 1'", "the key of 'a' is empty or has a space in it"),
        ("a:", "the key of 'a' is empty or has a space in it"),
        ("a: [k1]", "must have lines 'name: key'"),
        ("a: k1\nk2", "must have lines 'name: key'"),
        ("a: {key: [k1]}", "must have lines 'name: key'"),
        ("a: {priority: 1}", "'a' has no 'key'"),
        ("a: {key: k1, rate: 1}", "'a' has a member that is not one of key, tokens_per_sec, priority"),
        ("a: {k1}", "'a' has a member that is not one of key, tokens_per_sec, priority"),
        ("a: {key: k1, key: k2}", "'a' has 'key' twice"),
        ("a: {key: k1, tokens_per_sec: many}", "'a' has tokens_per_sec 'many'; it must be 0 or more"),
        ("a: {key: k1, tokens_per_sec: -1}", "'a' has tokens_per_sec '-1'; it must be 0 or more"),
        ("a: {key: k1, tokens_per_sec: .inf}", "'a' has tokens_per_sec '.inf'; it must be 0 or more"),
        ("a: {key: k1, priority: 11}", "'a' has priority '11'; it must be a whole number from -10 to 10"),
        ("a: {key: k1, priority: high}", "'a' has priority 'high'; it must be a whole number from -10 to 10"),
    ],
)
def test_the_error_for_a_wrong_file_is_one_sentence_without_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_keys(write(tmp_path, text), "server.api-keys-file")
    assert message in str(refused.value)
    assert "server.api-keys-file" in str(refused.value)
    assert not {"k1", "k2"} & set(str(refused.value).split())


def test_a_token_is_the_only_line(tmp_path: Path) -> None:
    assert read_token(write(tmp_path, "# ours\n\n s3cret \n"), "--token") == "s3cret"


@pytest.mark.parametrize("text", ["a\nb\n", "a b\n"])
def test_a_token_file_has_one_token(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="must have the token as its only line"):
        read_token(write(tmp_path, text), "--token")


def test_the_error_for_a_file_that_is_not_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match=r"--token .*/secrets is not text in UTF-8"):
        read_token(tmp_path / "secrets", "--token")
