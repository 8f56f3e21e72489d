"""Finds the folder of a downloaded checkpoint by the model's name at a hub, without downloading anything."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvstore_backend.backend import ConfigError

__all__ = ["find_checkpoint", "is_hub_name"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(model: str) -> bool:
    """Return whether ``model`` is not a folder, and has the form of a model's name at a hub: ORGANISATION/NAME."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).is_dir()


def find_checkpoint(model: str, environ: Mapping[str, str] | None = None, revision: str = "") -> str:
    """Return the folder of a model's checkpoint.

    Args:
        model: the folder itself, which is returned unchanged; or the model's name at a hub, ORGANISATION/NAME.
        environ: environment with ``FD_MODEL_CACHE``, ``HF_HOME`` and similar variables, or None for this process's own.
        revision: a branch, tag or commit at the hub; empty: the default branch.

    Raises:
        ConfigError: ``model`` is a name at a hub, and no download folder has its checkpoint.
    """
    if not is_hub_name(model):
        return model
    places = list(_places(model, os.environ if environ is None else environ, revision))
    for place in places:
        if (place / "config.json").is_file():
            return str(place)
    listed = ", ".join(map(str, places))
    raise ConfigError(
        f"model {model!r} is not a folder on this machine and was not found among downloaded models (in {listed}): "
        f"models are not downloaded automatically; download it first, for example with 'hf download {model}', or give "
        "the folder of its checkpoint"
    )


def _places(model: str, environ: Mapping[str, str], revision: str) -> Iterator[Path]:
    """Yield the folders in which a downloaded checkpoint may be, FastDeploy's folder first."""
    home = Path(environ.get("HOME") or Path.home())
    organisation, _, name = model.partition("/")
    # FastDeploy downloads from AI Studio, ModelScope or Hugging Face to a folder with the model's name. For models of
    # Baidu, this is the name at AI Studio and ModelScope.
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
    """Return the cache folder of Hugging Face's library, from the variables that the library reads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface" / "hub"
