"""Explain why blocks were not shared: between two set-ups, for a prompt, or for a finished request."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore_backend.backend import ConfigError, Status
from kvstore_backend.cli.operator.asking import (
    ask_instance_for_prompt,
    ask_instance_for_request,
    ask_router,
    is_address,
    read_instance,
)
from kvstore_backend.cli.operator.catalogue import Catalogue, read_catalogue
from kvstore_backend.cli.operator.pool import add_pool_arguments, open_holdings
from kvstore_backend.cli.operator.scope import open_tokenizer
from kvstore_backend.cli.report import print_json
from kvstore_backend.manifest import Manifest
from kvstore_backend.namespace import key_prefix
from kvstore_backend.stores.holdings import Holdings
from kvstore_backend.why_miss import Prompt, Verdict, compare_setups, explain_prompt

__all__ = ["add_arguments", "run"]

_QUESTIONS = "--between A B, --prompt-file FILE or --request-id ID"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore why-miss``."""
    add_pool_arguments(parser)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--between",
        nargs=2,
        metavar=("A", "B"),
        help="two set-ups, each an instance (HOST:PORT) or a namespace of the pool (its digest, or its beginning)",
    )
    asked.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help='a prompt: a text, a JSON list of token ids, or JSON with "messages"',
    )
    asked.add_argument("--request-id", metavar="ID", help="a request that is over; needs --router or --instance")
    add = parser.add_argument
    add("--compare-with", type=Path, metavar="FILE", help="a prompt that is thought to be in the pool")
    add("--instance", metavar="HOST:PORT", help="the instance that has the prompt, or has answered the request")
    add("--router", metavar="HOST:PORT", help="the router that has the request from a client")
    add("--token-file", type=Path, metavar="FILE", help="a file with the router's admin token, if it has one")
    add("--namespace", metavar="DIGEST", help="the prompt's, where no --instance is named; the pool's only one else")
    add("--model", type=Path, metavar="FOLDER", help="the checkpoint whose tokenizer a text is for")
    add("--salt", default="", help="the cache_salt that the prompt has")
    add("--adapter", default="", metavar="NAME", help="the adapter that the prompt is for")
    parser.epilog = "An instance remembers its last requests, and reports at which token a prompt differs from them."


def run(arguments: argparse.Namespace) -> int:
    """Print the reason.

    Raises:
        ConfigError: the arguments are contradictory or incomplete.
        PoolUnavailable: the pool, an instance or the router cannot be reached, or has no record of the request.
    """
    verdict = _judge(arguments)
    if arguments.json:
        print_json(verdict.to_json())
    else:
        print(f"{verdict.reason}: {verdict.sentence}")
    return 0


def _judge(arguments: argparse.Namespace) -> Verdict:
    if arguments.compare_with is not None and arguments.prompt_file is None:
        raise ConfigError("--compare-with needs a prompt to compare: give --prompt-file, too")
    if arguments.between:
        return _compare(arguments)
    if arguments.request_id:
        return _explain_request(arguments)
    if arguments.prompt_file is None:
        raise ConfigError(f"nothing is asked: give {_QUESTIONS}")
    if arguments.instance:
        return ask_instance_for_prompt(arguments.instance, _build_body(arguments))
    return _explain_prompt(arguments)


def _compare(arguments: argparse.Namespace) -> Verdict:
    """Compare two set-ups; the pool is read only for those that are named by digests."""
    names: list[str] = arguments.between
    found = {name: read_instance(name) for name in names if is_address(name)}
    if digests := [name for name in names if name not in found]:
        with open_holdings(arguments) as holdings:
            catalogue = read_catalogue(holdings)
            found |= {name: _find_manifest(name, catalogue) for name in digests}
    return compare_setups(found[names[0]], found[names[1]], (names[0], names[1]))


def _explain_request(arguments: argparse.Namespace) -> Verdict:
    if bool(arguments.router) == bool(arguments.instance):
        raise ConfigError("--request-id needs --router HOST:PORT, or --instance HOST:PORT, and not both")
    if arguments.router:
        return ask_router(arguments.router, arguments.request_id, arguments.token_file)
    return ask_instance_for_request(arguments.instance, arguments.request_id)


def _explain_prompt(arguments: argparse.Namespace) -> Verdict:
    """Compare a prompt with the pool's blocks; no instance is asked."""
    prompt = _read_prompt(arguments.prompt_file, arguments)
    stored = _read_prompt(arguments.compare_with, arguments) if arguments.compare_with else None
    with open_holdings(arguments) as holdings:
        catalogue = read_catalogue(holdings)
        manifest = _find_manifest(arguments.namespace or "", catalogue)
        others = [entry.manifest for entry in catalogue.namespaces.values() if entry.manifest is not None]

        def exists(digest: str, hashes: Sequence[bytes]) -> list[Status]:
            return _find_blocks(holdings, digest, hashes)

        return explain_prompt(exists, manifest, prompt, stored=stored, others=others)


def _find_blocks(holdings: Holdings, digest: str, hashes: Sequence[bytes]) -> list[Status]:
    sizes = holdings.find_sizes([f"{key_prefix(digest)}{each.hex()}" for each in hashes])
    return [Status.ABSENT if size is None else Status.OK for size in sizes]


def _find_manifest(name: str, catalogue: Catalogue) -> Manifest:
    """Return the manifest of the namespace with a digest that begins with ``name``; "" selects the only namespace.

    Raises:
        ConfigError: no namespace matches, or several do.
    """
    entries = [entry for digest, entry in catalogue.namespaces.items() if digest.startswith(name)]
    if len(entries) == 1 and entries[0].manifest is not None:
        return entries[0].manifest
    if len(entries) == 1:
        raise ConfigError(
            f"namespace {entries[0].digest} has no manifest in the pool that is true of it: its instances have left, "
            "or are of an older version; compare the instances themselves with --between HOST:PORT HOST:PORT"
        )
    if not catalogue.namespaces:
        others = f"; its {catalogue.others} keys are of other software" if catalogue.others else ""
        raise ConfigError(f"the pool holds no namespace: no instance has joined it, or it was cleared{others}")
    known = ", ".join(sorted(catalogue.namespaces)[:4])
    if not entries:
        raise ConfigError(f"the pool has no namespace {name!r}; it has {known}")
    raise ConfigError(f"the pool has several namespaces that begin with {name!r} ({known}); name one with --namespace")


def _read_file(path: Path) -> dict[str, Any]:
    """Read the prompt in a file, in the form of a request's body: ``prompt`` or ``messages``.

    Raises:
        ConfigError: the file cannot be read, or has no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"prompt file {path} cannot be read: {reason}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"prompt": text}
    if isinstance(value, dict) and (given := next((name for name in ("messages", "prompt") if value.get(name)), None)):
        salt = {"cache_salt": value["cache_salt"]} if isinstance(value.get("cache_salt"), str) else {}
        return {given: value[given], **salt}
    if isinstance(value, list) and value:
        return {"messages" if isinstance(value[0], dict) else "prompt": value}
    raise ConfigError(f"prompt file {path} has neither a text, nor a list of token ids, nor messages")


def _build_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the body of the request to an instance."""
    if arguments.adapter:
        raise ConfigError("--adapter is for a pool that is asked directly: this instance serves no adapters")
    salt = {"cache_salt": arguments.salt} if arguments.salt else {}
    body = {**_read_file(arguments.prompt_file), **salt}
    return {**body, "compare_with": {**_read_file(arguments.compare_with), **salt}} if arguments.compare_with else body


def _read_prompt(path: Path, arguments: argparse.Namespace) -> Prompt:
    """Read a prompt and its tokens.

    Raises:
        ConfigError: the file cannot be converted to tokens here.
    """
    body = _read_file(path)
    salt = arguments.salt or body.get("cache_salt", "")
    if "messages" in body:
        raise ConfigError(f"{path} has messages, which only an instance renders: name one with --instance HOST:PORT")
    given = body["prompt"]
    tokenizer = open_tokenizer(arguments.model) if arguments.model is not None else None
    prompt = Prompt([], salt, arguments.adapter)
    if tokenizer is not None:
        prompt = replace(prompt, decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
    if isinstance(given, str):
        if tokenizer is None:
            raise ConfigError(f"{path} has a text: give --model FOLDER for its tokenizer, or --instance HOST:PORT")
        return replace(prompt, token_ids=tokenizer.encode(given).ids)
    if isinstance(given, list) and all(type(each) is int and 0 <= each < 1 << 32 for each in given):
        return replace(prompt, token_ids=given)
    raise ConfigError(f"{path} has a prompt that is neither a text nor token ids, whole numbers in [0, 2**32)")
