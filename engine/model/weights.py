"""Finds the version and the digest of a model's weights, for the namespace."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import yaml

from kvstore_backend import ConfigError

__all__ = ["digest_weights", "name_weights", "read_version"]


def read_version(folder: str | Path) -> str:
    """Return the version in FastDeploy's ``version.yaml``, which a trainer writes next to the weights.

    Returns:
        The version; "" if the folder has no such file.

    Raises:
        ConfigError: the file exists, but has no version.
    """
    path = Path(folder) / "version.yaml"
    if not path.exists():
        return ""
    try:
        return str(yaml.safe_load(path.read_bytes())["version"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        raise ConfigError(
            f'{path} has no version; write one into it, such as "version: RL-STEP1", or delete the file'
        ) from None


def digest_weights(model: torch.nn.Module) -> str:
    """Return a digest of all weights of a model. Call this after loading, before the layers are packed."""
    digest, tensors = hashlib.sha256(), model.state_dict()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def name_weights(version: str, model: torch.nn.Module) -> str:
    """Return version and digest of a model's weights, for the namespace of an instance that can update its weights.

    The fingerprint in a namespace has only samples of each tensor. An update may change none of these samples, and the
    version can be missing. Without the digest, blocks of the old and the new weights could then have the same key.
    """
    return f"{version}+{digest_weights(model)[:32]}"
