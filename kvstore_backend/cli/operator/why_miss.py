"""Explain why two instances or two prompts share no blocks: compare configurations, or prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvstore_backend.backend import ConfigError
from kvstore_backend.cli.operator.asking import detokenize, is_address, read_instance, tokenize
from kvstore_backend.cli.operator.pool import add_pool_arguments, open_holdings
from kvstore_backend.cli.operator.scope import Catalogue, open_tokenizer, read_catalogue, read_text
from kvstore_backend.cli.report import print_json
from kvstore_backend.manifest import Manifest
from kvstore_backend.why_miss import Verdict, compare_prompts, compare_setups

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore why-miss``."""
    add_pool_arguments(parser)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--between",
        nargs=2,
        metavar=("A", "B"),
        help="two configurations, each an instance (HOST:PORT) or a namespace of the pool (first digits of its digest)",
    )
    asked.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help='file with a prompt: a text, a JSON list of token ids, or JSON with "messages"',
    )
    add = parser.add_argument
    add("--compare-with", type=Path, metavar="FILE", help="an earlier prompt that should have the same leading blocks")
    add("--instance", metavar="HOST:PORT", help="instance that converts the prompts to tokens")
    add("--model", type=Path, metavar="FOLDER", help="checkpoint with the tokenizer that converts texts to tokens")


def run(arguments: argparse.Namespace) -> int:
    """Compare the two configurations or prompts in the arguments, and print why they share no blocks.

    Raises:
        ConfigError: the arguments contradict each other or are incomplete.
        PoolUnavailable: the pool or an instance cannot be reached.
    """
    verdict = _compare_setups(arguments) if arguments.between else _compare_prompts(arguments)
    if arguments.json:
        print_json(verdict.to_json())
    else:
        print(f"{verdict.reason}: {verdict.sentence}")
    return 0


def _compare_setups(arguments: argparse.Namespace) -> Verdict:
    """Compare the two configurations in ``--between``. The pool is read only if one of them is given by its digest."""
    names: list[str] = arguments.between
    found = {name: read_instance(name) for name in names if is_address(name)}
    if digests := [name for name in names if name not in found]:
        with open_holdings(arguments) as holdings:
            catalogue = read_catalogue(holdings)
            found |= {name: _find_manifest(name, catalogue) for name in digests}
    return compare_setups(found[names[0]], found[names[1]], (names[0], names[1]))


def _find_manifest(name: str, catalogue: Catalogue) -> Manifest:
    """Return the manifest of the only namespace with a digest that begins with ``name``.

    Raises:
        ConfigError: no digest or several digests begin with ``name``, or the pool lacks the manifest.
    """
    entries = [entry for digest, entry in catalogue.namespaces.items() if digest.startswith(name)]
    if len(entries) == 1 and entries[0].manifest is not None:
        return entries[0].manifest
    if len(entries) == 1:
        raise ConfigError(
            f"namespace {entries[0].digest} has no valid manifest (description) in the pool: the instances of this "
            "namespace have ended, or run an older version of this software; compare the instances themselves with "
            "--between HOST:PORT HOST:PORT"
        )
    if not catalogue.namespaces:
        others = f"; the {catalogue.others} keys in it are of other software" if catalogue.others else ""
        raise ConfigError(f"the pool has no namespace: no instance has joined it, or it was cleared{others}")
    known = ", ".join(sorted(catalogue.namespaces)[:4])
    found = "several namespaces that begin with" if entries else "no namespace"
    raise ConfigError(f"the pool has {found} {name!r}; it has {known}")


def _compare_prompts(arguments: argparse.Namespace) -> Verdict:
    if arguments.compare_with is None:
        raise ConfigError("--prompt-file is compared with an earlier prompt; also give --compare-with FILE")
    decode: Callable[[Sequence[int]], str] | None = None
    encode = _refuse_text
    if arguments.instance:
        encode, decode = partial(tokenize, arguments.instance), partial(detokenize, arguments.instance)
    elif arguments.model:
        tokenizer = open_tokenizer(arguments.model)

        def encode(body: dict[str, Any]) -> list[int]:
            return list(tokenizer.encode(body["prompt"]).ids) if "prompt" in body else _refuse_text(body)

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    earlier = _read_tokens(arguments.compare_with, "--compare-with", encode)
    return compare_prompts(earlier, _read_tokens(arguments.prompt_file, "--prompt-file", encode), decode)


def _refuse_text(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        raise ConfigError("only an instance can convert messages to tokens; give --instance HOST:PORT")
    raise ConfigError("a text needs a tokenizer: give --model FOLDER, or --instance HOST:PORT")


def _read_tokens(path: Path, flag: str, encode: Callable[[dict[str, Any]], list[int]]) -> list[int]:
    """Return the tokens of a prompt in the file that ``flag`` names; ``encode`` converts text or messages to tokens.

    Raises:
        ConfigError: the file cannot be read or has no prompt, or the prompt cannot be converted to tokens.
    """
    text = read_text(path, flag)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return encode({"prompt": text})
    if isinstance(value, dict):
        value = value.get("messages") or value.get("prompt")
    if isinstance(value, str) and value:
        return encode({"prompt": value})
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return encode({"messages": value})
    if isinstance(value, list) and value and all(type(each) is int and 0 <= each < 1 << 32 for each in value):
        return value
    raise ConfigError(
        f"prompt file {path} must have a text, messages or a list of token ids, which are whole numbers in [0, 2**32)"
    )
