"""read_yaml: it returns a document, or raises an error of one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.settings.yaml_file import YamlFileError, read_yaml


@pytest.mark.parametrize(("text", "document"), [("", None), ("a: 1", {"a": 1}), ("- x\n- 2.5", ["x", 2.5])])
def test_a_document_is_read(tmp_path: Path, text: str, document: object) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert read_yaml(path) == document


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: {c: 1, c: 2}", "line 2: 'c' is given twice"),
        (b"a: " + b"1" * 21, "line 1 has a whole number of 21 digits; at most 20 are allowed"),
        (b"a: [", "it is not YAML"),
        (b"\xff", "it is not YAML"),
        (b"[" * 10_000, "its maps and lists are nested too deeply"),
        (b"a: 2026-13-01", "a value in it cannot be read: month must be in 1..12"),
    ],
)
def test_an_error_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    with pytest.raises(YamlFileError) as refused:
        read_yaml(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_longest_number_of_64_bits_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f"a: {2**64 - 1}")
    assert read_yaml(path) == {"a": 2**64 - 1}


def test_the_error_for_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(YamlFileError, match="No such file or directory"):
        read_yaml(tmp_path / "none")
