"""A model's name at a hub -> the folder on this machine that its checkpoint was downloaded to. Downloads nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvstore_backend.backend import ConfigError

__all__ = ["find_checkpoint", "is_hub_name"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(model: str) -> bool:
    """Whether it can be a model's name at a hub: ORGANISATION/NAME, and no folder here."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).is_dir()


def find_checkpoint(model: str, environ: Mapping[str, str] | None = None, revision: str = "") -> str:
    """The folder of a model that is named as at a hub; any other text is a folder's, and is returned as it is.

    Args:
        model: a folder, or ORGANISATION/NAME.
        revision: a branch, tag or commit at the hub; empty: its default.
        environ: where ``FD_MODEL_CACHE``, ``HF_HOME`` and their like are looked up; not given, the process's.

    Raises:
        ConfigError: it is a hub's name, and none of the places that hubs' downloads go to has a checkpoint of it.
    """
    if not is_hub_name(model):
        return model
    places = list(_places(model, os.environ if environ is None else environ, revision))
    for place in places:
        if (place / "config.json").is_file():
            return str(place)
    listed = ", ".join(map(str, places))
    raise ConfigError(
        f"model {model!r} is no folder here and was not found among downloaded models (looked at {listed}); nothing is "
        f"downloaded here: fetch it first, for example with 'hf download {model}', or give its checkpoint's folder"
    )


def _places(model: str, environ: Mapping[str, str], revision: str) -> Iterator[Path]:
    """Where its checkpoint is if it was downloaded, FastDeploy's place first: there FastDeploy itself looks."""
    home = Path(environ.get("HOME") or Path.home())
    organisation, _, name = model.partition("/")
    # FastDeploy downloads from AI Studio, ModelScope or Hugging Face into a folder by the model's name, where Baidu's
    # models go by the name that they have at the former two.
    folder = Path(environ.get("FD_MODEL_CACHE") or home)
    if organisation.lower() == "baidu":
        yield folder / "PaddlePaddle" / name
    yield folder / model
    cache = _hugging_face_cache(home, environ) / f"models--{organisation}--{name}"
    # AI Studio's and ModelScope's name for it, which FastDeploy translates.
    branch = "main" if revision in ("", "master") else revision
    try:
        commit = (cache / "refs" / branch).read_text().strip()
    except OSError:
        yield cache if branch == "main" else cache / "snapshots" / branch
    else:
        yield cache / "snapshots" / commit


def _hugging_face_cache(home: Path, environ: Mapping[str, str]) -> Path:
    """The hub's cache as Hugging Face's own library finds it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface" / "hub"
