"""The contents of a pool, namespace by namespace, with their manifests."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_backend.clear_marks import MARK_PREFIX
from kvstore_backend.manifest import (
    MANIFEST_BYTES,
    Manifest,
    ManifestError,
    decode_manifest,
    manifest_key,
    parse_manifest_key,
)
from kvstore_backend.namespace import parse_key
from kvstore_backend.stores.holdings import Holdings

__all__ = ["Catalogue", "NamespaceEntry", "find_manifests", "read_catalogue"]

# Blocks of a namespace are of one size, so that some tell it of all.
_SAMPLE = 8


@dataclass
class NamespaceEntry:
    """One namespace.

    Attributes:
        digest: its name.
        keys: of its blocks.
        manifest: left by its instances; None: they left none, or it was evicted.
    """

    digest: str
    keys: list[str] = field(default_factory=list)
    manifest: Manifest | None = None

    def measure(self, holdings: Holdings) -> int | None:
        """The bytes of its blocks, headers included, told by some of them; None: they are gone meanwhile."""
        found = [size for size in holdings.find_sizes(self.keys[:_SAMPLE]) if size is not None]
        if not self.keys:
            return 0
        return round(sum(found) / len(found) * len(self.keys)) if found else None


@dataclass
class Catalogue:
    """The keys of a pool, sorted.

    Attributes:
        namespaces: by their digests; also those of which only the manifest is there.
        others: how many keys are not of this software.
    """

    namespaces: dict[str, NamespaceEntry]
    others: int


def read_catalogue(holdings: Holdings) -> Catalogue:
    """All that the pool holds.

    Raises:
        PoolUnavailable: it does not tell its keys.
    """
    namespaces: dict[str, NamespaceEntry] = {}
    described: list[str] = []
    others = 0

    def entry(digest: str) -> NamespaceEntry:
        return namespaces.setdefault(digest, NamespaceEntry(digest))

    for key in holdings.list_keys():
        with contextlib.suppress(ValueError):
            entry(parse_key(key)[0].hex()).keys.append(key)
            continue
        if key.startswith(MARK_PREFIX):
            continue
        with contextlib.suppress(ValueError):
            described.append(parse_manifest_key(key))
            continue
        others += 1
    for digest, manifest in find_manifests(holdings, described).items():
        entry(digest).manifest = manifest
    return Catalogue(namespaces, others)


def find_manifests(holdings: Holdings, digests: Sequence[str]) -> dict[str, Manifest]:
    """The manifests of these namespaces, as far as the pool has them and they are true."""
    if not digests:
        return {}
    found = {}
    values = holdings.read_values([manifest_key(digest) for digest in digests], [MANIFEST_BYTES] * len(digests))
    for digest, value in zip(digests, values, strict=True):
        with contextlib.suppress(ManifestError):
            if value is not None:
                found[digest] = decode_manifest(value.tobytes(), digest)
    return found
