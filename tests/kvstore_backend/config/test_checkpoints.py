"""The name of a model on a hub is resolved to the folder of its download; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_backend import ConfigError
from kvstore_backend.config import find_checkpoint

NAME = "PaddlePaddle/ERNIE-4.5-0.3B-Paddle"
REVISION = "0123abcd"


def download(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def hugging_face_download(cache: Path, name: str = NAME) -> Path:
    """Create a snapshot in the layout of Hugging Face's library."""
    model = cache / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    return download(model / "snapshots" / REVISION)


@pytest.mark.parametrize(
    ("variable", "cache"),
    [
        (None, ".cache/huggingface/hub"),
        ("XDG_CACHE_HOME", "other/huggingface/hub"),
        ("HF_HOME", "other/hub"),
        ("HUGGINGFACE_HUB_CACHE", "other"),
        ("HF_HUB_CACHE", "other"),
    ],
)
def test_a_model_in_the_cache_of_hugging_face_is_found(variable: str | None, cache: str, tmp_path: Path) -> None:
    snapshot = hugging_face_download(tmp_path / cache)
    environ = {"HOME": str(tmp_path)} | ({variable: str(tmp_path / "other")} if variable else {})
    assert find_checkpoint(NAME, environ) == str(snapshot)


def test_the_default_revision_is_main(tmp_path: Path) -> None:
    snapshot = hugging_face_download(tmp_path)
    download(snapshot.parent / "another")
    assert find_checkpoint(NAME, {"HF_HUB_CACHE": str(tmp_path)}) == str(snapshot)


def test_a_revision_is_a_branch_or_a_commit(tmp_path: Path) -> None:
    main = hugging_face_download(tmp_path)
    other = download(main.parent / "89ef")
    (main.parent.parent / "refs" / "v2").write_text("89ef")
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    found = {revision: find_checkpoint(NAME, environ, revision) for revision in ("main", "master", "v2", "89ef")}
    assert found == {"main": str(main), "master": str(main), "v2": str(other), "89ef": str(other)}


def test_no_other_revision_replaces_a_missing_one(tmp_path: Path) -> None:
    hugging_face_download(tmp_path)
    with pytest.raises(ConfigError, match="snapshots/v3"):
        find_checkpoint(NAME, {"HF_HUB_CACHE": str(tmp_path)}, "v3")


@pytest.mark.parametrize("name", [NAME, NAME.replace("PaddlePaddle", "baidu")])
@pytest.mark.parametrize("variable", ["HOME", "FD_MODEL_CACHE"])
def test_a_model_that_fastdeploy_downloaded_is_found(variable: str, name: str, tmp_path: Path) -> None:
    folder = download(tmp_path / NAME)
    environ = {"HOME": str(tmp_path / "home")} | {variable: str(tmp_path)}
    assert find_checkpoint(name, environ) == str(folder)


def test_the_folder_of_fastdeploy_has_precedence(tmp_path: Path) -> None:
    hugging_face_download(tmp_path / ".cache" / "huggingface" / "hub")
    folder = download(tmp_path / NAME)
    assert find_checkpoint(NAME, {"HOME": str(tmp_path)}) == str(folder)


def test_the_error_for_a_missing_model_lists_the_searched_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(NAME, {"HOME": str(tmp_path)})
    sentence = str(caught.value)
    assert sentence.startswith(f"model '{NAME}' is not a folder on this machine")
    assert str(tmp_path / NAME) in sentence
    assert str(tmp_path / ".cache/huggingface/hub/models--PaddlePaddle--ERNIE-4.5-0.3B-Paddle") in sentence
    assert f"hf download {NAME}" in sentence


def test_a_relative_folder_with_that_name_has_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download(tmp_path / "here" / NAME)
    download(tmp_path / NAME)
    monkeypatch.chdir(tmp_path / "here")
    assert find_checkpoint(NAME, {"HOME": str(tmp_path)}) == NAME


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "model", "../a/b", "a/b/c", ""])
def test_text_that_is_not_a_name_on_a_hub_is_returned_unchanged(model: str) -> None:
    assert find_checkpoint(model, {}) == model
