"""Settings of another engine that determine the bytes of its blocks, for the namespace and its manifest.

A table for each engine lists the settings that do not (``sglang_settings.py``, ``fastdeploy_settings.py``); all others
count, also settings that are not known yet.
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

__all__ = ["digest_settings", "list_facts", "read_json", "read_settings"]

_CHUNK_BYTES = 1 << 20
# A manifest has room for sixteen facts; ``collect_facts`` and the integrations give five of them.
_MAX_FACTS = 10
_MAX_TEXT = 80
# Names and texts that must not be repeated in a manifest, which every client of the pool may read.
_SECRET = re.compile("key|token|secret|passw|credential", re.IGNORECASE)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def read_settings(
    values: Mapping[str, object], neutral: Container[str] = (), paths: Container[str] = ()
) -> dict[str, str]:
    """Return the texts of all settings except the neutral ones; settings with the same effect have equal texts.

    A file or folder that a setting names is represented by its content: on another machine its path may differ, and its
    content may change under the same path.

    Args:
        values: values of all settings, by name.
        neutral: names of settings that cannot change KV bytes.
        paths: names of settings that contain only files or folders, here or in Hugging Face's cache.

    Raises:
        ConfigError: a file cannot be read, or is neither here nor in the cache.
    """
    return {
        name: _write(_digest_paths(name, value) if name in paths else value)
        for name, value in sorted(values.items())
        if name not in neutral
    }


def read_json(value: object) -> object:
    """Parse a text as JSON; return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def digest_settings(fingerprint: str, settings: Mapping[str, str]) -> str:
    """Return ``Namespace.model`` for a checkpoint that an engine serves with these settings.

    Args:
        fingerprint: ``fingerprint_model()`` of the checkpoint.
        settings: settings from ``read_settings``.
    """
    return hashlib.sha256(json.dumps([fingerprint, dict(settings)], sort_keys=True).encode()).hexdigest()[:32]


def list_facts(settings: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return facts for a manifest: settings that are not at their defaults; beyond ten, a digest of the others.

    A value that may be a secret is replaced by its digest.
    """
    changed = {name: text for name, text in settings.items() if text != defaults.get(name)}
    names = list(changed)
    rest = [[name, changed[name]] for name in names[_MAX_FACTS:]]
    others = {f"setting {rest[0][0]} or a later one": _digest(json.dumps(rest).encode())} if rest else {}
    return {**others, **{f"setting {name}": _show(name, changed[name]) for name in names[:_MAX_FACTS]}}


def _write(value: object) -> str:
    """Write a value as one line of text; JSON except for texts."""
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
    """Return ``value`` with the names of files and folders replaced by their contents."""
    if isinstance(value, Mapping):
        return {name: _digest_paths(setting, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_digest_paths(setting, each) for each in value]
    return _write_path(_find_path(setting, value)) if isinstance(value, str) and value else value


def _find_path(setting: str, text: str) -> Path:
    """Find a file or folder: a path, or ``owner/name`` or ``owner/name/file`` of Hugging Face's hub."""
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
        f"{setting} names {text!r}, which is neither a file or folder here nor in Hugging Face's cache, so what it "
        "holds cannot be compared with others; give the path of a file or folder"
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
    """Return a digest of a file or folder.

    For a checkpoint, which is not an adapter, it covers the part that ``fingerprint_model`` reads.
    """
    if path.is_dir() and not (path / "adapter_config.json").exists():
        try:
            return f"checkpoint {fingerprint_model(path)}"
        except ConfigError:
            pass  # not a checkpoint, for example an adapter: all files are read
    digest = hashlib.sha256()
    for file in sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]:
        digest.update(f"{file.name if path.is_dir() else ''}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return f"content {digest.hexdigest()[:16]}"


def _name_object(value: object) -> str:
    """Return a name, equal in every process, for a value that JSON cannot represent."""
    return str(value.value) if isinstance(value, enum.Enum) else _ADDRESS.sub("", repr(value))


def _show(name: str, text: str) -> str:
    if _SECRET.search(f"{name} {text}"):
        return _digest(text.encode())
    plain = "".join(character if character.isprintable() else "?" for character in text)
    return plain if len(plain) <= _MAX_TEXT else f"{plain[:_MAX_TEXT]}... {_digest(text.encode())}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
