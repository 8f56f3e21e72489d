"""Pools with known blocks, and the results of commands that run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.clear_marks import MARK_PREFIX
from kvstore_backend.config import PoolConfig
from kvstore_backend.manifest import Manifest
from kvstore_backend.manifest_keeper import write_manifest
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import name_tenant, open_store
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.support.memory import Memory
from tests.support.strict_registration import Announcing

__all__ = ["BLOCK", "Commands", "Result", "chain", "fill_pool", "folder_url", "list_keys", "space"]

BLOCK = 4
"""Tokens in a block here."""


def space(name: str) -> Namespace:
    """Return a namespace that differs for each name."""
    return Namespace(name, "float32", BLOCK, 1, 1, 1, "bytes")


def chain(tokens: list[int], salt: str = "") -> list[bytes]:
    """Return the hashes of the full blocks of a prompt."""
    return extend_block_hashes([], tokens, BLOCK, root_hash(salt))


def fill_pool(config: PoolConfig, namespace: Namespace, tokens: list[int], *, manifest: bool = True) -> list[str]:
    """Put the blocks of a prompt, as an instance does; return their keys."""
    namespace = name_tenant(config, namespace)
    store = open_store(config)
    keys = [namespace.key(each) for each in chain(tokens)]
    memories = [Memory(f"block of {key}".encode().ljust(1000)) for key in keys]
    checked = Announcing(CheckedBackend(store))
    assert all(checked.put(keys, [memory.value for memory in memories]))
    if manifest:
        assert write_manifest(store, Manifest(namespace.fields, {"name": namespace.model, "block_hashes": "kvstore"}))
    checked.close()
    return keys


def list_keys(folder: Path) -> list[str]:
    """List the keys in a folder's pool, without marks of clears."""
    keys = sorted(path.stem for path in folder.glob("blocks/*/*.block"))
    return [key for key in keys if not key.startswith(quote(MARK_PREFIX, safe=""))]


def folder_url(folder: Path) -> str:
    """Return the URL of the pool in a folder."""
    return f"file://{folder}?size=16MiB"


class Result:
    """The result of a command."""

    def __init__(self, status: int, output: str, errors: str) -> None:
        self.status, self.output, self.errors = status, output, errors

    @property
    def json(self) -> Any:
        """The JSON document that the command wrote."""
        assert self.status == 0, self.errors
        return json.loads(self.output)

    @property
    def sentence(self) -> str:
        """The error of a command that failed, which must be one sentence."""
        assert self.status == 1, self.output
        assert self.errors.startswith("kvstore: ")
        assert self.errors.count("\n") == 1, self.errors
        return self.errors.removeprefix("kvstore: ").strip()


Commands = Callable[..., Result]
