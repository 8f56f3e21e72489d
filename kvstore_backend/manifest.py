"""The manifest of a namespace: one small JSON object in the pool that says whose blocks a digest stands for.

    kvstore-manifest/<32 hex digits: digest of the Namespace>

A namespace is a digest, from which nobody can read why another one differs. Its manifest has the fields that the digest
was made of, and *facts* that help a person, such as the model's name. It is written by the instances of the
namespace (``manifest_keeper.py``), and read by ``kvstore why-miss`` and ``kvstore ls``.

A pool may return anything. Fields are believed only where they make the very digest in the key, so that nobody can say
an untruth of a namespace; facts are believed as far as they go: they explain a difference that the fields
have proven, and never decide whether there is one. Text that is not printable is refused, as it is shown on terminals.
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
"""The beginning of the keys of all manifests; no block's key begins so."""

MANIFEST_BYTES = 2048
"""The size of every manifest: stores read values of a known size only, so spaces follow the JSON."""

_MANIFEST_VERSION = 1
_MAX_TEXT = 400
_MAX_FACTS = 16
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ManifestError(ValueError):
    """Something else lies in the place of a manifest: the end of a sentence that says why."""


@dataclass(frozen=True)
class Manifest:
    """A namespace, in words.

    Attributes:
        fields: those of its ``Namespace``, or of that of another version of this package.
        facts: help a person who compares two, and decide nothing.
        block_format: version of the format of its blocks.
        written_at: when it was first written, in UTC as ``2026-11-22T15:04:05Z``; empty: it was not yet.
    """

    fields: Mapping[str, str | int]
    facts: Mapping[str, str] = field(default_factory=dict)
    block_format: int = FORMAT_VERSION
    written_at: str = ""

    @property
    def digest(self) -> str:
        """The namespace's."""
        return digest_fields(self.fields, self.block_format)

    @property
    def block_size(self) -> int:
        """Tokens in a block; 0 where it does not say so."""
        size = self.fields.get("block_size")
        return size if isinstance(size, int) else 0

    def to_json(self) -> dict[str, Any]:
        """As it is written, for reports."""
        return {
            "manifest": _MANIFEST_VERSION,
            "block_format": self.block_format,
            "fields": dict(self.fields),
            "facts": dict(self.facts),
            "written_at": self.written_at,
        }


def collect_facts(model: str | Path, software: str, block_hashes: str, **more: object) -> dict[str, str]:
    """The facts of a namespace.

    Args:
        model: the folder of the checkpoint.
        software: the engine, and its version where it says one.
        block_hashes: who names the blocks: ``kvstore`` (``block_hash.py``), or the engine.
        more: further facts, such as the settings that went into ``Namespace.model`` beside the checkpoint.

    Raises:
        ConfigError: the folder has no configuration that can be read.
    """
    known = {"name": Path(model).name, "architecture": fingerprint_config(model)}
    told = {name: str(value) for name, value in more.items()}
    return {**known, "software": software, "block_hashes": block_hashes, **told}


def manifest_key(digest: str) -> str:
    """The key of the manifest of the namespace with this digest."""
    return f"{MANIFEST_PREFIX}{digest}"


def parse_manifest_key(key: str) -> str:
    """The digest of the namespace whose manifest has this key.

    Raises:
        ValueError: ``manifest_key`` makes no such key.
    """
    digest = key.removeprefix(MANIFEST_PREFIX)
    if digest == key or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{key!r} is no key of a manifest; one is {MANIFEST_PREFIX}<32 hex digits>")
    return digest


def encode_manifest(manifest: Manifest) -> bytes:
    """Its ``MANIFEST_BYTES`` bytes: one line of JSON, and spaces.

    Facts that are not printable, too long or too many are left out, the last first: a manifest without them is better
    than none.

    Raises:
        ManifestError: the fields alone do not fit, or are none that could be read again.
    """
    facts = {name: text for name, text in manifest.facts.items() if _is_plain(name) and _is_plain(text)}
    names = list(facts)[:_MAX_FACTS]
    while True:
        whole = {**manifest.to_json(), "facts": {name: facts[name] for name in names}}
        data = json.dumps(whole, separators=(",", ":")).encode()
        if len(data) < MANIFEST_BYTES:
            break
        if not names:
            raise ManifestError(f"its fields take {len(data)} bytes, of the {MANIFEST_BYTES} that there are")
        names.pop()
    data = data.ljust(MANIFEST_BYTES - 1) + b"\n"
    decode_manifest(data, manifest.digest)
    return data


def decode_manifest(data: bytes, digest: str) -> Manifest:
    """The manifest in ``data``, which was read under the key of the namespace ``digest``.

    Raises:
        ManifestError: it is none, or another namespace's.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ManifestError("it is not JSON") from None
    manifest = parse_manifest(value)
    if manifest.digest != digest:
        raise ManifestError("what it says is not true of this namespace: its fields make another digest")
    return manifest


def parse_manifest(value: object) -> Manifest:
    """The manifest that ``Manifest.to_json`` made ``value`` of.

    Raises:
        ManifestError: there is no such manifest.
    """
    if not isinstance(value, dict):
        raise ManifestError("it is not a JSON object")
    version = value.get("manifest")
    if type(version) is not int or version != _MANIFEST_VERSION:
        raise ManifestError(f"it is not a manifest of version {_MANIFEST_VERSION}, the only one known here")
    fields, facts = value.get("fields"), value.get("facts")
    if not isinstance(fields, dict) or not fields or not all(_is_field(*item) for item in fields.items()):
        raise ManifestError("its fields are not short texts and numbers")
    if not isinstance(facts, dict) or not all(_is_plain(each) for item in facts.items() for each in item):
        raise ManifestError("its facts are not short texts")
    block_format, written_at = value.get("block_format"), value.get("written_at")
    if type(block_format) is not int or not _is_plain(written_at):
        raise ManifestError("it does not say the format of its blocks, or when it was written")
    return Manifest(fields, facts, block_format, str(written_at))


def _is_field(name: object, value: object) -> bool:
    return _is_plain(name) and (type(value) is int or _is_plain(value))


def _is_plain(text: object) -> bool:
    """Whether it is short and harmless on a terminal."""
    return isinstance(text, str) and len(text) <= _MAX_TEXT and text.isprintable()
