"""The router, the pool and the checkpoint that an instance's arguments name, looked up before torch is loaded."""

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
    """The router, the pool and the checkpoint."""

    router: str | None
    """Its URL."""
    router_token: str
    pool: PoolConfig | None
    checkpoint: str
    """Its folder."""


def find_surroundings(args: EngineArgs) -> Surroundings:
    """All of it; takes no time, so that a mistake is told at once.

    Raises:
        ConfigError: something is not there, or cannot be used, in one sentence.
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
    """The folder of the checkpoint that ``--model`` names.

    Raises:
        ConfigError: there is none.
    """
    folder = find_checkpoint(model)
    if not Path(folder).is_dir():
        raise ConfigError(
            f"--model {folder!r}: there is no such folder; give a local checkpoint folder with a config.json"
        )
    return folder
