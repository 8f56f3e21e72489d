"""A hub's name is found where its downloads lie, and nothing is downloaded."""

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
    """As Hugging Face's library lays a snapshot out."""
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
def test_a_model_of_hugging_faces_cache_is_found(variable: str | None, cache: str, tmp_path: Path) -> None:
    snapshot = hugging_face_download(tmp_path / cache)
    environ = {"HOME": str(tmp_path)} | ({variable: str(tmp_path / "other")} if variable else {})
    assert find_checkpoint(NAME, environ) == str(snapshot)


def test_the_revision_is_the_one_that_main_names(tmp_path: Path) -> None:
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


def test_a_revision_that_was_not_downloaded_is_no_other(tmp_path: Path) -> None:
    hugging_face_download(tmp_path)
    with pytest.raises(ConfigError, match="snapshots/v3"):
        find_checkpoint(NAME, {"HF_HUB_CACHE": str(tmp_path)}, "v3")


@pytest.mark.parametrize("name", [NAME, NAME.replace("PaddlePaddle", "baidu")])
@pytest.mark.parametrize("variable", ["HOME", "FD_MODEL_CACHE"])
def test_a_model_that_fastdeploy_downloaded_is_found(variable: str, name: str, tmp_path: Path) -> None:
    folder = download(tmp_path / NAME)
    environ = {"HOME": str(tmp_path / "home")} | {variable: str(tmp_path)}
    assert find_checkpoint(name, environ) == str(folder)


def test_fastdeploys_own_place_comes_first(tmp_path: Path) -> None:
    hugging_face_download(tmp_path / ".cache" / "huggingface" / "hub")
    folder = download(tmp_path / NAME)
    assert find_checkpoint(NAME, {"HOME": str(tmp_path)}) == str(folder)


def test_a_model_that_is_nowhere_is_told_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(NAME, {"HOME": str(tmp_path)})
    sentence = str(caught.value)
    assert sentence.startswith(f"model '{NAME}' is not a folder on this machine")
    assert str(tmp_path / NAME) in sentence
    assert str(tmp_path / ".cache/huggingface/hub/models--PaddlePaddle--ERNIE-4.5-0.3B-Paddle") in sentence
    assert f"hf download {NAME}" in sentence


def test_a_folder_of_that_name_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download(tmp_path / "here" / NAME)
    download(tmp_path / NAME)
    monkeypatch.chdir(tmp_path / "here")
    assert find_checkpoint(NAME, {"HOME": str(tmp_path)}) == NAME


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "model", "../a/b", "a/b/c", ""])
def test_what_is_no_name_of_a_hub_is_not_looked_for(model: str) -> None:
    assert find_checkpoint(model, {}) == model
