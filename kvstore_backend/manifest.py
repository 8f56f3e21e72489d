"""Manifest of a namespace: a small JSON object in the pool that explains the namespace's digest.

    kvstore-manifest/<32 hex digits: digest of the Namespace>

Keys contain only the digest of a namespace, and two digests do not show why they differ. The manifest has the fields of
the namespace, from which the digest is computed, and *facts* for operators, such as the model's name. The instances of
the namespace write the manifest (``manifest_keeper.py``); ``kvstore why-miss`` and ``kvstore ls`` read it.

Other clients may write false data to a pool. So fields are accepted only if their digest is the one in the key. Facts
cannot be checked: they only explain a difference that the fields show. Text that is not printable is refused, because
commands print it on terminals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore_backend.namespace import FORMAT_VERSION, digest_fields, fingerprint_config

__all__ = [
    "MANIFEST_BYTES",
    "MANIFEST_PREFIX",
    "Manifest",
    "ManifestError",
    "collect_facts",
    "decode_manifest",
    "encode_manifest",
    "manifest_key",
    "parse_manifest",
    "parse_manifest_key",
]

MANIFEST_PREFIX = "kvstore-manifest/"
"""Beginning of the keys of all manifests. Keys of blocks have another beginning."""

MANIFEST_BYTES = 2048
"""Size of every manifest in bytes. Spaces fill it up, because stores can read only values of a known size."""

_MANIFEST_VERSION = 1
_MAX_TEXT = 400
_PLAIN_TEXT = f"a printable text of at most {_MAX_TEXT} characters"
_MAX_FACTS = 16
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ManifestError(ValueError):
    """Error: a value is not a valid manifest. The message is the reason, as the end of a sentence."""


@dataclass(frozen=True)
class Manifest:
    """Description of a namespace that operators can read.

    Attributes:
        fields: fields of the ``Namespace``, by name. Another version of this package may have other fields.
        facts: further information for operators, by name.
        block_format: version of the format of the namespace's blocks.
        written_at: time at which an instance wrote the manifest, in UTC as ``2026-11-22T15:04:05Z``; empty: not written
            yet.
    """

    fields: Mapping[str, str | int]
    facts: Mapping[str, str] = field(default_factory=dict)
    block_format: int = FORMAT_VERSION
    written_at: str = ""

    @property
    def digest(self) -> str:
        """Digest of the namespace that the manifest describes."""
        return digest_fields(self.fields, self.block_format)

    @property
    def block_size(self) -> int:
        """Number of tokens in a block; 0 if the manifest does not have this number."""
        size = self.fields.get("block_size")
        return size if isinstance(size, int) else 0

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as a JSON object, for the pool and for reports."""
        return {
            "manifest": _MANIFEST_VERSION,
            "block_format": self.block_format,
            "fields": dict(self.fields),
            "facts": dict(self.facts),
            "written_at": self.written_at,
        }


def collect_facts(model: str | Path, software: str, block_hashes: str, **more: object) -> dict[str, str]:
    """Return the facts for the manifest of a namespace: about the checkpoint, the engine and its settings.

    Args:
        model: the folder of the checkpoint.
        software: name of the engine, and its version if known.
        block_hashes: software that computes the block hashes: ``kvstore`` (``block_hash.py``), or the engine.
        more: further facts, such as the settings of the engine that are part of ``Namespace.model``.

    Raises:
        ConfigError: the folder has no readable config.json.
    """
    known = {"name": Path(model).name, "architecture": fingerprint_config(model)}
    others = {name: str(value) for name, value in more.items()}
    return {**known, "software": software, "block_hashes": block_hashes, **others}


def manifest_key(digest: str) -> str:
    """Return the key of the manifest of the namespace with this digest."""
    return f"{MANIFEST_PREFIX}{digest}"


def parse_manifest_key(key: str) -> str:
    """Return the digest of the namespace from the key of its manifest.

    Raises:
        ValueError: ``key`` is not the key of a manifest.
    """
    digest = key.removeprefix(MANIFEST_PREFIX)
    if digest == key or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{key!r} is not the key of a manifest, which is {MANIFEST_PREFIX}<32 hex digits>")
    return digest


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest to ``MANIFEST_BYTES`` bytes: one line of JSON, and spaces.

    Facts that are not printable or too long are omitted. If there are too many facts, the last ones are omitted.

    Raises:
        ManifestError: the fields alone need too many bytes, or are not valid.
    """
    facts = {name: text for name, text in manifest.facts.items() if _is_plain(name) and _is_plain(text)}
    names = list(facts)[:_MAX_FACTS]
    while True:
        whole = {**manifest.to_json(), "facts": {name: facts[name] for name in names}}
        data = json.dumps(whole, separators=(",", ":")).encode()
        if len(data) < MANIFEST_BYTES:
            break
        if not names:
            raise ManifestError(f"the manifest's fields need {len(data)} bytes; at most {MANIFEST_BYTES} are allowed")
        names.pop()
    data = data.ljust(MANIFEST_BYTES - 1) + b"\n"
    decode_manifest(data, manifest.digest)
    return data


def decode_manifest(data: bytes, digest: str) -> Manifest:
    """Decode the manifest of the namespace ``digest``.

    Raises:
        ManifestError: the data is not a manifest, or is the manifest of another namespace.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ManifestError("the manifest is not JSON") from None
    manifest = parse_manifest(value)
    if manifest.digest != digest:
        raise ManifestError(
            f"the manifest is of namespace {manifest.digest} (the digest of its fields), not of namespace {digest}"
        )
    return manifest


def parse_manifest(value: object) -> Manifest:
    """Parse a manifest from a JSON object, as ``Manifest.to_json`` returns it.

    Raises:
        ManifestError: the value is not a manifest.
    """
    if not isinstance(value, dict):
        raise ManifestError("the manifest is not a JSON object")
    version = value.get("manifest")
    if type(version) is not int or version != _MANIFEST_VERSION:
        raise ManifestError(f"the manifest has another version than {_MANIFEST_VERSION}, the only supported version")
    fields, facts = value.get("fields"), value.get("facts")
    if not isinstance(fields, dict) or not fields or not all(_is_field(*item) for item in fields.items()):
        raise ManifestError(
            f'the manifest lacks "fields", or a value in it is neither a whole number nor {_PLAIN_TEXT}'
        )
    if not isinstance(facts, dict) or not all(_is_plain(each) for item in facts.items() for each in item):
        raise ManifestError(f'the manifest lacks "facts", or a name or value in it is not {_PLAIN_TEXT}')
    block_format, written_at = value.get("block_format"), value.get("written_at")
    if type(block_format) is not int or not _is_plain(written_at):
        raise ManifestError("the manifest lacks block_format (a number) or written_at (a time)")
    return Manifest(fields, facts, block_format, str(written_at))


def _is_field(name: object, value: object) -> bool:
    return _is_plain(name) and (type(value) is int or _is_plain(value))


def _is_plain(text: object) -> bool:
    """Return whether ``text`` is a short text of printable characters."""
    return isinstance(text, str) and len(text) <= _MAX_TEXT and text.isprintable()
