"""Which weights a model has: their version, their digest, and the namespace of the KV that they compute."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from engine.packed_linear import PackedLinear
from kvstore_backend import ConfigError, Namespace

__all__ = ["WeightNames", "digest_weights", "read_version"]


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
    """A digest of all weights as they lie in memory."""
    digest = hashlib.sha256()
    tensors: dict[str, Any] = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            tensors[f"{name}.weight"] = module.unpack()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class WeightNames:
    """The namespaces that one process has had: no two sets of weights of it have the same.

    A namespace tells weights apart by samples of every tensor and by their version. Weights that an update leaves
    equal in both, and that differ nevertheless, get their digest as well.
    """

    def __init__(self) -> None:
        self._digests: dict[Namespace, str] = {}

    def note(self, namespace: Namespace, model: torch.nn.Module) -> None:
        """The weights that ``model`` has now have this namespace."""
        if namespace not in self._digests:
            self._digests[namespace] = digest_weights(model)

    def choose(self, namespace: Namespace, model: torch.nn.Module) -> Namespace:
        """``namespace``, or where other weights had it, one of the same with the digest of these."""
        digest = digest_weights(model)
        if self._digests.setdefault(namespace, digest) == digest:
            return namespace
        named = replace(namespace, weights_version=f"{namespace.weights_version}+{digest[:32]}")
        self._digests[named] = digest
        return named
