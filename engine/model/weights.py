"""Version and digest of a model's weights, and how a namespace names them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import yaml

from kvstore_backend import ConfigError

__all__ = ["digest_weights", "name_weights", "read_version"]


def read_version(folder: str | Path) -> str:
    """Read the version from FastDeploy's ``version.yaml``, which a trainer writes next to the weights; "" without it.

    Raises:
        ConfigError: the file exists, but gives no version.
    """
    path = Path(folder) / "version.yaml"
    if not path.exists():
        return ""
    try:
        return str(yaml.safe_load(path.read_bytes())["version"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        raise ConfigError(
            f'{path} says no version; write one there, such as "version: RL-STEP1", or remove it'
        ) from None


def digest_weights(model: torch.nn.Module) -> str:
    """Return a digest of all weights of a model that was loaded and not yet packed."""
    digest, tensors = hashlib.sha256(), model.state_dict()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def name_weights(version: str, model: torch.nn.Module) -> str:
    """Return version and digest, which identify a model's weights in a namespace if the weights may change.

    A namespace also has samples of every tensor. These can be equal although weights differ, and operators need not
    name a version: then the weights before and after an update would share KV, also in processes that are started
    later.
    """
    return f"{version}+{digest_weights(model)[:32]}"
