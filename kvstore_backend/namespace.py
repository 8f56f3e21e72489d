"""Everything that must match for two blocks' bytes to be interchangeable, and the text of a key.

A pool is shared by whoever can reach it: two models, two dtypes, two block sizes. A key therefore is

    kv1-<32 hex digits: digest of the Namespace>-<64 hex digits: block hash>

and nothing outside this file builds one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvstore_backend.backend import ConfigError

__all__ = ["FORMAT_VERSION", "Namespace", "fingerprint_model"]

FORMAT_VERSION = 1
"""Raised when the stored bytes of a block change their meaning; blocks of another version are never read."""

_SAMPLE_BYTES = 64
# What a checkpoint's config.json says of where it came from, not of what it computes.
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "architectures_source")


@dataclass(frozen=True)
class Namespace:
    """What two processes must agree on before one may use the other's KV blocks.

    Attributes:
        model: ``fingerprint_model()`` of the checkpoint, not its name.
        weights_version: raised by whoever updates weights in place (reinforcement learning, hot swaps).
        kv_dtype: element type of K and V, such as ``"float32"`` or ``"bfloat16"``.
        block_size: tokens in a block.
        num_layers: layers whose KV a block holds.
        num_kv_heads: KV heads per rank.
        head_size: elements per head.
        layout: order of a block's axes, such as ``"layer,kv,head,token,dim"``.
        tp_size: tensor-parallel size.
        tp_rank: this rank.
    """

    model: str
    kv_dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    layout: str
    weights_version: str = ""
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def digest(self) -> str:
        """32 hex digits that differ whenever any field or the format version does."""
        fields = {"format": FORMAT_VERSION, **asdict(self)}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def key(self, block_hash: bytes) -> str:
        """The key of the block with this hash."""
        return f"{self.prefix}{block_hash.hex()}"

    @property
    def prefix(self) -> str:
        """What all keys of this namespace begin with."""
        return f"kv1-{self.digest}-"


def fingerprint_model(folder: str | Path) -> str:
    """Digest of a checkpoint folder: its configuration, its weights index, and a sample of every tensor's bytes.

    Two fine-tunes of one base have equal configurations, equal tensor names and equal file sizes, so names alone
    would let them share KV. Of each safetensors file this reads the header and 64 bytes from the middle of every
    tensor (of other weight files, the size and 64 samples), which takes milliseconds where reading all would take minutes.

    Raises:
        ConfigError: the folder or its config.json is missing or unreadable.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"model folder {str(folder)!r} does not exist")
    config_file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(config_file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"model folder {str(folder)!r} has no config.json") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{config_file} is not readable JSON: {exc}") from exc
    digest = hashlib.sha256(b"kvstore.model.v1\0")
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for index in sorted(folder.glob("*.index.json")):
        digest.update(index.read_bytes())
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.pdparams")])
    for path in weights:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}\0".encode())
            offsets = _tensor_offsets(file) if path.suffix == ".safetensors" else range(0, size, max(1, size // 64))
            for offset in offsets:
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _tensor_offsets(file: BinaryIO) -> list[int]:
    """File offsets of the middle of each tensor, after the header at 0, in the order of their names.

    Format: 8 bytes little-endian header length, JSON header, data (https://github.com/huggingface/safetensors).
    """
    header_length = int.from_bytes(file.read(8), "little")
    try:
        header: dict[str, Any] = json.loads(file.read(header_length))
    except ValueError as exc:
        raise ConfigError(f"{file.name} is not a safetensors file: its header is not JSON ({exc})") from exc
    offsets = [0]
    for name in sorted(header):
        if name != "__metadata__":
            begin, end = header[name]["data_offsets"]
            offsets.append(8 + header_length + begin + (end - begin) // 2)
    return offsets
