"""FastDeploy's flags that this engine does not have. Flags without effect here are accepted, others are refused.

So FastDeploy's command lines work unchanged, with their abbreviations and ``--config FILE``. If a flag requests a
behaviour that this engine does not have, the message says what to do instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvcommon.hints import list_flags
from kvstore_backend import ConfigError

__all__ = ["IN_FLOAT32", "add_foreign_flags", "expand_abbreviations", "read_config_file"]


class _Flag(NamedTuple):
    """A flag of FastDeploy that this engine does not have.

    Attributes:
        nargs: number of arguments, as in argparse; 0: the flag is a switch.
        harmless: the values that are accepted, because they change nothing here, or None for all values.
        remedy: the end of the message for any other value: why it is refused, and what to do instead.
        is_boolean: whether there is also a ``--no-`` form.
    """

    nargs: int | str | None
    harmless: tuple[str, ...] | None
    remedy: str = ""
    is_boolean: bool = False


_SWITCH, _VALUE = _Flag(0, None), _Flag(None, None)
_BOOLEAN = _Flag(0, None, is_boolean=True)


def _only(*harmless: str, remedy: str) -> _Flag:
    return _Flag(None, harmless, remedy)


def _refuse(remedy: str, nargs: int | str | None = None) -> _Flag:
    return _Flag(nargs, (), remedy)


_PARALLEL = "this engine runs a model on one device"
_FOLDER = "weights come from the folder of --model"

_FLAGS: dict[str, _Flag] = {
    # The API server.
    **dict.fromkeys(("--workers", "--max-concurrency", "--timeout", "--timeout-graceful-shutdown"), _VALUE),
    "--controller-port": _only("-1", remedy="this engine has no controller server; leave the flag out"),
    "--max-waiting-time": _only("-1", remedy="requests wait until their clients disconnect; leave the flag out"),
    "--enable-mm-output": _refuse("this engine answers in text only; leave the flag out", 0),
    "--api-key": _refuse(
        "this engine checks no API keys; give the keys to the router, and let only the router reach the instance"
    ),
    # The model.
    **dict.fromkeys(("--revision", "--use-warmup", "--model-impl", "--seed", "--max-logprobs"), _VALUE),
    **dict.fromkeys(("--enable-logprob", "--lm_head-fp32", "--moe-gate-fp32", "--enable-mm"), _SWITCH),
    "--model-config-name": _only(
        "config.json", remedy="the configuration is read from config.json; leave the flag out"
    ),
    "--tokenizer-base-url": _refuse("the checkpoint's own tokenizer is used; leave the flag out"),
    "--task": _only("generate", remedy="this engine generates text only; leave the flag out"),
    "--runner": _only("auto", "generate", remedy="this engine generates text only; leave the flag out"),
    "--convert": _only("auto", "none", remedy="this engine generates text only; leave the flag out"),
    "--override-pooler-config": _refuse("this engine generates text only; leave the flag out"),
    **dict.fromkeys(
        ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--max-encoder-cache", "--max-processor-cache"), _VALUE
    ),
    "--deploy-modality": _VALUE,
    "--reasoning-parser": _refuse("this engine does not separate reasoning from the answer; leave the flag out"),
    "--chat-template": _refuse("messages are rendered by the checkpoint's own template; leave the flag out"),
    "--tool-call-parser": _refuse("in this engine a tool call is a part of the answer's text; leave the flag out"),
    "--tool-parser-plugin": _refuse("in this engine a tool call is a part of the answer's text; leave the flag out"),
    "--load-strategy": _only("normal", remedy=f"{_FOLDER}; leave the flag out"),
    "--rsync-config": _refuse(f"{_FOLDER}; leave the flag out"),
    "--load-choices": _only("default", "default_v1", remedy=f"{_FOLDER}; leave the flag out"),
    "--quantization": _refuse("this engine uses the checkpoint's weights unchanged; leave the flag out"),
    # Computation and sampling.
    **dict.fromkeys(("--speculative-config", "--graph-optimization-config", "--benchmark-metrics-config"), _VALUE),
    "--plas-attention-config": _refuse("this engine has another sparse attention: --enable-retrieval"),
    "--guided-decoding-backend": _only(
        "off", remedy="this engine does not support structured output; leave the flag out"
    ),
    "--guided-decoding-disable-any-whitespace": _VALUE,
    "--enable-keep-sampling-mask": _refuse("this engine does not report the sampling mask; leave the flag out", 0),
    "--logprobs-mode": _only("raw_logprobs", remedy="this engine reports raw log probabilities; leave the flag out"),
    "--enable-early-stop": _refuse("this engine does not detect repetitions; leave the flag out", 0),
    "--early-stop-config": _refuse("this engine does not detect repetitions; leave the flag out"),
    "--logits-processors": _refuse("this engine does not support logits processors; leave the flag out", "+"),
    "--enable-entropy": _refuse("this engine does not report entropy; leave the flag out", 0),
    # Devices.
    **dict.fromkeys(
        (
            *("--disable-custom-all-reduce", "--enable-flashinfer-allreduce-fusion", "--use-internode-ll-two-stage"),
            *("--disable-sequence-parallel-moe", "--enable-expert-parallel", "--enable-eplb", "--enable-chunked-moe"),
            *("--ep-prefill-use-worst-num-tokens", "--enable-moe-scores-elementwise-fuse"),
        ),
        _SWITCH,
    ),
    **dict.fromkeys(("--eplb-config", "--chunked-moe-size"), _VALUE),
    **dict.fromkeys(("--shutdown-comm-group-if-worker-idle", "--enable-overlap-schedule"), _BOOLEAN),
    "--data-parallel-size": _only("1", remedy=f"{_PARALLEL}; start several instances behind a router"),
    "--local-data-parallel-id": _only("0", remedy=f"{_PARALLEL}; start several instances behind a router"),
    "--ips": _only("127.0.0.1", "0.0.0.0", "localhost", remedy=f"{_PARALLEL}; leave the flag out"),
    "--routing-replay-config": _refuse("this engine does not record the routes of experts; leave the flag out"),
    # KV cache.
    **dict.fromkeys(
        ("--kv-cache-ratio", "--swap-space", "--prealloc-dec-block-slot-num-threshold", "--static-decode-blocks"),
        _VALUE,
    ),
    "--cache-queue-port": _VALUE,
    "--write-policy": _only("write_through", remedy="blocks are written through; leave the flag out"),
    # Chunked prefill; this engine always computes prompts in chunks.
    **dict.fromkeys(("--enable-chunked-prefill", "--disable-chunked-mm-input"), _SWITCH),
    **dict.fromkeys(
        ("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"), _VALUE
    ),
    # Schedulers.
    "--scheduler-name": _only("local", remedy="this engine has its own scheduler; a router spreads requests"),
    **{
        f"--scheduler-{name}": _VALUE
        for name in (
            *("max-size", "ttl", "host", "port", "db", "password", "topic", "min-load-score", "load-shards-num"),
            *("sync-period", "expire-period", "release-load-expire-period", "reader-parallel", "writer-parallel"),
            *("reader-batch-size", "writer-batch-size"),
        )
    },
}

_LIMITS = "the request or the checkpoint's generation_config.json sets the end of an answer; leave the flag out"
_ANSWERS = "answers are always streamed as they are generated; leave the flag out"

_NEWER_FLAGS: dict[str, _Flag] = {
    **dict.fromkeys(("--enable-mega-moe", "--skip-port-check"), _SWITCH),
    **dict.fromkeys(("--model-loader-extra-config", "--write-through-threshold"), _VALUE),
    "--kvcache-storage-config": _refuse("the pool is the one that --kvcache-storage-backend names; leave the flag out"),
    "--max-completion-tokens": _refuse(_LIMITS),
    "--min-completion-tokens": _refuse(_LIMITS),
    "--reasoning-max-tokens": _refuse(_LIMITS),
    "--response-max-tokens": _refuse(_LIMITS),
    "--input-max-tokens": _refuse("--max-model-len limits the prompt; leave the flag out"),
    "--output-fallback": _refuse(_ANSWERS),
    "--output-fallback-plugin": _refuse(_ANSWERS),
    "--output-fallback-config": _refuse(_ANSWERS),
}
"""Flags of FastDeploy after version 2.6. They cannot be abbreviated: that would make abbreviations of 2.6 ambiguous."""

IN_FLOAT32 = ("--lm_head-fp32", "--moe-gate-fp32")
"""Flags that compute a part of the model in float32: accepted with ``--dtype float32``, otherwise refused."""

_SHARED = (
    *("--port", "--host", "--metrics-port", "--model", "--served-model-name", "--tokenizer", "--max-model-len"),
    *("--block-size", "--dynamic-load-weight", "--engine-worker-queue-port", "--tensor-parallel-size"),
    *("--max-num-seqs", "--num-gpu-blocks-override", "--max-num-batched-tokens", "--gpu-memory-utilization"),
    *("--kvcache-storage-backend", "--enable-prefix-caching", "--no-enable-prefix-caching"),
    *("--enable-output-caching", "--no-enable-output-caching", "--splitwise-role", "--cache-transfer-protocol"),
    *("--pd-comm-port", "--rdma-comm-ports", "--router"),
)
"""The flags that FastDeploy and this engine have in common."""

_NAMES = (*_SHARED, *_FLAGS, *(f"--no-{name[2:]}" for name, flag in _FLAGS.items() if flag.is_boolean))
"""All flags of FastDeploy 2.6. Each can be abbreviated to a beginning that no other flag has."""


class _Foreign(argparse.Action):
    """Action for a flag of FastDeploy: adds its name to ``without_effect`` of the namespace, or refuses its value."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, flag: _Flag) -> None:
        super().__init__(
            option_strings, dest, nargs=flag.nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS, metavar="VALUE"
        )
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        said = values if isinstance(values, str) else " ".join(values or ())
        harmless = self._flag.harmless
        if harmless is not None and said.strip() not in harmless:
            # If all values are refused, the message does not quote this one, because it may be a secret key.
            raise ConfigError(f"{f'{option_string} {said}' if harmless else option_string}: {self._flag.remedy}")
        given = namespace.without_effect
        namespace.without_effect = given if option_string in given else (*given, str(option_string))


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Add FastDeploy's other flags. ``without_effect`` of the parsed namespace lists those that were given."""
    parser.set_defaults(without_effect=())
    for name, flag in {**_FLAGS, **_NEWER_FLAGS}.items():
        names = [name, f"--no-{name[2:]}"] if flag.is_boolean else [name]
        parser.add_argument(*names, action=_Foreign, flag=flag)


def expand_abbreviations(argv: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return ``argv`` with the full name in place of each abbreviated flag of FastDeploy.

    Args:
        argv: the words of a command line.
        known: all flags of this engine, which stay in the result as they are.

    Raises:
        ConfigError: several flags of FastDeploy begin with an abbreviation.
    """
    known = set(known)
    expanded = []
    for word in argv:
        name, *value = word.split("=", 1)
        if name.startswith("--") and len(name) > 2 and name not in known:
            meant = [each for each in _NAMES if each.startswith(name)]
            if len(meant) > 1:
                raise ConfigError(f"{name!r} is ambiguous; write the full name of one of these: {', '.join(meant)}")
            word = "=".join([*meant, *value]) if meant else word
        expanded.append(word)
    return expanded


def read_config_file(path: str, parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Read a YAML file with flags.

    Returns:
        The flags as words of a command line, and the names in the file that are not flags.

    Raises:
        ConfigError: the file cannot be read, is not a mapping, or has a switch that is neither true nor false.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as exc:
        raise ConfigError(f"--config {path}: the file cannot be read: {exc.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(exc).split())}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {path} must be a mapping of flags' names to values")
    flags = {name.strip("-").replace("-", "_"): name for name in list_flags(parser)}
    words: list[str] = []
    unknown: list[str] = []
    for key, value in settings.items():
        name = flags.get(str(key).replace("-", "_"))
        if name is None or name == "--config":
            unknown.append(str(key))
        else:
            words += _write_words(name, value, list_flags(parser), f"--config {path}: {key}")
    return words, unknown


def _write_words(name: str, value: object, actions: Mapping[str, argparse.Action], where: str) -> list[str]:
    """Return one setting of a YAML file as words of a command line; an empty list if it has no value.

    Args:
        name: the flag, with its dashes.
        value: the value in the file.
        actions: the parser's action for each flag.
        where: file and name of the setting, for errors.
    """
    if value is None or value == "":
        return []
    if actions[name].nargs == 0:
        negation = f"--no-{name[2:]}"
        text = str(value).lower()
        if text not in ("true", "false", "1", "0"):
            raise ConfigError(f"{where} is {value!r}; it must be true or false")
        return [name] if text in ("true", "1") else [negation] if negation in actions else []
    if isinstance(value, list) and actions[name].nargs == "+":
        return [name, *map(str, value)]
    if isinstance(value, list):
        return [f"{name}={','.join(map(str, value))}"]
    return [f"{name}={json.dumps(value) if isinstance(value, dict) else value}"]
