"""A model's name at a hub -> the folder on this machine with its downloaded checkpoint.

This module downloads nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvstore_backend.backend import ConfigError

__all__ = ["find_checkpoint", "is_hub_name"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(model: str) -> bool:
    """Return whether the text can be a model's name at a hub: ORGANISATION/NAME, and not a folder here."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).is_dir()


def find_checkpoint(model: str, environ: Mapping[str, str] | None = None, revision: str = "") -> str:
    """Return the folder of a model that is named as at a hub; return any other text, which is a folder, unchanged.

    Args:
        model: a folder, or ORGANISATION/NAME.
        revision: a branch, tag or commit at the hub; empty: its default.
        environ: environment with ``FD_MODEL_CACHE``, ``HF_HOME`` and similar variables; by default the process's.

    Raises:
        ConfigError: the text is a hub's name, and no download folder of a hub has a checkpoint of it.
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
    """Yield the possible folders of a downloaded checkpoint, FastDeploy's own folder first."""
    home = Path(environ.get("HOME") or Path.home())
    organisation, _, name = model.partition("/")
    # FastDeploy downloads from AI Studio, ModelScope or Hugging Face to a folder with the model's name. For Baidu's
    # models it uses the name that they have at AI Studio and ModelScope.
    folder = Path(environ.get("FD_MODEL_CACHE") or home)
    if organisation.lower() == "baidu":
        yield folder / "PaddlePaddle" / name
    yield folder / model
    cache = _hugging_face_cache(home, environ) / f"models--{organisation}--{name}"
    # "master" is AI Studio's and ModelScope's name for this branch; FastDeploy translates it.
    branch = "main" if revision in ("", "master") else revision
    try:
        commit = (cache / "refs" / branch).read_text().strip()
    except OSError:
        yield cache if branch == "main" else cache / "snapshots" / branch
    else:
        yield cache / "snapshots" / commit


def _hugging_face_cache(home: Path, environ: Mapping[str, str]) -> Path:
    """Return the hub's cache folder, found as Hugging Face's own library finds it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface" / "hub"
