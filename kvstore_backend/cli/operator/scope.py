"""Reads which blocks an operator's command selects: whole namespaces, or the blocks of a prefix.

The name of a block is a hash of all tokens up to its end. So a prefix selects its own full blocks, but not the later
blocks of prompts that begin with the prefix: the keys do not show which blocks follow each other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore_backend.backend import ConfigError
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.clear_marks import MARK_PREFIX
from kvstore_backend.manifest import (
    MANIFEST_BYTES,
    Manifest,
    ManifestError,
    decode_manifest,
    manifest_key,
    parse_manifest_key,
)
from kvstore_backend.namespace import key_prefix, parse_key
from kvstore_backend.stores.holdings import Holdings

__all__ = [
    "Catalogue",
    "NamespaceEntry",
    "Scope",
    "add_scope_arguments",
    "find_manifests",
    "find_scope",
    "names_prefix",
    "open_tokenizer",
    "read_catalogue",
    "read_text",
]

_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHORT_DIGEST = re.compile(r"[0-9a-f]{8,31}")
_OWN_HASHES = "kvstore"
"""Value of the fact ``block_hashes`` in a manifest if ``block_hash.py`` computes the block hashes of the namespace."""


@dataclass(frozen=True)
class Scope:
    """Blocks of one namespace that the arguments of a command select.

    Attributes:
        digest: digest of the namespace.
        keys: keys of the blocks of a prefix, in order, or None for all blocks of the namespace.
        num_tokens: number of tokens in the blocks of the prefix; 0 for all blocks of the namespace.
        manifest: manifest of the namespace; None if the pool does not have it.
    """

    digest: str
    keys: Sequence[str] | None
    num_tokens: int = 0
    manifest: Manifest | None = None

    def name_keys(self, holdings: Holdings) -> list[str]:
        """Return all keys of the namespace, or the keys of the prefix's blocks, some of which the pool may lack.

        Raises:
            PoolUnavailable: the pool cannot list its keys.
        """
        if self.keys is not None:
            return list(self.keys)
        return [key for key in holdings.list_keys() if key.startswith(key_prefix(self.digest))]


def add_scope_arguments(parser: argparse.ArgumentParser, *, verb: str) -> None:
    """Declare the arguments that select blocks; ``verb`` is the command's action, for their help texts."""
    add = parser.add_argument
    add(
        "--namespace",
        action="append",
        metavar="DIGEST",
        help=f"{verb} the namespace with this digest: 32 hex digits, or at least the first 8 of them; repeatable",
    )
    named = parser.add_mutually_exclusive_group()
    named.add_argument("--prefix", metavar="TEXT", help=f"{verb} the full blocks of this text; needs --model")
    named.add_argument(
        "--prefix-file",
        metavar="FILE",
        type=Path,
        help=f"{verb} the full blocks of the text in this file; needs --model",
    )
    named.add_argument(
        "--tokens", metavar="IDS", help=f"{verb} the full blocks of these token ids: 1,2,3, or @FILE with the ids"
    )
    add("--model", metavar="FOLDER", type=Path, help="checkpoint with the tokenizer that converts the text to tokens")
    add("--salt", default="", help="cache_salt of the requests that stored the blocks of the prefix")
    add(
        "--block-size",
        type=int,
        metavar="N",
        help="tokens in a block; needed if the pool has no manifest (description) of the namespace",
    )


def names_prefix(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments select the blocks of a prefix, not whole namespaces."""
    return any(given is not None for given in (arguments.prefix, arguments.prefix_file, arguments.tokens))


def find_scope(arguments: argparse.Namespace, holdings: Holdings) -> list[Scope]:
    """Return the blocks that the arguments select, as one scope for each namespace.

    If the arguments have a prefix and no namespace, the pool must have only one namespace.

    Raises:
        ConfigError: the arguments select no blocks, or match several namespaces.
        PoolUnavailable: the keys of the pool are needed, and the pool cannot list them.
    """
    tokens = _read_tokens(arguments) if names_prefix(arguments) else None
    digests = _find_digests(arguments.namespace or [], holdings, is_needed=tokens is not None)
    if not digests:
        raise ConfigError(
            "no blocks are selected; give --namespace DIGEST (kvstore ls shows digests), --prefix or --tokens"
        )
    if tokens is None:
        return [Scope(digest, None) for digest in digests]
    manifests = find_manifests(holdings, digests)
    return [
        _scope_of_prefix(digest, tokens, manifests.get(digest), arguments.salt, arguments.block_size)
        for digest in digests
    ]


def _find_digests(named: Sequence[str], holdings: Holdings, *, is_needed: bool) -> list[str]:
    """Return the complete digest for each of ``named`` (digests, or their first digits), without duplicates.

    If ``named`` is empty and ``is_needed`` is True, the pool must have one namespace, and the result is its digest.
    """
    if all(_DIGEST.fullmatch(name) for name in named) and (named or not is_needed):
        return list(dict.fromkeys(named))
    catalogue = read_catalogue(holdings)
    if named:
        return list(dict.fromkeys(_complete_digest(name, catalogue) for name in named))
    if len(catalogue.namespaces) > 1:
        raise ConfigError(f"the pool has {_tell_namespaces(catalogue)}; choose one with --namespace")
    return list(catalogue.namespaces) or _refuse_empty(catalogue)


def _complete_digest(name: str, catalogue: Catalogue) -> str:
    if _DIGEST.fullmatch(name):
        return name
    if not _SHORT_DIGEST.fullmatch(name):
        raise ConfigError(f"--namespace is {name!r}; it must be 32 hex digits, or at least the first 8 of them")
    found = [digest for digest in catalogue.namespaces if digest.startswith(name)]
    if len(found) != 1:
        many = "several digests begin" if found else "no digest begins"
        raise ConfigError(f"--namespace is {name!r}, but {many} with it; the pool has {_tell_namespaces(catalogue)}")
    return found[0]


def _tell_namespaces(catalogue: Catalogue) -> str:
    names = sorted(catalogue.namespaces)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{len(names)} namespaces: {', '.join(names[:4])}{more}" if names else "none"


def _refuse_empty(catalogue: Catalogue) -> list[str]:
    others = f", only {catalogue.others} keys of other software" if catalogue.others else ""
    raise ConfigError(f"the pool has no blocks to select{others}")


def _scope_of_prefix(
    digest: str, tokens: Sequence[int], manifest: Manifest | None, salt: str, block_size: int | None
) -> Scope:
    namer = manifest.facts.get("block_hashes", _OWN_HASHES) if manifest else _OWN_HASHES
    if namer != _OWN_HASHES:
        raise ConfigError(
            f"{namer} computes the block hashes of namespace {digest}, so this command cannot find the blocks of a "
            "prefix; leave out the prefix to select the whole namespace"
        )
    size = block_size or (manifest.block_size if manifest else 0)
    if size <= 0:
        raise ConfigError(
            f"the pool has no manifest (description) of namespace {digest}; also give --block-size, the tokens in a "
            "block"
        )
    try:
        hashes = extend_block_hashes([], tokens, size, root_hash(salt))
    except ValueError as exc:
        raise ConfigError(f"the tokens of the prefix cannot be used: {exc}") from None
    if not hashes:
        raise ConfigError(
            f"the prefix has {len(tokens)} tokens, less than one block of {size}, so it selects no block; give a "
            "longer prefix"
        )
    keys = [f"{key_prefix(digest)}{each.hex()}" for each in hashes]
    return Scope(digest, keys, len(hashes) * size, manifest)


def _read_tokens(arguments: argparse.Namespace) -> list[int]:
    """Return the token ids of the prefix that the arguments give as tokens, text or file."""
    if arguments.tokens is not None:
        return _parse_tokens(arguments.tokens)
    text = arguments.prefix if arguments.prefix is not None else read_text(arguments.prefix_file, "--prefix-file")
    if arguments.model is None:
        raise ConfigError("a text needs a tokenizer; give --model FOLDER, or give --tokens instead of the text")
    ids: list[int] = open_tokenizer(arguments.model).encode(text).ids  # as an instance encodes /v1/completions
    return ids


def _parse_tokens(given: str) -> list[int]:
    text = read_text(Path(given[1:]), "--tokens") if given.startswith("@") else given
    try:
        return [int(word) for word in re.split(r"[\s,]+", text.strip(" \t\r\n,[]")) if word]
    except ValueError as exc:
        raise ConfigError(f"--tokens must be whole numbers separated by commas, such as 1,2,3: {exc}") from None


def read_text(path: Path, flag: str) -> str:
    """Read a text file that a flag names.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{flag} names {str(path)!r}, which cannot be read: {reason}") from None


def open_tokenizer(model: Path) -> Any:
    """Return a ``tokenizers.Tokenizer`` from the tokenizer.json of the checkpoint in a folder.

    Raises:
        ConfigError: the folder has no readable tokenizer.json, or the library ``tokenizers`` is not installed.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"--model {model} has no tokenizer.json; give the folder of the checkpoint, or --tokens")
    try:
        tokenizers = importlib.import_module("tokenizers")  # imported here, because other commands do not need it
    except ImportError:
        raise ConfigError("the tokenizers library is not installed: pip install tokenizers, or give --tokens") from None
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises Exception itself
        raise ConfigError(f"{file} is not a readable tokenizer: {exc}") from None


# Number of blocks that are measured to estimate the size of a namespace, because its blocks have equal sizes.
_SAMPLE = 8


@dataclass
class NamespaceEntry:
    """Keys and manifest of one namespace in a pool.

    Attributes:
        digest: digest of the namespace.
        keys: keys of the namespace's blocks in the pool.
        manifest: manifest of the namespace; None if the pool does not have it.
    """

    digest: str
    keys: list[str] = field(default_factory=list)
    manifest: Manifest | None = None

    def measure(self, holdings: Holdings) -> int | None:
        """Estimate the bytes of all blocks, with headers, from the first blocks; None if the pool has lost these."""
        found = [size for size in holdings.find_sizes(self.keys[:_SAMPLE]) if size is not None]
        if not self.keys:
            return 0
        return round(sum(found) / len(found) * len(self.keys)) if found else None


@dataclass
class Catalogue:
    """Namespaces of all keys in a pool.

    Attributes:
        namespaces: entry of each namespace, by digest, including namespaces of which the pool has only the manifest.
        others: number of keys of other software.
    """

    namespaces: dict[str, NamespaceEntry]
    others: int


def read_catalogue(holdings: Holdings) -> Catalogue:
    """List all keys of a pool by namespace, and read the manifests of the namespaces.

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
    """Return the manifests of namespaces, by digest. A manifest that is missing, or of another digest, is omitted."""
    if not digests:
        return {}
    found = {}
    values = holdings.read_values([manifest_key(digest) for digest in digests], [MANIFEST_BYTES] * len(digests))
    for digest, value in zip(digests, values, strict=True):
        with contextlib.suppress(ManifestError):
            if value is not None:
                found[digest] = decode_manifest(value.tobytes(), digest)
    return found
