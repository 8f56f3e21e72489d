"""Sizes of a model's KV, and of the device memory that the links of an HCCL-based pool take."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kvcommon.formats import format_bytes
from kvstore_backend.backend import ConfigError
from kvstore_backend.cli.report import Finding, fail, ok, warn

__all__ = ["context_cost", "hccl_sizing", "kv_bytes_per_token"]

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
