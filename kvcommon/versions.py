"""Finds the installed version of this project."""

from __future__ import annotations

import importlib.metadata

__all__ = ["DISTRIBUTION", "find_version"]

DISTRIBUTION = "fastdeploy-kvstore"


def find_version() -> str:
    """Return the installed version of this project, or a text that says that it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: it runs from a checkout)"
