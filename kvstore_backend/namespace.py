"""Namespace: everything that can change the bytes of a block. Builds and parses the keys of blocks.

Clients with different models, dtypes and block sizes share one pool. So the key of a block contains the digest of its
namespace::

    kv1-<32 hex digits: digest of the Namespace>-<64 hex digits: block hash>

Only this module builds and parses keys.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from kvstore_backend.backend import ConfigError

__all__ = [
    "BLOCK_PREFIX",
    "FORMAT_VERSION",
    "Namespace",
    "digest_fields",
    "find_age",
    "fingerprint_config",
    "fingerprint_file",
    "fingerprint_model",
    "key_prefix",
    "mark_changed_weights",
    "parse_key",
    "stat_weights",
]

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""Version of the format of stored blocks. It is increased when the format changes; other versions are not read."""

BLOCK_PREFIX = "kv1-"
"""Beginning of the keys of all blocks."""

_KEY_LENGTH = len("kv1-") + 32 + len("-") + 64
_SAMPLE_BYTES = 64
# Keys of config.json with the origin of the checkpoint, which do not change the model's results.
_CONFIG_NOISE = ("_name_or_path", "transformers_version")
# Other files of a checkpoint that change the model's results: settings for images, quantization and adapters, the
# model's code, FastDeploy's scales of a quantized cache.
_MORE_SETTINGS = (
    "*processor_config.json",
    "*quant*config.json",
    "adapter_config.json",
    "params.json",
    "kv_cache_scale*.json",
    "*.py",
)
# Checkpoints of FastDeploy that are divided among ranks have a folder for each.
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pdparams", "*.pt", "*.pth", "*.gguf"),
    *("rank[0-9]*/*.safetensors", "rank[0-9]*/*.pdparams"),
)
# Limit of the safetensors format.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Namespace:
    """Everything that must be equal in two processes that share KV blocks: model, dtype, block size, layout and more.

    Attributes:
        model: result of ``fingerprint_model`` for the checkpoint.
        kv_dtype: element type of K and V, such as ``"float32"`` or ``"bfloat16"``.
        block_size: tokens in a block.
        num_layers: number of layers in a block.
        num_kv_heads: KV heads per rank.
        head_size: elements per head.
        layout: order of a block's axes, such as ``"layer,kv,head,token,dim"``.
        weights_version: version of weights that are updated in place (reinforcement learning, hot swaps).
        tp_size: tensor-parallel size.
        tp_rank: index of the rank.
        tenant: tenant that owns the blocks; empty for the default tenant. This field separates tenants even if the
            pool's master does not.
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
    tenant: str = ""

    @cached_property
    def fields(self) -> dict[str, str | int]:
        """Values of the namespace's fields by name.

        An empty tenant is left out, so that the digest is the one of earlier versions, which had no tenants.
        """
        fields = asdict(self)
        if not self.tenant:
            del fields["tenant"]
        return fields

    @cached_property
    def digest(self) -> str:
        """Digest of all fields and of the format version, as 32 hex digits."""
        return digest_fields(self.fields, FORMAT_VERSION)

    def key(self, block_hash: bytes) -> str:
        """Return the key in the pool of the block with the hash ``block_hash``."""
        return f"{self.prefix}{block_hash.hex()}"

    @cached_property
    def prefix(self) -> str:
        """Beginning of the keys of all blocks in this namespace."""
        return key_prefix(self.digest)


def key_prefix(digest: str) -> str:
    """Return the beginning of the keys of all blocks in the namespace with this digest."""
    return f"{BLOCK_PREFIX}{digest}-"


def digest_fields(fields: Mapping[str, object], block_format: int) -> str:
    """Return ``Namespace.digest`` for fields that may be from another version of this package.

    Args:
        fields: texts and numbers by the names of the fields.
        block_format: ``FORMAT_VERSION`` of the version that has these fields.
    """
    text = json.dumps({"format": block_format, **fields}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse_key(key: str) -> tuple[bytes, bytes]:
    """Return the digest of the namespace (16 bytes) and the block hash (32 bytes) from the key of a block.

    Raises:
        ValueError: ``key`` is not the key of a block.
    """
    try:
        parts = bytes.fromhex(key[4:36]), bytes.fromhex(key[37:])
    except ValueError:
        parts = b"", b""
    if key != f"kv1-{parts[0].hex()}-{parts[1].hex()}" or len(key) != _KEY_LENGTH:
        raise ValueError(f"{key!r} is not the key of a block, which is kv1-<32 hex digits>-<64 hex digits>")
    return parts


def fingerprint_model(
    folder: str | Path, configuration: str | Path | None = None, *, needs_weights: bool = True
) -> str:
    """Return a digest of a checkpoint folder: of its configuration, its code, and samples of its weights.

    Two fine-tunes of one model have the same configuration, tensor names and file sizes, so the digest must depend on
    the weights. From each safetensors file, the header and 64 bytes from the middle and the end of every tensor are
    read; from other files with weights, the size and 64 samples. This takes milliseconds; reading all bytes would take
    minutes. A copy of the folder has the same digest. If a program changes a few weights in place, the samples may lack
    these weights; use ``Namespace.weights_version`` for such changes.

    Args:
        folder: the folder of the checkpoint.
        configuration: the folder with the configuration and the code, if it is another one.
        needs_weights: whether a folder without weights is refused.

    Raises:
        ConfigError: the folder, its config.json or its weights are missing or cannot be read.
    """
    digest = hashlib.sha256(b"kvstore.model.v1\0")
    try:
        for piece in _read_identity(Path(folder), Path(configuration or folder), needs_weights):
            digest.update(len(piece).to_bytes(8, "little") + piece)
    except OSError as exc:
        raise ConfigError(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    return digest.hexdigest()[:32]


def fingerprint_config(folder: str | Path) -> str:
    """Return a digest of a checkpoint's config.json, which is the same for all weights of one architecture.

    Raises:
        ConfigError: config.json is missing or cannot be read.
    """
    return hashlib.sha256(_read_configuration(Path(folder))).hexdigest()[:32]


def fingerprint_file(path: str | Path) -> str:
    """Return a digest of a single file with weights: of its size and of samples, as in ``fingerprint_model``.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        size = Path(path).stat().st_size
        with Path(path).open("rb") as file:
            return hashlib.sha256(b"".join([b"%d:" % size, *_sample_file(file, size)])).hexdigest()[:32]
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc


def mark_changed_weights(version: str, folder: str | Path, age: float | None = None) -> str:
    """Return ``Namespace.weights_version`` for weights that this process loaded from a checkpoint's folder.

    If a file has changed, or the folder was renamed, after the process began, the process may have loaded other weights
    than those that ``fingerprint_model`` has read. Then the result is unique, so that the process shares no blocks, and
    a warning is logged.

    Args:
        version: the version that is returned if nothing has changed.
        folder: the folder of the checkpoint.
        age: seconds since the process began; None: the function measures them.
    """
    now = time.time()
    since = now - (find_age() if age is None else age)
    folder = Path(folder).absolute()
    files = [_find_configuration(folder), *_list_settings(folder), *_list_weights(folder)]
    links = [path for path in (*files, folder, *folder.parents) if path.is_symlink()]
    try:
        times = [(path, path.stat().st_ctime) for path in files] + [(path, path.lstat().st_ctime) for path in links]
        if (stat := folder.stat()).st_mtime <= since:
            times.append((folder, stat.st_ctime))
        changed = next((path for path, changed in times if since < changed <= now), None)
    except OSError as exc:
        changed = Path(exc.filename or folder)
    if changed is None:
        return version
    logger.warning(
        "%s has changed (its content, name, owner or permissions) since this process began, so the process may have "
        "loaded other weights than those in the folder now; it shares no blocks until it restarts",
        changed,
    )
    return f"{version} {uuid.uuid4()}".strip()


def find_age(process: Path = Path("/proc/self")) -> float:
    """Return the seconds since a process began, or up to 0.1 less; 0 if the system does not report them.

    Args:
        process: the folder of the process in ``/proc``; by default of this process.
    """
    try:
        ticks = int((process / "stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") - 0.1)


def _read_identity(folder: Path, configuration: Path, needs_weights: bool) -> Iterator[bytes]:
    """Yield the bytes from which the fingerprint of a checkpoint is computed, in a fixed order."""
    if not folder.is_dir():
        raise ConfigError(f"model folder {str(folder)!r} does not exist")
    yield _read_configuration(configuration)
    for path in _list_settings(configuration):
        yield path.name.encode()
        yield path.read_bytes()
    for index in sorted(folder.glob("*.index.json")):
        yield index.read_bytes()
    weights = _list_weights(folder)
    if not weights and needs_weights:
        raise ConfigError(f"model folder {str(folder)!r} has no weights ({', '.join(_WEIGHTS)})")
    for path in weights:
        size = path.stat().st_size
        yield f"{path.relative_to(folder).as_posix()}:{size}".encode()
        with path.open("rb") as file:
            yield from _sample_safetensors(file, size) if path.suffix == ".safetensors" else _sample_file(file, size)


def stat_weights(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return modification time, size and inode of each file with weights, by name, to detect a change.

    Raises:
        OSError: a file was removed during the call.
    """
    stats = {str(path.relative_to(folder)): path.stat() for path in _list_weights(Path(folder))}
    return {name: (stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in stats.items()}


def _list_settings(folder: Path) -> list[Path]:
    return sorted({path for pattern in _MORE_SETTINGS for path in folder.glob(pattern)})


def _list_weights(folder: Path) -> list[Path]:
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def _find_configuration(folder: Path) -> Path:
    """Return the path of config.json; of params.json if a folder in Mistral's format has only this file."""
    path, other = folder / "config.json", folder / "params.json"
    return other if other.exists() and not path.exists() else path


def _read_configuration(folder: Path) -> bytes:
    """Return the members of config.json that can change the model's results, as JSON in a fixed order."""
    path = _find_configuration(folder)
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"model folder {str(folder)!r} has no config.json") from None
    except ValueError as exc:
        raise ConfigError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must contain one JSON object")
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    return json.dumps(kept, sort_keys=True).encode()


def _sample_file(file: BinaryIO, size: int) -> Iterator[bytes]:
    for offset in range(0, size, max(1, size // 64)):
        file.seek(offset)
        yield file.read(_SAMPLE_BYTES)


def _sample_safetensors(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the header of a safetensors file, then bytes from the middle and from the end of each tensor.

    The end is read because the rows for added tokens are there. Format: length of the header (8 bytes, little-endian),
    header in JSON, data (https://github.com/huggingface/safetensors).
    """
    length = int.from_bytes(file.read(8), "little")
    start = 8 + length
    if start > size or length > _MAX_HEADER_BYTES:
        raise ConfigError(f"{file.name} is not a safetensors file, or it is truncated")
    header = file.read(length)
    yield header
    for begin, end in sorted(_data_offsets(header, size - start, file.name)):
        for offset in (begin + (end - begin) // 2, max(begin, end - _SAMPLE_BYTES)):
            file.seek(start + offset)
            yield file.read(min(_SAMPLE_BYTES, end - offset))


def _data_offsets(header: bytes, data_bytes: int, name: str) -> list[tuple[int, int]]:
    """Return where each tensor begins and ends in a safetensors file's data, from the file's header."""
    try:
        tensors: dict[str, Any] = json.loads(header)
        offsets = [tuple(tensor["data_offsets"]) for key, tensor in tensors.items() if key != "__metadata__"]
        if all(0 <= begin <= end <= data_bytes for begin, end in offsets):
            return [(int(begin), int(end)) for begin, end in offsets]
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ConfigError(f"{name} is not a complete safetensors file: its header does not match its data")
