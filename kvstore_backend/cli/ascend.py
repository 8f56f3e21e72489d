"""Checks of a machine with Ascend cards: what Mooncake's ascend transport needs for a configuration."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcommon.formats import format_bytes
from kvstore_backend.backend import ConfigError
from kvstore_backend.cli.checks import find_wheels
from kvstore_backend.cli.report import Finding, fail, ok, warn
from kvstore_backend.config import ascend_buffer_pool, library_folders

__all__ = ["HCCN_FILE", "LIBRARIES", "check_machine", "context_cost", "hccl_sizing", "kv_bytes_per_token"]

HCCN_FILE = Path("/etc/hccn.conf")
"""File with the addresses of the cards' own network ports."""

LIBRARIES = ("libmooncake_common.so", "libtransfer_engine.so", "libmooncake_store.so")
"""Shared libraries of a Mooncake that was built with ``-DBUILD_SHARED_LIBS=ON``."""

_WHEEL = "mooncake-transfer-engine-npu"
_WITHOUT_ASCEND = "mooncake-transfer-engine-non-cuda"
_BUILD = "build it with -DUSE_ASCEND_DIRECT=ON -DBUILD_SHARED_LIBS=ON (docs/mindie.md)"
_BUFFERS = re.compile(r"(\d+):(\d+)", re.ASCII)


def check_machine(*, needs_buffers: bool) -> Iterator[Finding]:
    """Check Mooncake's build, its libraries, the cards' network, and the buffers that MindIE, for example, needs."""
    yield from _check_build()
    yield from _check_libraries()
    yield from _check_network()
    yield from _check_buffers(needs_buffers)


def _check_build() -> Iterator[Finding]:
    """Check whether the installed Mooncake can have been built for Ascend cards."""
    subject, wheels = "ascend build", find_wheels()
    if _WHEEL in wheels:
        yield ok(subject, f"{_WHEEL} {wheels[_WHEEL]}")
    elif _WITHOUT_ASCEND in wheels:
        yield fail(
            subject,
            f"{_WITHOUT_ASCEND} is installed, which has no ascend transport",
            f"pip uninstall {_WITHOUT_ASCEND}, then pip install {_WHEEL}, or {_BUILD}",
        )
    elif wheels:
        yield warn(
            subject,
            f"{', '.join(wheels)} is installed; it serves Ascend cards only if it was built here for them",
            f"if it came from PyPI: pip install {_WHEEL} instead, or {_BUILD}",
        )
    elif importlib.util.find_spec("mooncake") is None:
        yield fail(subject, "Mooncake is not installed", f"pip install {_WHEEL}, or {_BUILD}")
    else:
        yield ok(subject, "a Mooncake of one's own build")


def _check_libraries() -> Iterator[Finding]:
    """Check whether the loader of shared libraries finds Mooncake's libraries."""
    subject, folders = "LD_LIBRARY_PATH", library_folders()
    missing = [name for name in LIBRARIES if not any((folder / name).is_file() for folder in folders)]
    if not missing:
        yield ok(subject, f"it leads to {', '.join(LIBRARIES)}")
        return
    spec = importlib.util.find_spec("mooncake")
    package = Path((spec.submodule_search_locations or [""])[0]) if spec else None
    if package and all((package / name).is_file() for name in LIBRARIES):
        remedy = f"export LD_LIBRARY_PATH={package}:$LD_LIBRARY_PATH"
    else:
        remedy = (
            f"copy them from where Mooncake was built to {package or 'the folder of its Python package'}, "
            "and name that folder in LD_LIBRARY_PATH"
        )
    yield fail(subject, f"no folder in it has {', '.join(missing)}", f"{remedy}, before the server is started")


def _check_network() -> Iterator[Finding]:
    try:
        is_empty = not HCCN_FILE.read_text(errors="replace").strip()
    except OSError as exc:
        remedy = f"in a container: mount the host's (docker run -v {HCCN_FILE}:{HCCN_FILE}:ro); hccn_tool writes it"
        yield fail("hccn.conf", f"{HCCN_FILE} cannot be read ({exc.strerror}), and the cards' network needs it", remedy)
        return
    if is_empty:
        yield fail("hccn.conf", f"{HCCN_FILE} is empty", "copy the host's, which names an address for each card")
    else:
        yield ok("hccn.conf", f"{HCCN_FILE} is there")


def _check_buffers(needs_buffers: bool) -> Iterator[Finding]:
    """Check the buffers for transfers: ``ASCEND_BUFFER_POOL`` gives their number and their size in MB."""
    subject, value = "ASCEND_BUFFER_POOL", ascend_buffer_pool()
    remedy = "export ASCEND_BUFFER_POOL=4:8 in the environment of the server"
    match = _BUFFERS.fullmatch(value)
    if value and match is None:
        yield fail(subject, f"it is {value!r}; it must be NUMBER:MEGABYTES of buffers, such as 4:8", remedy)
    elif match is None or "0" in match.groups():
        text = f"it is {value or 'not set'}, so transfers have no buffers to go through"
        if needs_buffers:
            yield fail(subject, f"{text}, which MindIE's guide wants", remedy)
        else:
            yield warn(subject, text, remedy)
    else:
        yield ok(subject, f"{match[1]} buffers of {match[2]} MB")


# MindIE's numbers for pools whose cards are linked by HCCL.
_MB_PER_LINK = 4
_MAX_LINKS = 512
_MB_PER_HUNDREDTH = 600
_MAX_HUNDREDTHS = 4

_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def kv_bytes_per_token(model: Path) -> int:
    """Return the bytes of K and V for one token over all layers and heads, in the checkpoint's own dtype.

    Raises:
        ConfigError: the folder has no config.json, or that lacks a needed value.
    """
    path = model / "config.json"
    try:
        outer: dict[str, Any] = json.loads(path.read_bytes())
        config = outer.get("text_config", outer)
        dtype = config.get("dtype") or config.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype")
        element_bytes = _ELEMENT_BYTES[str(dtype).removeprefix("torch.")] if dtype else 2
        if "kv_lora_rank" in config:  # multi-head latent attention stores one compressed vector and one rotary key
            return int(
                config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * element_bytes
            )
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return int(
            2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim * element_bytes
        )
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    except KeyError as exc:
        raise ConfigError(f"{path} does not say {exc.args[0]!r}, so the size of its KV is not known") from exc
    except (ValueError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{path} is not the configuration of a decoder model: {exc}") from exc


def hccl_sizing(cards: int, memory_factor: float) -> list[Finding]:
    """Report whether one HCCL-based pool can link ``cards``, and how far the memory factor must be lowered for that."""
    subject = "HCCL links"
    if cards < 1:
        return [fail(subject, f"{cards} cards make no pool", "give --cards the number of cards or dies in the pool")]
    if not _MAX_HUNDREDTHS / 100 < memory_factor <= 1:
        return [fail(subject, f"{memory_factor:g} is no memory factor that could be lowered", "give one such as 0.92")]
    if cards > _MAX_LINKS:
        return [
            fail(
                subject,
                f"{cards} cards are more than one pool can link",
                f"split them: at most {_MAX_LINKS} cards a pool",
            )
        ]
    links = cards - 1
    mb = links * _MB_PER_LINK
    hundredths = _count_hundredths(cards)
    lowered = memory_factor - hundredths / 100
    most = memory_factor - _MAX_HUNDREDTHS / 100
    return [
        ok(subject, f"{links} links of {cards} cards take {links} x {_MB_PER_LINK} MB = {mb} MB of each card's memory"),
        ok(
            "memory factor",
            f"lower it from {memory_factor:.2f} to {lowered:.2f}, which frees {hundredths * _MB_PER_HUNDREDTH} MB; "
            f"to {most:.2f} if cards may be added later (up to {_MAX_LINKS})"
            if hundredths
            else f"{memory_factor:.2f} may stay; {most:.2f} if cards may be added later (up to {_MAX_LINKS})",
        ),
    ]


def context_cost(cards: int, kv_bytes: int | None, cards_per_model: int = 1) -> list[Finding]:
    """Report how much shorter a context fits after the memory factor is lowered for the links of ``cards``.

    Args:
        cards: number of cards in the pool, at most as many as it can link.
        kv_bytes: bytes of one token of the model; None: not known.
        cards_per_model: cards that may share one sequence's KV.
    """
    hundredths = _count_hundredths(cards)
    if not hundredths:
        return []
    mb = hundredths * _MB_PER_HUNDREDTH
    text = f"the lower factor leaves {mb} MB less for KV on every card, so a shorter context fits"
    remedy = "keep maxSeqLen and the number of sequences within what is left"
    if kv_bytes is None:
        return [warn("context", text, f"{remedy}; --model FOLDER shows how many tokens less")]
    tokens = mb * 10**6 // kv_bytes
    text += f": about {tokens} tokens less at {format_bytes(kv_bytes)} of KV a token, if one card holds all of it"
    if cards_per_model > 1:
        text += f", and up to {tokens * cards_per_model} if the model's {cards_per_model} cards share it"
    return [warn("context", text, remedy)]


def _count_hundredths(cards: int) -> int:
    """Return the reduction of the memory factor, in steps of 0.01, that the links of ``cards`` need."""
    return math.ceil((cards - 1) * _MB_PER_LINK / _MB_PER_HUNDREDTH)
