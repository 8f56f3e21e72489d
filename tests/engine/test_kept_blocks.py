"""When the pool is asked to keep a block, and when not again."""

from __future__ import annotations

import time

import pytest

from engine.cache_hints import CacheHint
from engine.kept_blocks import KeptBlocks
from engine.request import Request, SamplingParams, Sequence


def sequence(*hints: CacheHint) -> Sequence:
    request = Request("r", tuple(range(40)), SamplingParams(max_tokens=1), hints=hints)
    return Sequence(request, 4)


def test_blocks_behind_the_hint_and_of_no_hint_are_saved_as_any_others() -> None:
    kept = KeptBlocks()
    assert list(kept.split_blocks(sequence(), 0, 10)) == [(0, 10, 0.0)]
    hinted = sequence(CacheHint(10, 600.0), CacheHint(24, 300.0))
    assert list(kept.split_blocks(hinted, 0, 10)) == [(0, 2, 600.0), (2, 6, 300.0), (6, 10, 0.0)]


def test_the_pool_is_asked_again_when_half_of_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    kept, hinted = KeptBlocks(), CacheHint(8, 600.0)
    assert list(kept.split_blocks(sequence(hinted), 0, 2)) == [(0, 2, 600.0)]
    assert list(kept.split_blocks(sequence(hinted), 0, 3)) == [(0, 3, 0.0)]
    now += 301
    assert list(kept.split_blocks(sequence(hinted), 0, 2)) == [(0, 2, 600.0)]


def test_blocks_that_the_pool_did_not_take_are_asked_for_next_time() -> None:
    kept, hinted = KeptBlocks(), sequence(CacheHint(12, 600.0))
    list(kept.split_blocks(hinted, 0, 3))
    kept.forget_blocks(hinted.hashes()[1:2])
    assert list(kept.split_blocks(hinted, 0, 3)) == [(0, 1, 0.0), (1, 2, 600.0), (2, 3, 0.0)]
