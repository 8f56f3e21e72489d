"""The version of this distribution."""

from __future__ import annotations

import importlib.metadata

__all__ = ["DISTRIBUTION", "find_version"]

DISTRIBUTION = "fastdeploy-kvstore"


def find_version() -> str:
    """Return the installed version, or a remark that the code runs from its folder."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from its folder)"
