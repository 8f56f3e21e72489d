"""Which weights a model has: their version, their digest, and what a namespace says of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import yaml

from kvstore_backend import ConfigError

__all__ = ["digest_weights", "name_weights", "read_version"]


def read_version(folder: str | Path) -> str:
    """The version in FastDeploy's ``version.yaml``, which a trainer writes next to the weights; "" without that file.

    Raises:
        ConfigError: the file is there, and says no version.
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
    """A digest of all weights of a model that was read and not yet packed."""
    digest, tensors = hashlib.sha256(), model.state_dict()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def name_weights(version: str, model: torch.nn.Module) -> str:
    """What tells a model's weights from all others in a namespace, where they may change: their version and digest.

    A namespace has samples of every tensor besides. These can be equal where weights differ, and nobody has to name a
    version: weights of before and after would share KV, also in processes that are started later.
    """
    return f"{version}+{digest_weights(model)[:32]}"
