"""Checks of ``kvstore doctor`` for a machine with Ascend cards, on which Mooncake uses its ascend transport."""

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
"""File with the network addresses of the Ascend cards."""

LIBRARIES = ("libmooncake_common.so", "libtransfer_engine.so", "libmooncake_store.so")
"""Shared libraries of Mooncake, if it was built with ``-DBUILD_SHARED_LIBS=ON``."""

_WHEEL = "mooncake-transfer-engine-npu"
_WITHOUT_ASCEND = "mooncake-transfer-engine-non-cuda"
_BUILD = "build it with -DUSE_ASCEND_DIRECT=ON -DBUILD_SHARED_LIBS=ON (docs/mindie.md)"
_BUFFERS = re.compile(r"(\d+):(\d+)", re.ASCII)


def check_machine(*, needs_buffers: bool) -> Iterator[Finding]:
    """Check Mooncake's build and shared libraries, the network of the Ascend cards, and the buffers for transfers.

    Args:
        needs_buffers: whether it is a failure (as with MindIE) if no buffers are configured, or only a warning.
    """
    yield from _check_build()
    yield from _check_libraries()
    yield from _check_network()
    yield from _check_buffers(needs_buffers)


def _check_build() -> Iterator[Finding]:
    """Check by the name of Mooncake's distribution whether Mooncake was built for Ascend cards."""
    subject, wheels = "ascend build", find_wheels()
    if _WHEEL in wheels:
        yield ok(subject, f"{_WHEEL} {wheels[_WHEEL]}")
    elif _WITHOUT_ASCEND in wheels:
        yield fail(
            subject,
            f"the installed {_WITHOUT_ASCEND} has no ascend transport",
            f"pip uninstall {_WITHOUT_ASCEND}, then pip install {_WHEEL}, or {_BUILD}",
        )
    elif wheels:
        yield warn(
            subject,
            f"the installed {', '.join(wheels)} works with Ascend cards only if it was built for them on this machine",
            f"if it is from PyPI: pip install {_WHEEL} instead, or {_BUILD}",
        )
    elif importlib.util.find_spec("mooncake") is None:
        yield fail(subject, "Mooncake is not installed", f"pip install {_WHEEL}, or {_BUILD}")
    else:
        yield ok(subject, "Mooncake was not installed from PyPI, so it was probably built for this machine")


def _check_libraries() -> Iterator[Finding]:
    """Check whether Mooncake's shared libraries are in the folders of ``LD_LIBRARY_PATH``."""
    subject, folders = "LD_LIBRARY_PATH", library_folders()
    missing = [name for name in LIBRARIES if not any((folder / name).is_file() for folder in folders)]
    if not missing:
        yield ok(subject, f"the folders in this variable contain {', '.join(LIBRARIES)}")
        return
    spec = importlib.util.find_spec("mooncake")
    package = Path((spec.submodule_search_locations or [""])[0]) if spec else None
    if package and all((package / name).is_file() for name in LIBRARIES):
        remedy = f"export LD_LIBRARY_PATH={package}:$LD_LIBRARY_PATH"
    else:
        remedy = (
            f"copy them from Mooncake's build folder to {package or 'the folder of its Python package'}, and add that "
            "folder to LD_LIBRARY_PATH"
        )
    yield fail(
        subject, f"no folder in this variable contains {', '.join(missing)}", f"{remedy}, before the server is started"
    )


def _check_network() -> Iterator[Finding]:
    try:
        is_empty = not HCCN_FILE.read_text(errors="replace").strip()
    except OSError as exc:
        remedy = (
            f"in a container: mount the host's file (docker run -v {HCCN_FILE}:{HCCN_FILE}:ro); hccn_tool writes it"
        )
        yield fail("hccn.conf", f"{HCCN_FILE} cannot be read ({exc.strerror}), and the cards' network needs it", remedy)
        return
    if is_empty:
        yield fail("hccn.conf", f"{HCCN_FILE} is empty", "copy the host's file, which has an address for each card")
    else:
        yield ok("hccn.conf", f"{HCCN_FILE} has the network of the cards")


def _check_buffers(needs_buffers: bool) -> Iterator[Finding]:
    """Check the variable ``ASCEND_BUFFER_POOL``, which sets number and size (in MB) of the buffers for transfers."""
    subject, value = "ASCEND_BUFFER_POOL", ascend_buffer_pool()
    remedy = "export ASCEND_BUFFER_POOL=4:8 in the environment of the server"
    match = _BUFFERS.fullmatch(value)
    if value and match is None:
        yield fail(subject, f"the variable is {value!r}; it must be NUMBER:MEGABYTES of buffers, such as 4:8", remedy)
    elif match is None or "0" in match.groups():
        text = f"the variable is {value or 'not set'}, so transfers have no buffers"
        if needs_buffers:
            yield fail(subject, f"{text}, as MindIE's guide requires", remedy)
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
    """Return the bytes of one token's KV in all layers and heads, in the dtype of the checkpoint in folder ``model``.

    Raises:
        ConfigError: the folder has no config.json, or the file lacks a necessary value.
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
        raise ConfigError(f"{path} lacks {exc.args[0]!r}, so the size of the model's KV is not known") from exc
    except (ValueError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{path} is not the configuration of a decoder model: {exc}") from exc


def hccl_sizing(cards: int, memory_factor: float) -> list[Finding]:
    """Report whether a pool can link this number of cards, and to which memory factor the engine must be set for that.

    Each card has a link of HCCL (Huawei's communication library) to each other card, and the links take card memory.

    Args:
        cards: number of cards or dies in the pool.
        memory_factor: share of a card's memory that the engine is set to use now.
    """
    subject = "HCCL links"
    if cards < 1:
        return [
            fail(subject, f"a pool cannot have {cards} cards", "give --cards the number of cards or dies in the pool")
        ]
    if not _MAX_HUNDREDTHS / 100 < memory_factor <= 1:
        text = f"the memory factor {memory_factor:g} cannot be lowered by {_MAX_HUNDREDTHS / 100:g}"
        return [fail(subject, text, "give --memory-factor the engine's factor, such as 0.92")]
    if cards > _MAX_LINKS:
        return [
            fail(
                subject,
                f"{cards} cards are more than the {_MAX_LINKS} that one pool can connect",
                f"divide them among several pools, each with at most {_MAX_LINKS} cards",
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
            else f"{memory_factor:.2f} is low enough; {most:.2f} if cards may be added later (up to {_MAX_LINKS})",
        ),
    ]


def context_cost(cards: int, kv_bytes: int | None, cards_per_model: int = 1) -> list[Finding]:
    """Report how many tokens of KV no longer fit after the memory factor is lowered.

    The engine's memory factor is its share of a card's memory. It must be lowered because the HCCL links between the
    pool's cards need memory.

    Args:
        cards: number of cards in the pool, at most ``_MAX_LINKS``.
        kv_bytes: bytes of the KV of one token, or None if they are not known.
        cards_per_model: number of cards among which the KV of a sequence may be divided.
    """
    hundredths = _count_hundredths(cards)
    if not hundredths:
        return []
    mb = hundredths * _MB_PER_HUNDREDTH
    text = f"the lower factor leaves {mb} MB less for KV on every card, so a shorter context fits"
    remedy = "lower maxSeqLen or the number of sequences, so that they fit into the memory that is left"
    if kv_bytes is None:
        return [warn("context", text, f"{remedy}; --model FOLDER shows how many tokens are lost")]
    tokens = mb * 10**6 // kv_bytes
    text += f": about {tokens} tokens less at {format_bytes(kv_bytes)} of KV per token, if one card has all of the KV"
    if cards_per_model > 1:
        text += f", and up to {tokens * cards_per_model} if it is divided among the model's {cards_per_model} cards"
    return [warn("context", text, remedy)]


def _count_hundredths(cards: int) -> int:
    """Return by how many hundredths the memory factor must be lowered for the links between ``cards`` cards."""
    return math.ceil((cards - 1) * _MB_PER_LINK / _MB_PER_HUNDREDTH)
