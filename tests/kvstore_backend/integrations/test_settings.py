"""Settings of an engine in the namespace: texts are equal if the effect is the same, and different if in doubt."""

from __future__ import annotations

import enum
import json
from pathlib import Path

import pytest

from kvstore_backend.backend import ConfigError
from kvstore_backend.integrations.settings import digest_settings, list_facts, read_settings
from kvstore_backend.manifest import Manifest, decode_manifest, encode_manifest
from tests.faults.blocks import NAMESPACE


def text_of(value: object) -> str:
    (text,) = read_settings({"name": value}).values()
    return text


class Kind(enum.Enum):
    FP8 = "fp8"


def test_neutral_settings_are_left_out() -> None:
    assert read_settings({"port": 1, "dtype": "auto"}, {"port"}) == {"dtype": "auto"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": 2}', {"b": 2, "a": 1}),
        ("2", 2),
        (("a", "b"), ["a", "b"]),
        ({"b", "a"}, {"a", "b"}),
        (object(), object()),
        (Kind.FP8, "fp8"),
    ],
)
def test_values_with_the_same_meaning_have_the_same_text(one: object, other: object) -> None:
    assert json.dumps(text_of(one)).strip('"\\') == json.dumps(text_of(other)).strip('"\\')


@pytest.mark.parametrize(
    ("one", "other"), [(None, "none"), (False, 0), (1, 2), ("a", "b"), ([1], [2]), ({"a": 1}, {"a": 2}), (Path, Kind)]
)
def test_different_values_have_different_texts(one: object, other: object) -> None:
    assert text_of(one) != text_of(other)


def test_a_file_counts_by_its_content_and_not_by_its_folder(tmp_path: Path) -> None:
    for folder, content in (("one", "x"), ("two", "x"), ("three", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "scales").write_text(content)
    one, two, three = (text_of({"path": [f"{tmp_path}/{folder}/scales"]}) for folder in ("one", "two", "three"))
    assert one == two != three
    assert text_of(f"{tmp_path}/one") == text_of(f"{tmp_path}/two") != text_of(f"{tmp_path}/three")


def test_names_of_files_in_a_folder_count(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("x")
        texts.append(text_of(f"{tmp_path}/{name}"))
    assert texts[0] != texts[1]


def test_a_folder_with_a_draft_model_counts_as_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_name_or_path": "here"}')
    (tmp_path / "model.bin").write_bytes(b"weights")
    before = text_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"_name_or_path": "there"}')
    assert text_of(str(tmp_path)) == before
    (tmp_path / "model.bin").write_bytes(b"finetun")
    assert text_of(str(tmp_path)) != before


def test_a_folder_with_a_configuration_and_no_weights_counts_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = text_of(str(tmp_path))
    (tmp_path / "tokens.txt").write_text("more")
    assert text_of(str(tmp_path)) != before


def test_a_value_without_a_slash_is_not_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "auto").write_text("x")
    assert text_of("auto") == "auto"


def test_the_error_names_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scales"
    file.write_text("x")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=f"{file} cannot be read: Permission denied"):
        text_of(str(file))


def test_the_digest_depends_on_checkpoint_and_settings() -> None:
    digests = {digest_settings(*each) for each in (("a", {}), ("b", {}), ("a", {"x": "1"}), ("a", {"x": "2"}))}
    assert len(digests) == 4
    assert all(len(digest) == 32 for digest in digests)


def test_facts_are_the_settings_that_are_not_at_their_defaults() -> None:
    assert list_facts({"dtype": "half", "draft": "null"}, {"draft": "null"}) == {"setting dtype": "half"}


def test_a_change_of_any_of_many_settings_changes_the_facts() -> None:
    many = {f"name{i:02}": str(i) for i in range(30)}
    facts = list_facts(many, {})
    assert len(facts) == 11
    assert all(list_facts({**many, name: "other"}, {}) != facts for name in many)


def test_the_longest_facts_fit_a_manifest() -> None:
    facts = list_facts({f"setting_with_a_long_name_{i:02}": f"\n{'x' * 4000}" for i in range(30)}, {})
    manifest = Manifest(NAMESPACE.fields, {"name": "model", "checkpoint": "0" * 32, **facts})
    assert decode_manifest(encode_manifest(manifest), NAMESPACE.digest).facts.keys() >= facts.keys()
    changed = list_facts({f"setting_with_a_long_name_{i:02}": f"\n{'x' * 3999}y" for i in range(30)}, {})
    assert all(changed[name] != text for name, text in facts.items())


@pytest.mark.parametrize("settings", [{"FD_X_API_KEY": "s3cret"}, {"rsync_config": '{"etcd_password": "s3cret"}'}])
def test_a_manifest_contains_no_possible_secret(settings: dict[str, str]) -> None:
    facts = list_facts(settings, {})
    assert "s3cret" not in str(facts)
    assert facts != list_facts({name: f"{text} " for name, text in settings.items()}, {})


def make_adapter(folder: Path, alpha: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
    return folder


def test_an_adapter_in_the_folder_of_a_model_counts_by_its_own_configuration(tmp_path: Path) -> None:
    one, same, other = (make_adapter(tmp_path / str(i), alpha) for i, alpha in enumerate((8, 8, 16)))
    assert text_of(str(one)) == text_of(str(same)) != text_of(str(other))


def test_a_setting_with_the_name_of_a_file_in_the_working_directory_counts_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = []
    for content in ("x", "x", "y"):
        (tmp_path / "scales").write_text(content)
        texts.append(read_settings({"file": {"a": "scales"}, "none": None}, paths={"file", "none"}))
    assert texts[0] == texts[1] != texts[2]


def test_a_setting_with_the_name_of_a_missing_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("scales", "owner/no-such-model-here", "/no/such/file"):
        with pytest.raises(ConfigError, match=f"^file names '{name}', which is neither a file or folder here"):
            read_settings({"file": name}, paths={"file"})
