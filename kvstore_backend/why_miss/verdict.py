"""Verdict on one miss: the reason, as a word for programs, and a sentence for operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["REASONS", "Verdict"]

REASONS = {
    "hit": "no miss",
    "same_setup": "both have one namespace, so they share blocks",
    "other_rank": "two ranks of one set-up, each of which has its own blocks",
    "other_engine": "another engine, which names blocks in its own way",
    "other_model": "another model",
    "other_weights": "the same architecture with other weights",
    "other_settings": "a setting of the engine that changes what is computed",
    "other_dtype": "another dtype of the KV",
    "other_block_size": "another block size",
    "other_shape": "other numbers of layers, heads or elements",
    "other_tp_size": "another tensor-parallel size",
    "other_tenant": "another tenant",
    "other_layout": "the bytes of a block are arranged in another way",
    "other_format": "another version of the format of blocks",
    "other_field": "something else that belongs to the namespace",
    "other_salt": "another cache_salt",
    "other_adapter": "another adapter",
    "below_block": "the prompt is not longer than one block",
    "parts": "the prompt parts from the stored one",
    "new": "nothing like it was stored",
    "unsaved": "it was computed, but the pool did not take it",
    "evicted": "it was stored, and is gone",
    "damaged": "it was there, but did not arrive whole",
    "pool_away": "the pool does not answer",
    "slow": "computing it was expected to be quicker than loading it",
    "own_cache": "the instance's own cache had it",
    "handed_over": "the prefill instance transferred it",
    "no_pool": "the instance has no pool",
    "ended": "the request ended before the pool had answered",
    "unknown": "the reason is not known",
}
"""Each reason that a verdict may have, in a few words."""


@dataclass(frozen=True)
class Verdict:
    """Reason for a miss, or the result that there was none.

    Attributes:
        reason: one of ``REASONS``.
        sentence: text for operators, with numbers.
        details: numbers and names in the sentence, for programs.
    """

    reason: str
    sentence: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict for reports."""
        return asdict(self)
