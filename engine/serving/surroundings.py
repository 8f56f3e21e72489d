"""Finds the router, the pool and the checkpoint that the arguments of an instance name, before torch is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.args import EngineArgs
from engine.serving.registration import router_url
from kvcommon.secret_files import read_token
from kvstore_backend import ConfigError, PoolConfig, load_config
from kvstore_backend.config import find_checkpoint

__all__ = ["Surroundings", "find_folder", "find_surroundings"]


class Surroundings(NamedTuple):
    """The router, the pool and the checkpoint of an instance."""

    router: str | None
    """The URL of the router, or None if there is no router."""
    router_token: str
    """The token for registrations at the router; "": the router requires no token."""
    pool: PoolConfig | None
    """The configuration of the pool, or None if there is no pool."""
    checkpoint: str
    """The folder of the checkpoint."""


def find_surroundings(args: EngineArgs) -> Surroundings:
    """Return the router, the pool and the checkpoint that the arguments name.

    This function is fast, so that a mistake is reported before the model is loaded.

    Raises:
        ConfigError: an argument cannot be used, or names something that does not exist; the message is one sentence.
    """
    return Surroundings(
        router_url(args.router) if args.router else None,
        _read_router_token(args.router_token_file) if args.router_token_file else "",
        load_config(args.kvcache_storage_backend) if args.kvcache_storage_backend else None,
        find_folder(args.model),
    )


def _read_router_token(path: Path) -> str:
    try:
        return read_token(path)
    except ValueError as exc:
        raise ConfigError(f"--router-token-file {exc}") from None


def find_folder(model: str) -> str:
    """Return the folder of the checkpoint for the value of ``--model``.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = find_checkpoint(model)
    if not Path(folder).is_dir():
        raise ConfigError(
            f"--model {folder!r}: there is no such folder; give a local checkpoint folder with a config.json"
        )
    if not Path(folder, "config.json").is_file():
        raise ConfigError(f"--model {folder!r} is not a checkpoint: it has no config.json")
    return folder
