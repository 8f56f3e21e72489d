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

# Blocks of a namespace have one size, so a few are enough to estimate the total.
_SAMPLE = 8


@dataclass
class NamespaceEntry:
    """One namespace.

    Attributes:
        digest: its name.
        keys: keys of its blocks.
        manifest: the manifest that its instances wrote; None if they wrote none, or it was evicted.
    """

    digest: str
    keys: list[str] = field(default_factory=list)
    manifest: Manifest | None = None

    def measure(self, holdings: Holdings) -> int | None:
        """Estimate the bytes of its blocks, headers included, from a sample; None if the sampled blocks have gone."""
        found = [size for size in holdings.find_sizes(self.keys[:_SAMPLE]) if size is not None]
        if not self.keys:
            return 0
        return round(sum(found) / len(found) * len(self.keys)) if found else None


@dataclass
class Catalogue:
    """Keys of a pool, sorted.

    Attributes:
        namespaces: namespaces by digest; also namespaces of which the pool has only the manifest.
        others: number of keys that other software wrote.
    """

    namespaces: dict[str, NamespaceEntry]
    others: int


def read_catalogue(holdings: Holdings) -> Catalogue:
    """List everything that the pool holds.

    Raises:
        PoolUnavailable: the pool cannot list its keys.
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
    """Return the manifests of these namespaces that the pool has and that match their digests."""
    if not digests:
        return {}
    found = {}
    values = holdings.read_values([manifest_key(digest) for digest in digests], [MANIFEST_BYTES] * len(digests))
    for digest, value in zip(digests, values, strict=True):
        with contextlib.suppress(ManifestError):
            if value is not None:
                found[digest] = decode_manifest(value.tobytes(), digest)
    return found
