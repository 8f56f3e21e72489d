"""Digests the settings of another engine for the namespace of its blocks, and lists them for the manifest.

A setting is part of the namespace unless the engine's table lists it as neutral: it cannot change the bytes of a block
(``sglang_settings.py``, ``fastdeploy_settings.py``). Settings that are in no table are part of the namespace too.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Container, Mapping
from pathlib import Path

from kvstore_backend.backend import ConfigError
from kvstore_backend.namespace import fingerprint_model

__all__ = ["digest_settings", "is_quantized", "list_facts", "read_json", "read_settings"]

_CHUNK_BYTES = 1 << 20
# A manifest can have sixteen facts; ``collect_facts`` and the integrations give at most five other facts.
_MAX_FACTS = 10
_MAX_TEXT = 80
# A setting with one of these words may be a secret, and every client of the pool can read a manifest.
_SECRET = re.compile("key|token|secret|passw|credential", re.IGNORECASE)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def read_settings(
    values: Mapping[str, object], neutral: Container[str] = (), paths: Container[str] = ()
) -> dict[str, str]:
    """Return the values of settings as text, by name, without the settings that cannot change KV.

    The path of a file or folder is replaced by a digest of its content, because another machine may have the same file
    under another path, or another file under the same path.

    Args:
        values: values of all settings, by name.
        neutral: names of settings that cannot change KV bytes.
        paths: names of settings that have only paths of files or folders, or names at Hugging Face's hub.

    Raises:
        ConfigError: a file cannot be read, or is neither on this machine nor in Hugging Face's cache.
    """
    return {
        name: _write(_digest_paths(name, value) if name in paths else value)
        for name, value in sorted(values.items())
        if name not in neutral
    }


def read_json(value: object) -> object:
    """Parse text that is JSON; return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def digest_settings(fingerprint: str, settings: Mapping[str, str]) -> str:
    """Return the value of ``Namespace.model`` for a checkpoint and the settings with which an engine serves it.

    Args:
        fingerprint: result of ``fingerprint_model`` for the checkpoint.
        settings: result of ``read_settings``.
    """
    return hashlib.sha256(json.dumps([fingerprint, dict(settings)], sort_keys=True).encode()).hexdigest()[:32]


def is_quantized(model: str, quantization: object) -> bool:
    """Return whether weights or KV are quantized, so that an engine may calculate in another format on another GPU.

    Args:
        model: the folder of the checkpoint, whose files are read.
        quantization: the engine's setting of this name.

    Raises:
        OSError: a file cannot be read.
    """
    files = [Path(model, name) for name in ("config.json", "params.json")]  # the second one is in Mistral's format
    config = "".join(path.read_text() for path in files if path.exists())
    is_marked = any(f'"{name}"' in config for name in ("quantization_config", "compression_config", "quantization"))
    return is_marked or bool(quantization) or Path(model, "hf_quant_config.json").exists()


def list_facts(settings: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return facts for a manifest: the first ten settings that differ from their defaults, and a digest of the rest.

    A value that may be a secret is replaced by its digest.
    """
    changed = {name: text for name, text in settings.items() if text != defaults.get(name)}
    names = list(changed)
    rest = [[name, changed[name]] for name in names[_MAX_FACTS:]]
    others = {f"setting {rest[0][0]} or a later one": _digest(json.dumps(rest).encode())} if rest else {}
    return {**others, **{f"setting {name}": _show(name, changed[name]) for name in names[:_MAX_FACTS]}}


def _write(value: object) -> str:
    """Return a setting's value as text: text as it is, other values as JSON.

    Each path of a file or folder is replaced by a digest.
    """
    value = read_json(value)
    if isinstance(value, str):
        return _write_text(value)
    return json.dumps(_replace_paths(value), sort_keys=True, default=_name_object)


def _replace_paths(value: object) -> object:
    if isinstance(value, str):
        return _write_text(value)
    if isinstance(value, Mapping):
        return {str(name): _replace_paths(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_paths(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_replace_paths(each)) for each in value)
    return value


def _digest_paths(setting: str, value: object) -> object:
    """Return ``value`` with each path of a file or folder replaced by a digest of its content."""
    if isinstance(value, Mapping):
        return {name: _digest_paths(setting, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_digest_paths(setting, each) for each in value]
    return _write_path(_find_path(setting, value)) if isinstance(value, str) and value else value


def _find_path(setting: str, text: str) -> Path:
    """Return the path of a file or folder from a path, or from a hub name: ``owner/name`` or ``owner/name/file``."""
    path = Path(text)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        owner, name, *rest = text.split("/")
        path = Path(snapshot_download(f"{owner}/{name}", local_files_only=True), *rest)
    except Exception as exc:  # package not installed, no such name, not in the cache
        raise ConfigError(_missing(setting, text)) from exc
    if not path.exists():
        raise ConfigError(_missing(setting, text))
    return path


def _missing(setting: str, text: str) -> str:
    return (
        f"{setting} names {text!r}, which is neither a file or folder here nor in Hugging Face's cache, so its content "
        "cannot be compared with that of other instances; give the path of a file or folder"
    )


def _write_text(text: str) -> str:
    try:
        is_path = "/" in text and Path(text).exists()
    except OSError:  # too long for a name
        is_path = False
    return _write_path(Path(text)) if is_path else text


def _write_path(path: Path) -> str:
    try:
        return _digest_path(path)
    except OSError as exc:
        raise ConfigError(f"{exc.filename or path} cannot be read: {exc.strerror}") from exc


def _digest_path(path: Path) -> str:
    """Return a digest of a file, or of the files directly in a folder.

    For the folder of a checkpoint, return ``fingerprint_model``, which reads only samples of the weights.
    """
    if path.is_dir() and not (path / "adapter_config.json").exists():
        try:
            return f"checkpoint {fingerprint_model(path)}"
        except ConfigError:
            pass  # the folder is not a checkpoint
    digest = hashlib.sha256()
    for file in sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]:
        digest.update(f"{file.name if path.is_dir() else ''}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return f"content {digest.hexdigest()[:16]}"


def _name_object(value: object) -> str:
    """Return a text for a value that JSON cannot represent, which is the same in every process."""
    return str(value.value) if isinstance(value, enum.Enum) else _ADDRESS.sub("", repr(value))


def _show(name: str, text: str) -> str:
    if _SECRET.search(f"{name} {text}"):
        return _digest(text.encode())
    plain = "".join(character if character.isprintable() else "?" for character in text)
    return plain if len(plain) <= _MAX_TEXT else f"{plain[:_MAX_TEXT]}... {_digest(text.encode())}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
